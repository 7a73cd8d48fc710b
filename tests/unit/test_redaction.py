"""Secrets of the environment are redacted by value; similar values are not."""

import json
import os
from html import escape
from pathlib import Path

import pytest
import yaml
from fixtures.secrets import remove_secrets

from scalewise import console, redaction
from scalewise.redaction import HIDDEN, is_secret_name, redact, redact_tree
from scalewise.run_files import write_json, write_text
from scalewise.tracking import connection

HEX_DIGITS = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environment without secrets, and a home directory without key files."""
    remove_secrets(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "secrets"),
    [
        ("WANDB_API_KEY", HEX_DIGITS, [HEX_DIGITS]),
        ("DB_PASS", "hunter2", ["hunter2"]),
        ("DB_PASS", "correct-horse-battery-staple", ["correct-horse-battery-staple"]),
        ("GH_AUTH", "Bearer abCD1234efGH5678", ["abCD1234efGH5678"]),
        ("SESSION_COOKIE", "sid=9f8e7d6c5b4a3210; theme=dark", ["9f8e7d6c5b4a3210"]),
        ("DATABASE_URL", "postgres://app:s3cr3tPW99@db/x", ["s3cr3tPW99"]),
        ("DATABASE_URL", "postgres://app:p%40ss/w0rd@db/x", ["p%40ss/w0rd", "p@ss/w0rd"]),
        ("LIBPQ", "host=db user=app password=s3cr3tPW99", ["s3cr3tPW99"]),
        ("LIBPQ", "host=db password='it is me'", ["password='it is me'"]),
        ("LIBPQ", 'host=db password="it is m3!"', ["it is m3!"]),
        ("SMTP_PW", "s3cr3tPW99", ["s3cr3tPW99"]),
        ("OPTIONS", "--user app --password s3cr3tPW99 -v", ["s3cr3tPW99"]),
        ("OPTIONS", "--db-token 's3cr3t PW99'", ["s3cr3t PW99"]),
        ("GIT_CONFIG_VALUE_0", "AUTHORIZATION: basic eC1hY2Nlc3M6czNj", ["eC1hY2Nlc3M6czNj"]),
        ("HEADER", "Basic dXNlcjpzM2NyM3Q=", ["dXNlcjpzM2NyM3Q="]),
        ("HEADER", "Authorization: s3cr3tPW99", ["s3cr3tPW99"]),
        ("DATABASE", "app:s3cr3tPW99@db:5432", ["s3cr3tPW99"]),
        ("OPENAI_API_KEY2", "k9-short-Secret1", ["k9-short-Secret1"]),
        ("DB_PASSWORD1", "hunter2!!x", ["hunter2!!x"]),
        ("DB_TOKEN_1", "tok-Aq7781xx", ["tok-Aq7781xx"]),
        ("SIGNATURE", "Zq7XsecretVAL9kQw82", ["Zq7XsecretVAL9kQw82"]),
        ("ENCRYPTION", HEX_DIGITS[:32], [HEX_DIGITS[:32]]),
        ("WALLET_SEED_PHRASE", "zoo ice abandon ability able about",
         ["zoo ice abandon ability able about"]),
        ("S3_URL", f"https://b.s3/x?a=1&X-Amz-Signature={HEX_DIGITS}", [HEX_DIGITS]),
        ("STORAGE", "AccountName=x;AccountKey=ab12+cd34/ef56==;", ["ab12+cd34/ef56=="]),
        ("SENTRY_DSN", f"https://{HEX_DIGITS}@o1.ingest.example/5", [HEX_DIGITS]),
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
def test_redaction_replaces_secrets_in_every_form(
    name: str, value: str, secrets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    for secret in secrets:
        forms = [secret, json.dumps(secret), json.dumps(secret, ensure_ascii=False)]
        forms += [escape(secret), repr(secret), yaml.safe_dump({"x": secret}), f"({secret})"]
        for form in forms:
            assert secret not in redact(form), form
            assert HIDDEN in redact(form), form


BASE62 = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2eF4hJ6kL8nP0rS2uV4xY6zA8cD1fG3iJ5lM7oQ9tU"

SERVICE_KEYS = {
    "1Password": [f"ops_eyJ{BASE62}"],
    "age": ["AGE-SECRET-KEY-1QQPQ9V7X3K5M2N8R4T6W0Y1Z3"],
    "Airtable": [f"patAbCdEfGhIjKlMn.{HEX_DIGITS}"],
    "Alibaba": [f"LTAI{BASE62[:20]}"],
    "Anthropic, OpenAI, OpenRouter": [
        f"sk-ant-api03-{BASE62}",
        f"sk-or-v1-{HEX_DIGITS}",
        f"sk-proj-{HEX_DIGITS}",
    ],
    "Atlassian": [f"ATATT3xFfGF0{BASE62}=1A2B3C4D", f"ATBB{BASE62[:32]}"],
    "AWS": ["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE"],
    "AWS Bedrock": [f"ABSK{BASE62}="],
    "base64": ["base64:3q2+7wAAbcd/EFGHijklmnop0123456789QRSTuvwxY="],
    "Brevo": [f"xkeysib-{HEX_DIGITS}-AbCd1234"],
    "Buildkite": [f"bkua_{HEX_DIGITS}"],
    "Cerebras": [f"csk-{HEX_DIGITS}"],
    "CircleCI": [f"CCIPAT_{BASE62}"],
    "Databricks": [f"dapi{HEX_DIGITS[:32]}", f"dapi{HEX_DIGITS[:32]}-2"],
    "DeepSeek and others": [f"sk-{HEX_DIGITS[:32]}"],
    "DigitalOcean": [f"dop_v1_{HEX_DIGITS}", f"doo_v1_{HEX_DIGITS}"],
    "Discord": [f"MTA{BASE62[:23]}.G7hJkL.{BASE62[:38]}"],
    "Docker Hub": [f"dckr_pat_{BASE62[:27]}"],
    "Doppler": [f"dp.pt.{BASE62[:43]}"],
    "Dynatrace": [f"dt0c01.{'AB12' * 6}.{'CD34' * 16}"],
    "Facebook": [f"EAAM{BASE62}"],
    "Figma": [f"figd_{BASE62[:40]}"],
    "Fireworks": [f"fw_{BASE62[:24]}"],
    "Fly.io": [f"fm2_{BASE62}"],
    "GitHub": [*(f"gh{kind}_{BASE62[:36]}" for kind in "pousr"), f"github_pat_{BASE62}"],
    "GitLab": [f"glpat-{BASE62[:20]}", f"gldt-{BASE62[:20]}", f"glrt-{BASE62[:20]}"],
    "Google": [
        f"AIza{BASE62[:35]}",
        f"ya29.{BASE62}",
        f"GOCSPX-{BASE62[:28]}",
        f"1//0{BASE62[:40]}",
    ],
    "Grafana": [f"glsa_{BASE62[:32]}_1a2b3c4d", f"glc_{BASE62}"],
    "Groq": [f"gsk_{BASE62[:52]}"],
    "Heroku": ["HRKU-01234567-89ab-cdef-0123-456789abcdef"],
    "Hugging Face": [f"hf_{BASE62[:34]}", f"api_org_{BASE62[:34]}"],
    "JFrog": [f"AKCp{BASE62}"],
    "Jina": [f"jina_{HEX_DIGITS}{BASE62[:28]}"],
    "JSON Web Token": [f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{BASE62[:43]}"],
    "LangSmith": [f"lsv2_pt_{HEX_DIGITS[:32]}_0123456789"],
    "Linear": [f"lin_api_{BASE62[:40]}"],
    "Mailchimp": [f"{HEX_DIGITS[:32]}-us12"],
    "Mailgun": [f"key-{HEX_DIGITS[:32]}"],
    "New Relic": [f"NRAK-{'A1B2C3D4E' * 3}"],
    "Notion": [f"secret_{BASE62[:43]}", f"ntn_{BASE62[:46]}"],
    "npm": [f"npm_{BASE62[:36]}"],
    "NVIDIA": [f"nvapi-{BASE62[:64]}"],
    "OpenAI": ["sk-a1B2c3D4e5F6g7H8i9J0"],
    "Perplexity": [f"pplx-{BASE62[:48]}"],
    "Pinecone": [f"pcsk_{BASE62[:60]}"],
    "PlanetScale": [f"pscale_tkn_{BASE62[:43]}"],
    "Postman": [f"PMAK-{HEX_DIGITS[:24]}-{HEX_DIGITS[:34]}"],
    "PyPI": [f"pypi-AgEIcHlwaS5vcmc{BASE62}"],
    "Replicate": [f"r8_{BASE62[:37]}"],
    "RubyGems": [f"rubygems_{HEX_DIGITS}01234567"],
    "SendGrid": ["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"],
    "Sentry": [f"sntrys_{BASE62}"],
    "Shopify": [f"shpat_{HEX_DIGITS[:32]}"],
    "Slack": ["xoxb-123456789012-abcDEF", "xoxe.xoxp-1-abcDEF123456", f"xapp-1-A01-{BASE62[:40]}"],
    "Sourcegraph": [f"sgp_{HEX_DIGITS}"],
    "Square": [f"sq0csp-{BASE62[:43]}", f"EAAA{BASE62[:60]}"],
    "Stripe": ["sk_live_51HabcDEFGHIJKLMNOPqrs", f"rk_live_{BASE62[:24]}", f"whsec_{BASE62[:32]}"],
    "Supabase": [f"sbp_{HEX_DIGITS}", f"sb_secret_{BASE62[:31]}"],
    "Tailscale": [f"tskey-auth-{BASE62[:32]}"],
    "Tavily": [f"tvly-dev-{BASE62[:32]}"],
    "Telegram": [f"123456789:AAH{BASE62[:32]}"],
    "Together": [f"tgp_v1_{BASE62[:43]}"],
    "Trello": [f"ATTA{HEX_DIGITS}{HEX_DIGITS}"],
    "Twilio": [f"SK{HEX_DIGITS[:32]}"],
    "Vault": [f"hvs.{BASE62}"],
    "W&B": [f"wandb_v1_{BASE62}", f"local-{HEX_DIGITS}"],
    "xAI": [f"xai-{BASE62}"],
}


@pytest.mark.parametrize("service", redaction.API_KEY_PATTERNS)
def test_redaction_replaces_service_keys(service: str) -> None:
    for key in SERVICE_KEYS[service]:
        for form in (key, f"x={key}", f"'{key}'", f"https://host/{key}?x", f'{{"a":"{key}"}}'):
            assert redact(form) == form.replace(key, HIDDEN), form


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"https://b.s3/x?X-Amz-Signature={HEX_DIGITS}&x=1", HEX_DIGITS),
        (f"https://b.s3/x?a=1&X-Amz-Security-Token={BASE62}", BASE62),
        (f"https://storage/x?X-Goog-Signature={HEX_DIGITS}#x", HEX_DIGITS),
        (f"https://blob/x?sv=2024&sig={BASE62}%3D", BASE62),
        (f"https://host/x?access_token={HEX_DIGITS}", HEX_DIGITS),
        (f"https://host/x?api_key={HEX_DIGITS}", HEX_DIGITS),
        (f"https://api.telegram.org/bot123:{BASE62[:35]}/sendMessage", BASE62[:35]),
        (
            f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{BASE62}\n-----END PGP PRIVATE KEY BLOCK-----",
            BASE62,
        ),
        (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BASE62}\n", BASE62),
    ],
)
def test_redaction_replaces_secret_parts_of_urls_and_blocks(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        HEX_DIGITS,
        f"revision={HEX_DIGITS}",
        f"sha256:{HEX_DIGITS}{HEX_DIGITS[:24]}",
        HEX_DIGITS[:32],
        "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "meta-llama/Llama-3.1-8B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "hf-internal-testing/tiny-random-LlamaForCausalLM",
        "sentence-transformers/all-MiniLM-L6-v2",
        "google/gemma-2-2b-it",
        "stabilityai/sdxl-turbo-1.0-fp16",
        "decoder_nano-fsdp-bf16_mixed-adamw-lr3e-4",
        "runs/llama_160m-deepspeed_zero2_offload-bf16/2026-11-26_01-02-03",
        "/data/sk-learn-datasets-of-2024/part-00001-of-00512.parquet",
        "https://host.example/x?page=2&sort=created&token=a1&revision=main",
        "s3://bucket/key-value-store/shards",
        "torch.optim.AdamW",
        "lin_regression_with_long_descriptive_names",
        "test_sk_learn_compatibility_of_estimators",
        "task-force-on-the-very-long-list-of-names",
        "the key: tokens are words, the secret: there is none",
        "0.00030000000000000003",
        "2026-11-26T01:02:03+00:00",
        "12345678:30:00",
        "range(1,1000000000)",
        "MNIST, CIFAR and NLP in 32 bits; ATTENTION is all you need",
    ],
)
def test_redaction_keeps_ordinary_texts(text: str) -> None:
    assert redact(text) == text


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
        ("GIT_COMMIT", HEX_DIGITS),
        ("MODEL", "Meta-Llama-3.1-8B-Instruct"),
        ("FOLDER", "/data/sk-learn-datasets-of-2024/hf-internal-testing"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("SLURM_JOB_NAME", "MyLongExperimentNameForTheRun2026"),
        ("IMAGE", "python:3.11-slim@sha256:0123456789abcdef"),
        ("OPTIONS", "--max-tokens 1048576 --tokenizer gpt2-xl-2024"),
        ("TITLE", "Basic introduction to 2nd order methods"),
        ("SERVER", "https://jane@host.example:8080/x?page=2"),
    ],
)
def test_redaction_keeps_ordinary_values(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"x {value} y") == f"x {value} y"


def test_redaction_of_a_short_secret_requires_a_full_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "llama3")
    assert redact("llama3 llama3_8b xllama3 llama3.") == f"{HIDDEN} llama3_8b xllama3 {HIDDEN}."


def test_redaction_keeps_user_and_home_names(monkeypatch: pytest.MonkeyPatch) -> None:
    redaction._ordinary_names.cache_clear()
    monkeypatch.setattr("getpass.getuser", lambda: "jane42doe")
    monkeypatch.setenv("MY_KEY", "jane42doe")
    assert redact("of jane42doe") == "of jane42doe"
    redaction._ordinary_names.cache_clear()


@pytest.mark.parametrize(
    ("file", "content", "secret"),
    [
        (".netrc", f"machine api.wandb.ai login user password {HEX_DIGITS}\n", HEX_DIGITS),
        (".netrc", f"machine api.wandb.ai\n  login user\n  password {HEX_DIGITS}", HEX_DIGITS),
        ("huggingface/token", "hf0abcdefghijklmnopqrst\n", "hf0abcdefghijklmnopqrst"),
        (".config/wandb/settings", "[default]\nbase_url = https://u:s3cr3tPW99@h\n", "s3cr3tPW99"),
        ("wandb/settings", f"[default]\napi_key = {HEX_DIGITS}\n", HEX_DIGITS),
    ],
    ids=["netrc", "netrc-lines", "hub", "wandb-home", "wandb-here"],
)
def test_redaction_reads_key_files(file: str, content: str, secret: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    assert secret in redact(secret)
    path.write_text(content)
    assert redact(f"a {secret}") == f"a {HIDDEN}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in (
            "WANDB_API_KEY", "apiKey", "DB_PASS", "PGPASSWORD", "GH_AUTH", "hub_token", "MYSQL_PWD",
            "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS", "SENTRY_DSN", "SLACK_WEBHOOK", "HUB_PAT",
            "OPENAI_API_KEY2", "DB_PASSWORD1", "TOKEN2", "DB_TOKEN_1", "apiKeyV2", "SIGNATURE",
            "DATA_ENCRYPTION", "SESSION_ID", "PHPSESSID", "VAULT_UNSEAL", "UNSEAL_KEY_3", "SALT",
            "SEED_PHRASE", "RECOVERY_PHRASE_2", "WALLET_MNEMONIC", "RSA_PRIVATE", "TLS_CERT",
            "LOGIN_PIN", "SMTP_PW", "MYSQL_ROOT_PW1", "DB_PSWD", "WIFI_PSK", "CSRF", "TOTP",
            "X-Amz-Signature", "cookie",
        )),
        *((name, False) for name in (
            "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "GIT_AUTHOR_NAME", "tokens", "eos_token",
            "KEYBOARD", "COMPAT", "XAUTHORITY", "HF_TOKEN_PATH", "PASSWORD_STORE_DIR", "",
            "SEED", "seed2", "SEED_1", "XDG_SESSION_ID", "SESSION_TYPE", "PRIVATE_IP", "PIN_MEMORY",
            "SSL_CERT_FILE", "SSL_CERT_DIR", "CERT_MANAGER", "TOKEN_FILE2", "PHRASES", "MODEL_ID",
            "KEYMAP", "MAX_TOKENS_2", "DESIGNATURE", "SALTY", "RANK", "CONCERT", "DISCERT",
        )),
    ],
)  # fmt: skip
def test_redaction_detects_secret_names(name: str, expected: bool) -> None:
    assert is_secret_name(name) == expected


def test_written_files_and_lines_have_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
    write_json(tmp_path / "a.json", {"hunter2-prod-9931": ["x hunter2-prod-9931"]})
    write_text(tmp_path / "a.txt", "hunter2-prod-9931")
    with console.shield_streams():
        print("hunter2-prod-9931", "is", "9931")
    files = [path.read_text() for path in tmp_path.glob("a.*")]
    assert not any("hunter2" in text for text in [*files, *capsys.readouterr()])
    assert json.loads((tmp_path / "a.json").read_text()) == {HIDDEN: [f"x {HIDDEN}"]}
    assert redact_tree({"hunter2-prod-9931": ("hunter2-prod-9931", 3)}) == {HIDDEN: [HIDDEN, 3]}


def test_captured_console_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B captures the console by replacing ``write``."""
    import sys

    monkeypatch.setenv("DB_PASS", "hunter2-prod-9931")
    outputs: list[str] = []
    with console.shield_streams():
        write = sys.stdout.write
        monkeypatch.setattr(
            sys.stdout, "write", lambda text: (outputs.append(text), write(text))[1]
        )
        print("is hunter2-prod-9931")
    assert "".join(outputs) == f"is {HIDDEN}\n"


def test_server_url_is_shown_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://user:s3cr3tPW99@localhost:8080")
    connection.hide_credentials()
    assert os.environ["WANDB_BASE_URL"] == "http://localhost:8080"
    assert redact("the s3cr3tPW99") == f"the {HIDDEN}"
