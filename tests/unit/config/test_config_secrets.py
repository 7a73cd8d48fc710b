"""Configs never contain a secret, whether typed or interpolated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fixtures.secrets import remove_secrets

from scalewise.config.app import Command, run_command
from scalewise.config.compose import compose as compose_lines
from scalewise.config.parse import parse_group
from scalewise.errors import ConfigError
from scalewise.launch.config_hash import config_hash
from scalewise.redaction import HIDDEN
from scalewise.run_config import RunConfig

pytestmark = pytest.mark.usefixtures("cpu_machine")

LINES_WITH_SECRETS = (
    "question=x${oc.env:DB_PASS}",
    "question='${oc.decode:${oc.env:DB_PASS}}'",
    "question=hunter2-prod-9931",
    "tracking.tags=[a,x-hunter2-prod-9931]",
    "name=hunter2-prod-9931",
    "+callbacks.guard.x={hunter2-prod-9931:1}",
    "optimizer.lr=hunter2-prod-9931",
    "hunter2-prod-9931=3",
    "tracking.notes=hf_abcdefghijklmnopqrst",
    "tracking.notes='https://u:pw@host/x'",
    "hydra.job.env_copy=[DB_PASS]",
    "question=${oc.env:ODD}",
    "question=${oc.env:WORD_PASS}",
    "question=${oc.env:LOGIN_PIN}",
    "question=${oc.env:LIBPQ}",
    "question=${oc.env:STORE}",
    "question=${oc.env:LOG_KEY2}",
    "hydra.run.dir=runs/${oc.env:DB_PASS}",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environment with known secrets and no others."""
    remove_secrets(monkeypatch, tmp_path)
    monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
    monkeypatch.setenv("ODD", "Zk3nQ9vX2mB7tR5wY8cL1pD4")
    monkeypatch.setenv("WORD_PASS", "letmein")
    monkeypatch.setenv("LOGIN_PIN", "1234")
    monkeypatch.setenv("LIBPQ", "host=db password='it is me'")
    monkeypatch.setenv("STORE", "base64:Zk3nQ9vX2mB7tR5wY8cL1pD4Zk3nQ9vX2mB7tR5wY8c=")
    monkeypatch.setenv("LOG_KEY2", "plain")


@pytest.mark.parametrize("overrides", LINES_WITH_SECRETS)
def test_override_with_a_secret_is_rejected(overrides: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        run_command(Command(), [overrides])
    assert "secret" in str(excinfo.value)
    for secret in ("hunter2", "hf_abc", "u:pw", "Zk3n", "letmein", "1234", "it is me"):
        assert secret not in str(excinfo.value), secret
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "question",
    [
        "${oc.${tracking.project}:DB_PASS}",
        "${oc.env:${oc.decode:DB_PASS}}",
        "${oc.env:${.tracking.notes}}",
        "${oc.decode:'${oc.${tracking.project}:DB_PASS}'}",
        "${hydra:job.env_set.DB_PASS}",
        "${oc.dict.values:..callbacks}",
    ],
)
def test_experiment_file_cannot_assemble_a_secret(question: str) -> None:
    Path("own/experiments").mkdir(parents=True)
    content = {"tracking": {"project": "env", "notes": "DB_PASS"}, "question": question}
    Path("own/experiments/x.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as excinfo:
        run_command(Command(), ["-cd", "own", "experiment=x"])
    assert "hunter2" not in str(excinfo.value)


def test_override_without_a_secret_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLUSTER", "north-2")
    monkeypatch.setenv("TOKEN_FOLDER", str(tmp_path))
    config_overrides = ["question='${oc.env:CLUSTER} ${oc.env:TOKEN_FOLDER} ${oc.env:ABSENT,none}'"]
    assert compose_lines(config_overrides).question == f"north-2 {tmp_path} none"


def test_config_hash_does_not_depend_on_a_secret(
    compose: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config_hash(compose_lines(["seed=1"]))
    monkeypatch.setenv("DB_PASS", "another-0042")
    assert config_hash(compose_lines(["seed=1"])) == before


def test_redacted_value_is_not_trained_with(compose: Callable[..., RunConfig]) -> None:
    record = dict(compose_lines(["seed=1"]).as_dict()["data"])  # type: ignore[call-overload]
    key = next(key for key, value in record.items() if key != "_target_")
    with pytest.raises(ConfigError, match="was a secret, which is not recorded"):
        parse_group("data", record | {key: f"https://{HIDDEN}@host"})
