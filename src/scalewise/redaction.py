"""Redaction of secrets in all printed and written text.

Secrets are values of environment variables with a secret's name (``DB_PASS``, ``WANDB_API_KEY``),
passwords in URLs and connection strings, long random values, passwords of a netrc file, and the key
files of W&B and Hugging Face. Values that are too short or too common are not redacted. This module
uses the standard library only.
"""

import getpass
import html
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

HIDDEN = "[hidden]"
"""Replacement of a secret."""

MIN_SECRET_LENGTH = 6
"""Minimum length of a secret, in characters."""
MIN_SUBSTRING_LENGTH = 12
"""Minimum length of a secret that is also redacted within words."""
MIN_RANDOM_LENGTH = 20
"""Minimum length of a random value that is a secret under any name."""
MAX_WORD_LENGTH = 16
"""A word or a number shorter than this is never a secret."""
MAX_PHRASE_LENGTH = 24
"""Several words joined by ``-``, ``_``, ``.`` or spaces that are shorter are never a secret."""

_SECRET_WORD = re.compile(
    r"(?:KEYS?|TOKEN|SECRETS?|PASS|PASSWD|PASSWORDS?|PASSPHRASE|PASSCODE|PWD|PSWD|AUTH"
    r"|AUTHORIZATION|BEARER|CREDENTIALS?|CREDS?|COOKIES?|WEBHOOKS?|MNEMONICS?|SESS(?:ION)?ID"
    r"|\b(?:CSRF|DSN|JWT|PAT|PSK|PW|PWORD|SAS|UNSEAL))V?\d*$"
)
_SECRET_ENDINGS = re.compile(
    r"\b(?:SIGNATURES?|ENCRYPTION|SALT|PRIVATE|CERT|CERTIFICATE|HMAC|PIN|T?OTP|SESSION ID"
    r"|(?:SEED|RECOVERY|BACKUP|SECRET) ?PHRASE)[V\d ]*$"
)
"""Words that mark a secret only at the end of a name: ``TLS_CERT``, but not ``CERT_MANAGER``."""
_NOT_SECRET = ("PWD", "OLDPWD", "XDG_SESSION_ID", "TERM_SESSION_ID", "ITERM_SESSION_ID")
_PATH_WORDS = ("PATH", "FILE", "DIR", "SOCK", "HOME", "HELPER")
_ASSIGNED = re.compile(
    r"(?i)(?:(?:password|passwd|pwd|secret|token|api_?key|access_?key|account_?key)[\"']?\s*[=:]\s*"
    r"|--[\w-]*(?:password|passwd|secret|token|api-?key)\s+"
    r"|\bauthorization\s*[=:]\s*(?:\w+\s+)?|\bbasic\s+(?=[\w+/-]*[\d=]))"
    r"(?:\"([^\"]+)\"|'((?:[^'\\]|\\.)+)'|[\"']?([^\s;&,\"'}]+))"
)
"""A secret after its key, as an option of a command, or in an HTTP header."""
_IN_URL = re.compile(r"://([^\s/:@]*):(\S+)@")
_BEFORE_HOST = re.compile(r"(?<!\S)[\w.+-]+:([^\s/@]+)@(?!sha\d+:)[\w.-]+")
_USER_IN_URL = re.compile(r"://([^\s/:@]{12,})@")
_PLAIN = re.compile(r"(?:[A-Z]?[a-z]+|[A-Z]+)([-_. /:](?:[A-Z]?[a-z]+|[A-Z]+))*")
_NUMBER = re.compile(r"(?i)[\d\s.,:/+_T-]+|0x[\da-f]+|[+-]?(?:\d+\.?\d*|\.\d+)e[+-]?\d+")
_RANDOM = re.compile(r"[A-Za-z0-9+]+")

