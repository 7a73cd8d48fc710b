"""Secrets of the environment are replaced by value; what merely looks similar is not."""

import json
import os
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest
import yaml

from scalewise import output, redaction
from scalewise.config.compose import compose as compose_lines
from scalewise.config.door import Verb, open_door
from scalewise.config.read import part
from scalewise.errors import ConfigError
from scalewise.launch.config_hash import config_hash
from scalewise.redaction import HIDDEN, is_secret_name, redacted, redacted_tree
from scalewise.run import Run
from scalewise.tracking import connection
from scalewise.tracking.files import write_json, write_text

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without secrets, and a home without key files."""
    for name in list(os.environ):
        if is_secret_name(name) or name.startswith(("WANDB_", "HF_", "NETRC")):
            monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(redaction, "_remembered", set())
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "secrets"),
    [
        ("WANDB_API_KEY", HEX, [HEX]),
        ("DB_PASS", "hunter2", ["hunter2"]),
        ("DB_PASS", "correct-horse-battery-staple", ["correct-horse-battery-staple"]),
        ("GH_AUTH", "Bearer abCD1234efGH5678", ["abCD1234efGH5678"]),
        ("SESSION_COOKIE", "sid=9f8e7d6c5b4a3210; theme=dark", ["9f8e7d6c5b4a3210"]),
        ("DATABASE_URL", "postgres://app:s3cr3tPW99@db/x", ["s3cr3tPW99"]),
        ("DATABASE_URL", "postgres://app:p%40ss/w0rd@db/x", ["p%40ss/w0rd", "p@ss/w0rd"]),
        ("LIBPQ", "host=db user=app password=s3cr3tPW99", ["s3cr3tPW99"]),
        ("STORAGE", "AccountName=x;AccountKey=ab12+cd34/ef56==;", ["ab12+cd34/ef56=="]),
        ("SENTRY_DSN", f"https://{HEX}@o1.ingest.example/5", [HEX]),
        ("SERVER", "https://host/x?access_token=ab12cd34&page=2", ["ab12cd34"]),
        ("CHAT_WEBHOOK", "https://chat.example/services/T0A1/cCdDeEfF3344", ["cCdDeEfF3344"]),
        ("NOTIFY", "https://hooks.slack.com/services/T0A1B2/cCdDeEfF3344", ["cCdDeEfF3344"]),
        ("ANYTHING", "Zk3nQ9vX2mB7tR5wY8cL1pD4", ["Zk3nQ9vX2mB7tR5wY8cL1pD4"]),
        ("ANYTHING", "hf_abcdefghijklmnopqrst", ["hf_abcdefghijklmnopqrst"]),
        ("ANYTHING", "sk-proj-a1B2c3D4e5F6g7H8i9", ["sk-proj-a1B2c3D4e5F6g7H8i9"]),
        ("CLOUD_CREDENTIALS", '{"private_key": "line-one-0123456789\\nline-two-0123456789"}',
         ["line-one-0123456789", "line-two-0123456789"]),
        ("APP_SECRET", 'quote"<&\'back\\slash', ['quote"<&\'back\\slash']),
    ],
)  # fmt: skip
def test_a_secret_is_replaced_in_every_form(
    name: str, value: str, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for secret in secrets:
        forms = [secret, json.dumps(secret), json.dumps(secret, ensure_ascii=False)]
        forms += [escape(secret), repr(secret), yaml.safe_dump({"x": secret}), f"({secret})"]
        for form in forms:
            assert secret not in redacted(form), form
            assert HIDDEN in redacted(form), form


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASS", "true"),
        ("DB_PASS", "corpus"),
        ("DB_PASS", "postgres"),
        ("SORT_KEY", "decoder_nano"),
        ("SORT_KEY", "train/loss"),
        ("MAX_TOKENS", "1048576123456789"),
        ("PARTITION_KEY", "20261125"),
        ("PARTITION_KEY", "2026-11-25"),
        ("STEP_KEY", "0.0003"),
        ("STEP_KEY", "3e-4"),
        ("API_KEY", "x1"),
        ("HOME_KEY", "~"),
        ("SSH_AUTH_SOCK", "/tmp/agent.1234567"),
        ("HF_TOKEN_PATH", "/nowhere/at/all/token-9"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("GIT_AUTHOR_NAME", "Jane 2nd Doe"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("PWD", "/data/run-2026/x1"),
        ("GIT_COMMIT", HEX),
        ("MODEL", "Meta-Llama-3.1-8B-Instruct"),
        ("FOLDER", "/data/sk-learn-datasets-of-2024/hf-internal-testing"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("SLURM_JOB_NAME", "MyLongExperimentNameForTheRun2026"),
        ("SERVER", "https://jane@host.example:8080/x?page=2"),
    ],
)
def test_ordinary_values_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert redacted(f"x {value} y") == f"x {value} y"


def test_a_short_secret_is_replaced_only_as_a_whole_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "llama3")
    assert redacted("llama3 llama3_8b xllama3 llama3.") == f"{HIDDEN} llama3_8b xllama3 {HIDDEN}."


def test_names_of_user_and_home_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    redaction._ordinary.cache_clear()
    monkeypatch.setattr("getpass.getuser", lambda: "jane42doe")
    monkeypatch.setenv("MY_KEY", "jane42doe")
    assert redacted("of jane42doe") == "of jane42doe"
    redaction._ordinary.cache_clear()


@pytest.mark.parametrize(
    ("file", "content", "secret"),
    [
        (".netrc", f"machine api.wandb.ai login user password {HEX}\n", HEX),
        (".netrc", f"machine api.wandb.ai\n  login user\n  password {HEX}", HEX),
        ("huggingface/token", "hf0abcdefghijklmnopqrst\n", "hf0abcdefghijklmnopqrst"),
        (".config/wandb/settings", "[default]\nbase_url = https://u:s3cr3tPW99@h\n", "s3cr3tPW99"),
        ("wandb/settings", f"[default]\napi_key = {HEX}\n", HEX),
    ],
    ids=["netrc", "netrc-lines", "hub", "wandb-home", "wandb-here"],
)
def test_key_files_are_read(file: str, content: str, secret: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    assert secret in redacted(secret)
    path.write_text(content)
    assert redacted(f"a {secret}") == f"a {HIDDEN}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in (
            "WANDB_API_KEY", "apiKey", "DB_PASS", "PGPASSWORD", "GH_AUTH", "hub_token", "MYSQL_PWD",
            "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS", "SENTRY_DSN", "SLACK_WEBHOOK", "HUB_PAT",
        )),
        *((name, False) for name in (
            "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "tokens", "eos_token",
            "KEYBOARD", "COMPAT", "XAUTHORITY", "HF_TOKEN_PATH", "PASSWORD_STORE_DIR", "",
        )),
    ],
)  # fmt: skip
def test_names(name: str, expected: bool) -> None:
    assert is_secret_name(name) == expected


def test_files_and_lines_hold_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
    write_json(tmp_path / "a.json", {"hunter2-prod-9931": ["x hunter2-prod-9931"]})
    write_text(tmp_path / "a.txt", "hunter2-prod-9931")
    with output.shielded():
        print("hunter2-prod-9931", "is", "9931")
    files = [path.read_text() for path in tmp_path.glob("a.*")]
    assert not any("hunter2" in text for text in [*files, *capsys.readouterr()])
    assert json.loads((tmp_path / "a.json").read_text()) == {HIDDEN: [f"x {HIDDEN}"]}
    assert redacted_tree({"hunter2-prod-9931": ("hunter2-prod-9931", 3)}) == {HIDDEN: [HIDDEN, 3]}


def test_a_captured_console_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B captures the console by replacing ``write``."""
    import sys

    monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
    seen: list[str] = []
    with output.shielded():
        write = sys.stdout.write
        monkeypatch.setattr(sys.stdout, "write", lambda text: (seen.append(text), write(text))[1])
        print("is hunter2-prod-9931")
    assert "".join(seen) == f"is {HIDDEN}\n"


