"""What the machine or environment lacks: key, reason and fix."""

import pytest
from fixtures.rejections import (
    REJECTION_FIELDS,
    RejectionCase,
    assert_rejected,
    overrides_id,
    rejection_issues,
)

from scalewise.config.compose import compose
from scalewise.errors import ConfigError
from scalewise.hardware import Machine
from scalewise.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("cpu_machine", "example_files")

MACHINE: list[RejectionCase] = [
    (["hardware=h100"], "hardware", "requires a CUDA device", "hardware=auto"),
    (["precision=fp16_mixed"], "precision", "silently uses bf16", "precision=bf16_mixed"),
    (["precision.compute=fp16"], "precision.compute", "silently uses bf16", "bf16_mixed"),
    (
        ["hardware=cpu", "hardware.bf16_tflops=0", "precision=fp16_mixed"],
        "precision",
        "silently uses bf16",
        "precision=fp32",
    ),
    (["resume=/no/where"], "resume", "no such checkpoint folder", "resume=null"),
    (
        ["parallelism=ddp", "parallelism.replicas=64"],
        "parallelism",
        "at most 8",
        "reduce the number of ranks",
    ),
]


@pytest.mark.parametrize(REJECTION_FIELDS, MACHINE, ids=overrides_id)
def test_machine_issue_names_key_reason_and_fix(
    overrides: list[str], key: str, reason: str, fix: str
) -> None:
    assert_rejected(overrides, key, reason, fix)


@pytest.mark.parametrize(
    ("variable", "value", "messages", "reason"),
    [
        ("WANDB_MODE", "nonsense", [], "one of online, offline, disabled"),
        ("WANDB_MODE", "nonsense", ["tracking=none"], ""),
        ("WANDB_MODE", " Online ", [], ""),
        ("WANDB_MODE", "", [], ""),
        ("WANDB_BASE_URL", "localhost:8080", [], "is not a server URL"),
        ("WANDB_BASE_URL", "http://host:port", [], "is not a server URL"),
        ("WANDB_BASE_URL", "https://", [], "is not a server URL"),
        ("WANDB_BASE_URL", "http://localhost:8080", [], ""),
    ],
)
def test_invalid_wandb_variables_are_rejected(
    variable: str, value: str, messages: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    if not reason:
        compose(messages)
        return
    (issue,) = rejection_issues(messages)
    assert issue.key == variable
    assert reason in issue.reason
    assert "unset it" in issue.fix


def test_plan_accepts_a_device_of_another_machine() -> None:
    for overrides, *_ in MACHINE:
        assert isinstance(compose(overrides, check_machine=False), RunConfig), overrides


@pytest.mark.parametrize(
    ("gpus", "overrides", "reason"),
    [
        (("NVIDIA H100 80GB HBM3",), ["hardware=a100_80g"], "this machine, which has NVIDIA H100"),
        (("NVIDIA H100",), ["parallelism=ddp", "parallelism.replicas=2"], "2 devices; this"),
        (("Tesla V100-SXM2-32GB",), ["hardware=v100", "precision=bf16_mixed"], "no bf16"),
    ],
)
def test_another_device_than_configured_is_rejected(
    gpus: tuple[str, ...], overrides: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hardware", "run_config", "validation.run_issues"):
        machine = Machine(gpus, "", 8, 2**34)
        monkeypatch.setattr(f"scalewise.{module}.this_machine", lambda machine=machine: machine)
    (issue,) = rejection_issues(overrides)
    assert reason in issue.reason


@pytest.mark.parametrize(
    ("gpus", "overrides", "reason", "variable"),
    [
        (("NVIDIA H100",), ["hardware=h100"], "requires gcc or clang", "CC"),
        ((), ["hardware=cpu", "compile=block"], "requires g++ or clang++", "CXX"),
    ],
)
def test_compilation_without_a_compiler_is_rejected(
    gpus: tuple[str, ...],
    overrides: list[str],
    reason: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also that of compile=auto on CUDA, before the first step fails in Triton."""
    for module in ("hardware", "run_config", "validation.run_issues"):
        machine = Machine(gpus, "", 8, 2**34)
        monkeypatch.setattr(f"scalewise.{module}.this_machine", lambda machine=machine: machine)
    monkeypatch.delenv(variable, raising=False)
    compose(overrides)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (issue,) = rejection_issues(overrides)
    assert (issue.key, issue.reason.startswith(reason)) == ("compile", True)
    compose([*overrides, "compile=none"])
    compose([*overrides, "compile.backend=aot_eager"])
    monkeypatch.setenv(variable, "compiler")
    compose(overrides)


@pytest.mark.parametrize(("hardware", "precision"), [("cpu", "fp32"), ("v100", "fp16_mixed")])
def test_device_without_bf16_is_sent_to_a_precision_that_it_accepts(
    hardware: str, precision: str
) -> None:
    overrides = [f"hardware={hardware}", "hardware.bf16_tflops=0"]
    with pytest.raises(ConfigError) as excinfo:
        compose([*overrides, "precision=bf16_mixed"], check_machine=False)
    (issue,) = excinfo.value.issues
    assert issue.fix == f"set precision={precision}"
    compose([*overrides, issue.fix.removeprefix("set ")], check_machine=False)
