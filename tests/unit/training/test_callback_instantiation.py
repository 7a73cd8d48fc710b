"""Callbacks by name: construction, order and rejections."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import EarlyStopping, Timer

from scalewise.errors import ConfigError
from scalewise.launch.job import JobSpec, execute
from scalewise.run_config import RunConfig
from scalewise.training.callbacks.ema import EMAWeightAveraging
from scalewise.training.callbacks.fault_injection import InjectException
from scalewise.training.callbacks.loss_guard import LossGuard
from scalewise.training.callbacks.profiler import Profiler
from scalewise.training.import_class import instantiate_callbacks

NAMES = "lightning.pytorch.callbacks"


def test_callback_options_build_their_callbacks(compose: Callable[..., RunConfig]) -> None:
    run = compose("callbacks=[guard,early_stopping,ema,profiler]", "+inject=raise")
    kinds = [LossGuard, EarlyStopping, EMAWeightAveraging, Profiler, InjectException]
    assert [type(callback) for callback in instantiate_callbacks(run)] == kinds
    assert instantiate_callbacks(compose("callbacks=none")) == []


def test_callback_arguments_are_passed(compose: Callable[..., RunConfig]) -> None:
    run = compose(
        "callbacks=none",
        f"+callbacks.timer._target_={NAMES}.Timer",
        "+callbacks.timer.duration={minutes: 3}",
    )
    (timer,) = instantiate_callbacks(run)
    assert isinstance(timer, Timer)
    assert timer.time_remaining() == 180


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["x._target_=lightning.nowhere.X"], "x._target_", "cannot be imported"),
        ([f"x._target_={NAMES}.Nothing"], "x._target_", "cannot be imported"),
        ([f"x._target_={NAMES}.Timer", "x.weeks=1"], "x", "rejects these"),
        (["x._target_=lightning.pytorch.callbacks.EarlyStopping"], "x", "missing a required"),
        (["x._target_=antigravity_of_nobody.X", "x.a=1"], "x._target_", "cannot be imported"),
        (
            ["x._target_=torch.nn.Identity"],
            "x._target_",
            "is not a subclass of lightning.pytorch.Callback",
        ),
        (
            ["x._target_=torch.hub.load"],
            "x._target_",
            "is not a subclass of lightning.pytorch.Callback",
        ),
        (
            [f"x._target_={NAMES}.WeightAveraging"],
            "x._target_",
            "replaces the trained weights by an average",
        ),
        (
            [f"x._target_={NAMES}.EMAWeightAveraging"],
            "x._target_",
            "replaces the trained weights by an average",
        ),
        (
            [f"x._target_={NAMES}.StochasticWeightAveraging", "x.swa_lrs=0.1"],
            "x._target_",
            "replaces the trained weights by an average",
        ),
        ([f"x._target_={NAMES}.Timer", "x.duration=soon"], "x", "rejects these"),
        (["x._target_=lightning.os.system"], "x._target_", "cannot be imported"),
        (["x._target_=torch.os.system"], "x._target_", "cannot be imported"),
        (["x._target_=torch.os"], "x._target_", "is not a subclass of lightning.pytorch.Callback"),
        (["x._target_=torch.utils.bottleneck.__main__.X"], "x._target_", "which is a program"),
    ],
)
def test_callback_that_cannot_be_built_is_rejected(
    compose: Callable[..., RunConfig], overrides: list[str], key: str, reason: str
) -> None:
    trusted = "trusted_packages=[antigravity_of_nobody]"
    run = compose(trusted, *(f"++callbacks.{override}" for override in overrides))
    with pytest.raises(ConfigError) as excinfo:
        instantiate_callbacks(run)
    (issue,) = excinfo.value.issues
    assert issue.key == f"callbacks.{key}"
    assert reason in issue.reason


@pytest.mark.parametrize(
    "overrides",
    [
        [f"_target_={NAMES}.Timer", "duration=12:90:00"],
        [f"_target_={NAMES}.EarlyStopping", "monitor=val/loss", "mode=least"],
        [f"_target_={NAMES}.EMAWeightAveraging"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_callback_is_rejected_before_a_folder_exists(
    compose: Callable[..., RunConfig], overrides: list[str], tmp_path: Path
) -> None:
    run = compose("callbacks=none", *(f"+callbacks.x.{override}" for override in overrides))
    with pytest.raises(ConfigError, match=r"callbacks\.x"):
        execute(JobSpec(run), tmp_path / "runs" / "job")
    assert not any(tmp_path.iterdir())


def test_callback_issues_are_reported_at_once(compose: Callable[..., RunConfig]) -> None:
    overrides = [f"+callbacks.{name}._target_=torch.nowhere.X" for name in ("x", "y")]
    run = compose(*overrides)
    with pytest.raises(ConfigError) as excinfo:
        instantiate_callbacks(run)
    assert len(excinfo.value.issues) == 2


def test_callback_of_an_untrusted_package_is_rejected(
    compose: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_callback = type("Foreign", (Timer,), {"__module__": "elsewhere.callbacks"})
    monkeypatch.setattr("lightning.pytorch.callbacks.Foreign", foreign_callback, raising=False)
    target = f"+callbacks.x={{_target_:{NAMES}.Foreign,duration:{{minutes:1}}}}"
    with pytest.raises(ConfigError, match=r"'elsewhere', which is not trusted; .*\[elsewhere\]"):
        instantiate_callbacks(compose(target))
    assert instantiate_callbacks(compose(target, "trusted_packages=[elsewhere]"))


def test_callback_imports_only_trusted_packages(
    compose: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "from lightning.pytorch import Callback\nclass Here(Callback): pass\n"
    for package in ("peft_absent_here", "mine_in_this_folder"):
        Path(f"{package}.py").write_text(code)
    monkeypatch.setattr(
        "scalewise.validation.trusted_imports.TRUSTED_PACKAGES", ("peft_absent_here",)
    )
    with pytest.raises(ConfigError, match="cannot be imported"):
        instantiate_callbacks(
            compose("callbacks=none", "+callbacks.x._target_=peft_absent_here.Here")
        )
    override = "+callbacks.x._target_=mine_in_this_folder.Here"
    assert instantiate_callbacks(
        compose("callbacks=none", override, "trusted_packages=[mine_in_this_folder]")
    )