API_KEY_PATTERNS = {
    "1Password": r"ops_eyJ[\w-]{20,}",
    "age": r"AGE-SECRET-KEY-\w{20,}",
    "Airtable": r"pat[A-Za-z0-9]{14}\.[0-9a-f]{32,}",
    "Alibaba": r"LTAI[A-Za-z0-9]{16,}",
    "Anthropic, OpenAI, OpenRouter": r"sk-(?:ant|proj|or|svcacct|admin)-[\w-]{20,}",
    "Atlassian": r"AT(?:ATT|CTT|STT|BB)[\w-]{20,}(?:=[\w-]+)?",
    "AWS": r"A(?:KIA|SIA|BIA|CCA|ROA|IDA)[0-9A-Z]{16}\b",
    "AWS Bedrock": r"ABSK[A-Za-z0-9+/]{40,}={0,2}",
    "base64": r"base64:[A-Za-z0-9+/_-]{20,}={0,2}",
    "Brevo": r"xkeysib-[\w-]{30,}",
    "Buildkite": r"bk[uc]a_[0-9a-f]{20,}",
    "Cerebras": r"csk-[a-z0-9]{32,}",
    "CircleCI": r"CCI(?:PAT|PRJ)_\w{20,}",
    "Databricks": r"dapi[0-9a-f]{32}(?:-\d)?",
    "DeepSeek and others": r"sk-[A-Za-z0-9]{32,}",
    "DigitalOcean": r"do[opr]_v1_\w{20,}",
    "Discord": r"[MNO][\w-]{23,27}\.[\w-]{6,7}\.[\w-]{27,}",
    "Docker Hub": r"dckr_[op]at_[\w-]{20,}",
    "Doppler": r"dp\.(?:audit|ct|pt|sa|scim|st)\.[\w.-]{20,}",
    "Dynatrace": r"dt0[a-z]\d\d\.[A-Z0-9]{20,}\.[A-Z0-9]{32,}",
    "Facebook": r"EAA[A-Z][A-Za-z0-9]{50,}",
    "Figma": r"figd_[\w-]{20,}",
    "Fireworks": r"fw_[A-Za-z0-9]{22,}",
    "Fly.io": r"(?:fo1|fm[12][ar]?)_[\w+/=-]{40,}",
    "GitHub": r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}",
    "GitLab": r"gl(?:agent|cbt|dt|ffct|ft|imt|pat|ptt|rt|soat)-[\w-]{16,}",
    "Google": r"AIza[\w-]{35}|GOCSPX-[\w-]{20,}|ya29\.[\w-]{20,}|1//0[\w-]{30,}",
    "Grafana": r"glsa_\w{20,}|glc_[A-Za-z0-9+/]{30,}={0,2}",
    "Groq": r"gsk_[A-Za-z0-9]{20,}",
    "Heroku": r"HRKU-[\w-]{30,}",
    "Hugging Face": r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{20,}",
    "JFrog": r"AKCp[A-Za-z0-9]{50,}",
    "Jina": r"jina_\w{30,}",
    "JSON Web Token": r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",
    "LangSmith": r"lsv2_(?:pt|sk)_\w{20,}",
    "Linear": r"lin_(?:api|oauth)_\w{20,}",
    "Mailchimp": r"[0-9a-f]{32}-us\d{1,2}\b",
    "Mailgun": r"key-[0-9a-f]{32}\b",
    "New Relic": r"NR(?:AK|II|JS)-[\w-]{19,}",
    "Notion": r"(?:secret|ntn)_[A-Za-z0-9]{40,}",
    "npm": r"npm_[A-Za-z0-9]{30,}",
    "NVIDIA": r"nvapi-[\w-]{20,}",
    "OpenAI": r"sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    "Perplexity": r"pplx-[A-Za-z0-9]{30,}",
    "Pinecone": r"pcsk_\w{20,}",
    "PlanetScale": r"pscale_(?:oauth|pw|tkn)_[\w.-]{20,}",
    "Postman": r"PMAK-[0-9a-f]{20,}-[0-9a-f]{30,}",
    "PyPI": r"pypi-A[\w-]{30,}",
    "Replicate": r"r8_[A-Za-z0-9]{20,}",
    "RubyGems": r"rubygems_[0-9a-f]{40,}",
    "SendGrid": r"SG\.[\w-]{16,}\.[\w-]{16,}",
    "Sentry": r"sntry[su]_[\w+/=-]{30,}",
    "Shopify": r"shp(?:at|ca|pa|ss)_[0-9A-Za-z]{20,}",
    "Slack": r"xox[abeprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}|xapp-\d-[\w-]{20,}",
    "Sourcegraph": r"sgp_\w{36,}",
    "Square": r"sq0(?:atp|csp|idp)-[\w-]{20,}|EAAA[\w-]{56,}",
    "Stripe": r"[rs]k_(?:live|prod|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/]{16,}={0,2}",
    "Supabase": r"sbp_[0-9a-f]{40}|sb_secret_[\w-]{20,}",
    "Tailscale": r"tskey-[\w-]{16,}",
    "Tavily": r"tvly-[\w-]{20,}",
    "Telegram": r"\d{8,10}:AA[\w-]{30,}",
    "Together": r"tgp_v1_[\w-]{20,}",
    "Trello": r"ATTA[0-9a-f]{50,}",
    "Twilio": r"SK[0-9a-f]{32}\b",
    "Vault": r"hv[bs]\.[\w-]{20,}",
    "W&B": r"wandb_v1_\w{16,}|local-[0-9a-f]{40}",
    "xAI": r"xai-[A-Za-z0-9]{40,}",
}
"""Regular expressions of API keys, by service."""
API_KEY_PATTERN = re.compile(
    rf"(?<![A-Za-z0-9_])(?:{'|'.join(API_KEY_PATTERNS.values())})"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]{16,}"
    r"|(?<=/api/webhooks/)\d+/[\w-]{16,}"
    r"|(?<=/bot)\d+:[\w-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
    r"[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
