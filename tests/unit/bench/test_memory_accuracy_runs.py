"""The runs of ``bench ledger`` cover every option that changes memory."""

from __future__ import annotations

import pytest

from scalewise import compose
from scalewise.bench.deepspeed_accuracy_runs import ZERO
from scalewise.bench.memory_accuracy_runs import SMALL, TRAINED, TRAINED_SELDOM
from scalewise.config import paths

GROUPS = (
    "adapter",
    "compile",
    "memory",
    "objective",
    "optimizer",
    "parallelism",
    "precision",
    "quantization",
)
UNMEASURED_OPTIONS = {
    "compile=none": "is compile=auto on the CPU, the default",
    "memory=auto": "settles on one of the others",
    "objective=captioning": "known by trace, which is held against what is measured",
    "objective=module": "known by trace, which is held against what is measured",
    "objective=seq2seq": "known by trace, which is held against what is measured",
    "optimizer=module": "a user's own, of a module that is known by trace",
    "parallelism=deepspeed_zero2_offload": "takes code that is compiled for the machine",
    "parallelism=deepspeed_zero3_offload": "takes code that is compiled for the machine",
    "parallelism=deepspeed_zero3_nvme": "takes code that is compiled for the machine",
    "precision=fp16_mixed": "is not computed on the CPU",
}


def chosen_options() -> set[str]:
    """Options of all measured runs, including the default ones."""
    default_choices = compose(SMALL).choices
    run_options = {
        override for overrides in (*TRAINED, *TRAINED_SELDOM, *ZERO) for override in overrides
    }
    return run_options | {f"{group}={default_choices[group]}" for group in GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_memory_accuracy_runs_cover_every_option(group: str) -> None:
    options = {f"{group}={name}" for name in paths.option_names(group)}
    unmeasured = {option for option in UNMEASURED_OPTIONS if option.startswith(f"{group}=")}
    assert options - chosen_options() == unmeasured