@pytest.mark.usefixtures("workstation")
class TestConfig:
    """A run never holds a secret: neither what is typed nor what interpolations put together."""

    LINES = (
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
        "hydra.run.dir=runs/${oc.env:DB_PASS}",
    )

    @pytest.fixture(autouse=True)
    @staticmethod
    def planted(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
        monkeypatch.setenv("ODD", "Zk3nQ9vX2mB7tR5wY8cL1pD4")

    @pytest.mark.parametrize("line", LINES)
    def test_a_line_with_a_secret_is_rejected(self, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            open_door(Verb(), [line])
        assert "secret" in str(caught.value)
        for told in ("hunter2", "hf_abc", "u:pw", "Zk3n"):
            assert told not in str(caught.value)
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
    def test_an_experiment_file_cannot_put_one_together(self, question: str) -> None:
        Path("own/experiments").mkdir(parents=True)
        content = {"tracking": {"project": "env", "notes": "DB_PASS"}, "question": question}
        Path("own/experiments/x.yaml").write_text(yaml.safe_dump(content))
        with pytest.raises(ConfigError) as caught:
            open_door(Verb(), ["-cd", "own", "experiment=x"])
        assert "hunter2" not in str(caught.value)

    def test_what_is_no_secret_is_read(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CLUSTER", "north-2")
        monkeypatch.setenv("TOKEN_FOLDER", str(tmp_path))
        lines = ["question='${oc.env:CLUSTER} ${oc.env:TOKEN_FOLDER} ${oc.env:ABSENT,none}'"]
        assert compose_lines(lines).question == f"north-2 {tmp_path} none"

    def test_the_hash_does_not_depend_on_a_secret(
        self, compose: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = config_hash(compose_lines(["seed=1"]))
        monkeypatch.setenv("DB_PASS", "another-0042")
        assert config_hash(compose_lines(["seed=1"])) == before

    def test_what_was_hidden_is_not_trained_with(self, compose: Callable[..., Run]) -> None:
        recorded = dict(compose_lines(["seed=1"]).as_dict()["data"])  # type: ignore[call-overload]
        key = next(key for key, value in recorded.items() if key != "_target_")
        with pytest.raises(ConfigError, match="was a secret, which is not written down"):
            part("data", recorded | {key: f"https://{HIDDEN}@host"})


def test_the_server_s_address_loses_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://user:s3cr3tPW99@localhost:8080")
    connection.hide_credentials()
    assert os.environ["WANDB_BASE_URL"] == "http://localhost:8080"
    assert redacted("the s3cr3tPW99") == f"the {HIDDEN}"