"""Pattern of API keys, secret parts of webhook URLs and PEM private keys."""
_IN_QUERY = re.compile(
    r"(?i)([?&;](?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|password"
    r"|client_secret|(?:access_|auth_|refresh_|id_|private_|api_?)?token|api_?key)=)"
    r"[^&\s\"'#<>]{8,}"
)
_URL = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")


def redact(text: str) -> str:
    """Replace every secret in ``text`` by ``[hidden]``."""
    pattern = _pattern(*_sources())
    if pattern is not None:
        text = pattern.sub(HIDDEN, text)
    if "://" in text:
        text = _URL.sub(HIDDEN, text)
        text = _IN_QUERY.sub(rf"\1{HIDDEN}", text)
    return API_KEY_PATTERN.sub(HIDDEN, text)


def redact_tree(value: object) -> Any:
    """Apply :func:`redact` to each string of nested lists and mappings."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_tree(key): redact_tree(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(entry) for entry in value]
    return value


def contains_secret(text: str) -> bool:
    """Return whether :func:`redact` changes ``text``."""
    return redact(text) != text


def reveals_secret(name: str, value: str) -> bool:
    """Return whether an environment variable is a secret, by its name or value.

    Stricter than :func:`redact`: with a secret's name, any word is a secret.
    """
    if is_secret_name(name) and not (value.startswith("/") and os.path.exists(value)):
        return True
    return any(it.search(value) for it in (_ASSIGNED, _BEFORE_HOST)) or contains_secret(value)


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable or setting marks a secret."""
    if name.upper() in _NOT_SECRET:
        return False
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Z0-9]+", spaced.upper()) if word]
    if not words or words[-1].rstrip("0123456789") in _PATH_WORDS:
        return False
    if words[-1] == "TOKEN" and {"BOS", "EOS", "PAD", "UNK", "MASK"} & set(words):
        return False
    return any(_SECRET_WORD.search(word) for word in words) or bool(
        _SECRET_ENDINGS.search(" ".join(words))
    )


