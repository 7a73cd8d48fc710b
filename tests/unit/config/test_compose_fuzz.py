"""Random overrides compose or are rejected within a time limit."""

import time
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scalewise import registry
from scalewise.config import paths
from scalewise.config.compose import compose, flatten
from scalewise.config.diagnostics import diagnose_overrides
from scalewise.errors import ConfigError
from scalewise.run_config import RunConfig

MAX_SLOWDOWN = 8
"""Largest ratio of the processor time of any overrides to that of the defaults."""
MAX_SECONDS = 0.5
"""Processor time in seconds below which the ratio is not checked."""

KEYS = [
    key for key in flatten(compose(check_machine=False).as_dict()) if not key.startswith("choices")
]
GROUPS = [*paths.GROUPS, "experiment", "sweep", "inject", "hydra/launcher", "schema/model"]
OPTIONS = [
    name for group in (*paths.GROUPS, "experiment", "sweep") for name in paths.option_names(group)
]


@st.composite
def mistyped(draw: st.DrawFn) -> str:
    """Draw an existing key with one character removed, doubled or inserted."""
    key = draw(st.sampled_from(KEYS + GROUPS))
    position = draw(st.integers(0, len(key) - 1))
    return key[:position] + draw(st.sampled_from(["", key[position] * 2, ".", "_", "é", "0"])) + (
        key[position + 1 :]
    )  # fmt: skip


scalars = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-3, 9).map(str),
    st.floats().map(str),
    st.sampled_from(["nan", "inf", "-inf", "null", "true", "1e999", "0x1f", "1_000", "9" * 400]),
    st.sampled_from(OPTIONS),
    st.sampled_from(
        ["${oc.env:HOME}", "${x}", "${name}", "${..a}", "${model}", "${optimizer.lr}", "???", "${"]
    ),
    st.sampled_from(["''", '"', "'a, b'", "\\'", "a\\,b", "'\\", "\t", "a b", "../..", "/", "."]),
    st.text(max_size=8),
    st.text(alphabet="äß漢🚀\u202e\u0000\ud800 \n=,:{}[]()$'\"\\", max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]"),
        st.lists(st.tuples(scalars, inner), max_size=3).map(
            lambda parts: "{" + ",".join(f"{key}:{value}" for key, value in parts) + "}"
        ),
        st.lists(inner, min_size=2, max_size=3).map(",".join),
        st.tuples(st.sampled_from(["choice", "range", "glob", "sort", "str", "int"]), inner).map(
            lambda call: f"{call[0]}({call[1]})"
        ),
    ),
    max_leaves=4,
)
keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(GROUPS),
    mistyped(),
    st.sampled_from(
        ["callbacks.x._target_", "hydra.run.dir", "hydra", "model@x", "a.b.c", "_target_"]
    ),
    st.text(max_size=6),
)
overrides = st.one_of(
    st.builds(
        lambda sign, key, equals, value: sign + key + equals + value,
        st.sampled_from(["", "", "", "+", "++", "~", "-", "--"]),
        keys,
        st.sampled_from(["=", "=", "=", "", "==", "= "]),
        values,
    ),
    st.text(max_size=12),
)
override_lists = st.lists(overrides, min_size=1, max_size=3)


def timed_compose(overrides: list[str]) -> tuple[RunConfig | ConfigError, float]:
    """Result of composing the overrides, and its processor time."""
    start_time = time.process_time()
    answer: RunConfig | ConfigError
    try:
        answer = compose(overrides)
    except ConfigError as error:
        answer = error
    return answer, time.process_time() - start_time


def assert_composes_or_rejects(overrides: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer, seconds = timed_compose(overrides)
        if seconds >= MAX_SECONDS:  # a busy machine is slow once, slow overrides always
            default_seconds = min(timed_compose([])[1] for _ in range(3))
            assert (
                min(timed_compose(overrides)[1] for _ in range(3)) < MAX_SLOWDOWN * default_seconds
            )
    if isinstance(answer, ConfigError):
        assert answer.issues
        for issue in answer.issues:
            assert issue.reason.strip(), issue
            assert str(issue).isprintable(), issue
            str(issue).encode()


@settings(max_examples=4)
@given(override_lists)
@example(["optimizer.lr=1" + "0" * 400])
@example(["model.width=1" + "0" * 5000])
@example(["question=" + "[" * 3000])
@example(["x" * 5000 + "=1"])
@example(["model=\x00"])
@example(["hydra.sweeper.params.x=1"])
@example(["hydra=null"])
@example(["seed=${seed}", "name=${name}"])
@example(["optimizer.lr=${name}"])
@example(["model.layers=${model}"])
@example(["tracking.tags=${trusted_packages}"])
@example(["trusted_packages=${optimizer.lr}"])
@example(["tracking.tags=[${model}]"])
@example(["tracking.tags=${model}"])
@example(["callbacks=${model}"])
@example(["~hydra"])
@example(["hydra.job.name=null"])
@example(["\u00a0"])
@example(["+callbacks.x._target_=[]"])
@example(["model@x={}", "model@x={}", "é"])
@example(["optimizer.lr=1\u2009e-3"])
def test_random_overrides_compose_or_are_rejected(overrides: list[str]) -> None:
    assert_composes_or_rejects(overrides)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(max_examples=600, derandomize=False)
@given(override_lists)
def test_many_random_overrides_compose_or_are_rejected(overrides: list[str]) -> None:
    assert_composes_or_rejects(overrides)


@settings(max_examples=10)
@given(st.sampled_from(KEYS), values)
def test_rejected_value_is_reported_under_its_key(key: str, value: str) -> None:
    override = f"{key}={value}"
    try:
        compose([override], check_machine=False)
    except ConfigError as error:
        group = key.split(".")[0]
        issue_groups = {issue.key.split(".")[0] for issue in error.issues}
        unreadable = any("override" in issue.reason for issue in error.issues)
        related_keys = {"data", "trainer", "schedule", "model", "name", "precision"}
        assert unreadable or issue_groups & {group, *related_keys}


@settings(max_examples=10)
@given(st.lists(overrides, max_size=3))
def test_diagnosis_never_raises(override_list: list[str]) -> None:
    registry.import_options()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for issue in diagnose_overrides(override_list):
            assert issue.reason, issue
