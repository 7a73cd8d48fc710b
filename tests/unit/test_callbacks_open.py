"""The open group: callbacks by name, made in order, every refusal with its reason."""

from collections.abc import Callable

import pytest
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, Timer

from scalewise.errors import ConfigError
from scalewise.run import Run
from scalewise.training.callbacks.guard import LossGuard
from scalewise.training.callbacks.inject import Raise
from scalewise.training.callbacks.open import instantiated
from scalewise.training.callbacks.profiler import Profiler

NAMES = "lightning.pytorch.callbacks"


def test_every_option_makes_its_callback(compose: Callable[..., Run]) -> None:
    run = compose("callbacks=[guard,early_stopping,ema,profiler]", "+inject=raise")
    kinds = [LossGuard, EarlyStopping, EMAWeightAveraging, Profiler, Raise]
    assert [type(callback) for callback in instantiated(run)] == kinds
    assert instantiated(compose("callbacks=none")) == []


def test_arguments_arrive(compose: Callable[..., Run]) -> None:
    run = compose(
        "callbacks=none",
        f"+callbacks.timer._target_={NAMES}.Timer",
        "+callbacks.timer.duration={minutes: 3}",
    )
    (timer,) = instantiated(run)
    assert isinstance(timer, Timer)
    assert timer.time_remaining() == 180


@pytest.mark.parametrize(
    ("lines", "key", "reason"),
    [
        (["x._target_=lightning.nowhere.X"], "x._target_", "cannot be imported"),
        ([f"x._target_={NAMES}.Nothing"], "x._target_", "cannot be imported"),
        ([f"x._target_={NAMES}.Timer", "x.weeks=1"], "x", "refuses these"),
        (["x._target_=lightning.pytorch.callbacks.EarlyStopping"], "x", "missing a required"),
        (["x._target_=antigravity_of_nobody.X", "x.a=1"], "x._target_", "cannot be imported"),
        (["x._target_=torch.nn.Identity"], "x._target_", "is no lightning.pytorch Callback"),
        (["x._target_=torch.hub.load"], "x._target_", "is no lightning.pytorch Callback"),
    ],
)
def test_what_cannot_be_made_is_refused(
    compose: Callable[..., Run], lines: list[str], key: str, reason: str
) -> None:
    trusted = "trusted_packages=[antigravity_of_nobody]"
    run = compose(trusted, *(f"++callbacks.{line}" for line in lines))
    with pytest.raises(ConfigError) as caught:
        instantiated(run)
    (complaint,) = caught.value.complaints
    assert complaint.key == f"callbacks.{key}"
    assert reason in complaint.reason


def test_all_refusals_come_at_once(compose: Callable[..., Run]) -> None:
    lines = [f"+callbacks.{name}._target_=torch.nowhere.X" for name in ("x", "y")]
    run = compose(*lines)
    with pytest.raises(ConfigError) as caught:
        instantiated(run)
    assert len(caught.value.complaints) == 2