def remember_secret(value: str) -> None:
    """Redact ``value`` for the rest of the process, even if it is not in the environment."""
    _remembered.update(_secrets_in_value("SECRET", value))


_remembered: set[str] = set()

Sources = tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int, int], ...], frozenset[str]]


def _sources() -> Sources:
    """Sources of secrets, as a key of the caches below."""
    files = []
    for path in _key_files():
        try:
            stat = os.stat(path)
        except OSError:
            continue
        files.append((path, stat.st_mtime_ns, stat.st_size))
    return tuple(os.environ.items()), tuple(files), frozenset(_remembered)


def _key_files() -> Iterator[str]:
    """Yield the paths of the key files of W&B and Hugging Face; they may not exist."""
    environment, home = os.environ, os.path.expanduser("~")
    yield environment.get("NETRC") or f"{home}/.netrc"
    yield f"{home}/_netrc"
    config = environment.get("WANDB_CONFIG_DIR") or f"{home}/.config/wandb"
    yield f"{config}/settings"
    yield os.path.join(environment.get("WANDB_DIR", "."), "wandb", "settings")
    cache_home = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    hub = environment.get("HF_HOME") or f"{cache_home}/huggingface"
    yield environment.get("HF_TOKEN_PATH") or f"{hub}/token"


@lru_cache(maxsize=4)
def _secrets(
    environment: tuple[tuple[str, str], ...],
    files: tuple[tuple[str, int, int], ...],
    remembered: frozenset[str],
) -> frozenset[str]:
    secrets = set(remembered)
    for name, value in environment:
        secrets.update(_secrets_in_value(name, value))
    for path, _, _ in files:
        with suppress(OSError, UnicodeDecodeError):
            secrets.update(_secrets_in_file(Path(path)))
    return frozenset(secrets)


@lru_cache(maxsize=4)
def _pattern(
    environment: tuple[tuple[str, str], ...],
    files: tuple[tuple[str, int, int], ...],
    remembered: frozenset[str],
) -> re.Pattern[str] | None:
    """Pattern of all encodings of all secrets, longest first; None without secrets."""
    encodings = {
        form: secret
        for secret in _secrets(environment, files, remembered)
        for form in _spellings(secret)
    }
    if not encodings:
        return None
    alternatives = []
    for form in sorted(encodings, key=len, reverse=True):
        text = re.escape(form)
        is_word = len(encodings[form]) < MIN_SUBSTRING_LENGTH
        alternatives.append(rf"(?<![A-Za-z0-9_]){text}(?![A-Za-z0-9_])" if is_word else text)
    return re.compile("|".join(alternatives))


def _spellings(secret: str) -> set[str]:
    """Encodings of a secret in plain text, JSON, YAML, HTML, URLs and shell commands."""
    escaped = html.escape(secret)
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        secret.replace("'", "''"),
        secret.replace("'", "'\"'\"'"),
        escaped,
        escaped.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
        html.escape(secret, quote=False),
        quote(secret, safe=""),
        quote(secret),
        quote_plus(secret),
    }


def _secrets_in_value(name: str, value: str) -> Iterator[str]:
    """Yield the secrets in the value of one environment variable."""
    has_secret_name = is_secret_name(name)
    if has_secret_name and not (
        value.startswith(("/", "~", ".")) and os.path.exists(os.path.expanduser(value))
    ):
        yield from _secrets_of_named(value)
    for match in _ASSIGNED.finditer(value):
        quoted = match[1] or match[2]
        yield from filter(_is_distinct, [quoted or match[3]])
        # Plain words are redacted together with their key only.
        if quoted and " " in quoted and not _is_distinct(quoted):
            yield match[0]
    yield from filter(_is_distinct, _BEFORE_HOST.findall(value))
    yield from (match[0] for match in API_KEY_PATTERN.finditer(value))
    if "://" in value:
        yield from filter(_is_distinct, _secrets_in_url(name, value))
    elif not has_secret_name and _is_random(value):
        yield value


