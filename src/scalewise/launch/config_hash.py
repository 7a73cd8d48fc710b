"""What makes two jobs the same: a hash of all that determines a result, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalewise import inputs
from scalewise.config.renamed_targets import FORMER_TARGETS, rename_targets
from scalewise.run_config import RunConfig
from scalewise.tracking.run_files import read_json, read_yaml

LEFT_OUT = (
    "name",
    "question",
    "overrides",
    "choices",  # their values are in the groups
    "launch",
    "tracking",
    "plan",
    "checkpoint",  # what is kept on the disk
    "trusted_packages",
    "hardware",  # figures for planning, some read off the machine of the moment; but for its kind
    "resume",  # but for a path: it brings weights of another run
)
"""Parts of a run that a finished job may differ in and still be the job that is asked for."""
DIGITS = 16


def config_hash(run: RunConfig) -> str:
    """Returns 16 hex digits that differ where results would.

    Of ``hardware`` the kind of device counts, and of ``resume`` a path. Of input files (texts,
    tokens, a tokenizer, weights) their content counts, wherever they lie.
    """
    values = run.as_dict()
    return _hash_values(values, inputs.content_digests(values))


def hash_of_folder(folder: Path) -> str | None:
    """Returns the hash of the job that a run folder holds; None if it cannot be read.

    ``status.json`` states it. Folders of earlier versions are hashed from ``resolved.yaml``.
    """
    stated: str | None = read_json(folder / "status.json").get("config_hash")
    if stated is not None:
        return stated
    values = read_yaml(folder / "resolved.yaml")
    if "hardware" not in values:
        return None
    return _hash_values(values, inputs.recorded_digests(folder))


def _hash_values(values: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    # Class paths count as version 0.1.0 wrote them, so that its jobs are found again.
    values = rename_targets(inputs.with_digests(values, digests), FORMER_TARGETS)
    told = {key: value for key, value in values.items() if key not in LEFT_OUT}
    told["device"] = values["hardware"].get("device")
    resume = values.get("resume")
    told["from"] = None if resume in ("last", "auto") else resume
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def is_same_job(varied: Mapping[str, str], other_varied: Mapping[str, str]) -> bool:
    """Returns whether two jobs of one hash are the same, by what their sweeps varied.

    A sweep may vary what the hash leaves out: ``launch.memory_limit_gib=1,2`` makes two jobs.
    """
    shared = (key for key in varied.keys() & other_varied.keys() if key.split(".")[0] in LEFT_OUT)
    return all(varied[key] == other_varied[key] for key in shared)
