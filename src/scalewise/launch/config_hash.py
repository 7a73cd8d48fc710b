"""Config hash: identifies a job by the config values and input files that affect its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalewise import inputs
from scalewise.renamed_targets import FORMER_TARGETS, rename_targets
from scalewise.run_config import RunConfig
from scalewise.run_files import read_json, read_yaml

IGNORED_KEYS = (
    "name",
    "question",
    "overrides",
    "choices",  # the groups contain their values
    "launch",
    "tracking",
    "plan",
    "verify",
    "checkpoint",  # affects files only
    "trusted_packages",
    "hardware",  # affects plans only, except for the kind of device
    "resume",  # except for a path, which loads weights of another run
)
"""Config keys that do not affect the identity of a job."""
HASH_DIGITS = 16
ADDED_OPTIONS: dict[tuple[str, str], object] = {
    ("data", "folder"): "",
    ("model", "aux_loss"): 0.0,
    ("model", "balance_rate"): 0.0,
    ("model", "base_heads"): None,
    ("model", "base_width"): None,
    ("model", "capacity_factor"): None,
    ("model", "dense_layers"): 0,
    ("model", "routed_scaling"): 1.0,
    ("model", "kv_latent_dim"): None,
    ("model", "query_latent_dim"): None,
    ("model", "rope_head_dim"): None,
    ("model", "value_head_dim"): None,
    ("model", "expert_dim"): None,
    ("model", "experts"): None,
    ("model", "experts_per_token"): 2,
    ("model", "norm_topk"): True,
    ("model", "norm_placement"): "pre",
    ("model", "rope_method"): "llama3",
    ("model", "rope_attention_factor"): None,
    ("model", "rope_local_theta"): None,
    ("model", "no_rope_every"): None,
    ("model", "window"): None,
    ("model", "global_every"): None,
    ("model", "embedding_multiplier"): 1.0,
    ("model", "residual_multiplier"): 1.0,
    ("model", "attention_multiplier"): None,
    ("model", "attention_softcap"): None,
    ("model", "logit_softcap"): None,
    ("model", "logit_divisor"): 1.0,
    ("model", "qk_norm"): "none",
    ("model", "residual"): "sequential",
    ("model", "head_bias"): False,
    ("model", "rotary_fraction"): 1.0,
    ("model", "qkv_bias"): False,
    ("model", "router_score"): "softmax",
    ("model", "router_z_loss"): 0.0,
    ("model", "shared_experts"): 0,
    ("objective", "z_loss"): 0.0,
    ("optimizer", "lr_transfer"): "none",
    ("parallelism", "expert"): 1,
    ("parallelism", "one_rank_mesh"): False,
    ("parallelism", "shard"): "parameters",
    ("precision", "stochastic_rounding"): False,
    ("schedule", "rewarmup_steps"): 0,
    ("trainer", "batch_warmup"): {},
    ("trainer", "clip_percentile"): None,
    ("trainer", "skip_sigma"): None,
    ("trainer", "max_skipped_steps"): 10,
    ("trainer", "rolling_window"): 128,
    ("trainer", "sequence_warmup"): {},
}
"""Options since version 0.1.0 by group and key, with the default that is not part of the hash."""


def config_hash(run: RunConfig) -> str:
    """Config hash of a run, as 16 hexadecimal digits.

    Covers the device kind of ``hardware``, a path in ``resume``, and the content of input files
    (texts, tokens, tokenizer, weights) but not their location. Of remote files it covers the URLs,
    since their content is known after they are copied.
    """
    values = run.as_dict()
    return _hash_values(values, inputs.content_digests(values, remote=False))


def hash_of_folder(folder: Path) -> str | None:
    """Config hash of the run in a folder; None if it cannot be read.

    Read from ``status.json``; computed from ``resolved.yaml`` for folders of earlier versions.
    """
    recorded_hash: str | None = read_json(folder / "status.json").get("config_hash")
    if recorded_hash is not None:
        return recorded_hash
    values = read_yaml(folder / "resolved.yaml")
    if "hardware" not in values:
        return None
    return _hash_values(values, inputs.recorded_digests(folder))


def _hash_values(values: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    # Class paths are hashed as written by version 0.1.0, so that hashes of its jobs still match.
    values = rename_targets(inputs.with_digests(values, digests), FORMER_TARGETS)
    hash_input = {key: value for key, value in values.items() if key not in IGNORED_KEYS}
    for (group, key), default in ADDED_OPTIONS.items():
        if hash_input[group].get(key) == default:
            hash_input[group] = {k: v for k, v in hash_input[group].items() if k != key}
    hash_input["device"] = values["hardware"].get("device")
    resume = values.get("resume")
    hash_input["from"] = None if resume in ("last", "auto") else resume
    text = json.dumps(hash_input, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def is_same_job(varied: Mapping[str, str], other_varied: Mapping[str, str]) -> bool:
    """Whether two jobs with equal config hashes are the same, by the values that the sweeps vary.

    A sweep may vary ignored keys: ``launch.memory_limit_gib=1,2`` results in two jobs.
    """
    ignored_keys = (
        key for key in varied.keys() & other_varied.keys() if key.split(".")[0] in IGNORED_KEYS
    )
    return all(varied[key] == other_varied[key] for key in ignored_keys)