def _secrets_of_named(value: str) -> Iterator[str]:
    """Yield a value with a secret's name, and its parts: ``Bearer abc``, ``sid=abc``."""
    if not ("://" in value and urlsplit(value.split()[0]).hostname):
        yield from filter(_is_distinct, [value.strip()])
        parts = {part for part in re.split(r"[\s;,=]+", value) if len(part) >= MIN_SUBSTRING_LENGTH}
        yield from filter(_is_distinct, parts)
    if value.lstrip().startswith("{"):
        try:
            yield from filter(_is_distinct, _secrets_in_json(json.loads(value)))
        except (ValueError, RecursionError):
            return


def _secrets_in_json(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, entry in value.items():
            if isinstance(entry, str) and is_secret_name(name):
                yield entry
                yield from (line for line in entry.splitlines() if len(line) >= MAX_WORD_LENGTH)
            else:
                yield from _secrets_in_json(entry)


def _secrets_in_url(name: str, value: str) -> Iterator[str]:
    """Yield user names, passwords, query keys and webhook paths of a URL."""
    for match in _IN_URL.finditer(value):
        yield from (match[2], unquote(match[2]))
    yield from (match[1] for match in _USER_IN_URL.finditer(value))
    try:
        parts = urlsplit(value.strip())
    except ValueError:
        return
    yield from (text for key, text in parse_qsl(parts.query) if is_secret_name(key) or key == "sig")
    host = parts.hostname or ""
    is_webhook = "HOOK" in name.upper() or host.startswith("hooks.") or "webhook" in value.lower()
    if is_webhook:
        yield from (part for part in parts.path.split("/") if len(part) >= 8)
    if is_secret_name(name) and parts.username:
        yield parts.username


def _secrets_in_file(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    if path.name == "settings":
        for line in text.splitlines():
            key, _, value = line.partition("=")
            yield from _secrets_in_value(key.strip(), value.strip())
    elif "netrc" in path.name or re.search(r"\bmachine\b", text):
        yield from filter(_is_distinct, re.findall(r"\bpassword\s+(\S+)", text))
    else:
        yield from filter(_is_distinct, [text.strip()])


def _is_distinct(value: str) -> bool:
    """Return whether a value is distinct from ordinary text, so that it can be redacted."""
    if len(value) < MIN_SECRET_LENGTH or value.lower() in _ordinary_names():
        return False
    if len(value) < MAX_WORD_LENGTH and _NUMBER.fullmatch(value):
        return False
    words = _PLAIN.fullmatch(value)
    return words is None or len(value) >= (MAX_PHRASE_LENGTH if words[1] else MAX_WORD_LENGTH)


@cache
def _ordinary_names() -> frozenset[str]:
    """User name, host name and home folder, in lower case."""
    home = os.path.expanduser("~")
    names = {home, home.rpartition("/")[2], socket.gethostname()}
    with suppress(OSError, KeyError):  # the user of a container may have no name
        names.add(getpass.getuser())
    return frozenset(text.lower() for text in names)


def _is_random(value: str) -> bool:
    """Return whether a value is one long token of mixed cases and digits, as API keys are."""
    if len(value) < MIN_RANDOM_LENGTH or not re.fullmatch(r"[A-Za-z0-9+/_=-]+", value):
        return False
    token = max(_RANDOM.findall(value), key=len, default="")
    kinds = [_kind(character) for character in token]
    if len(token) < MIN_RANDOM_LENGTH or len(set(kinds)) < 3:
        return False
    changes = sum(one != other for one, other in pairwise(kinds))
    return 2 * changes >= len(token) - 1


def _kind(character: str) -> str:
    return "digit" if character.isdigit() else "upper" if character.isupper() else "lower"
