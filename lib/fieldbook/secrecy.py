"""Secrets: they are named in params as $NAME, live in the environment alone, and are starred out of whatever is written down."""

import os
import re
from collections.abc import Mapping

from .errors import BadInput

STARS = "***"
REFERENCE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|BEARER|HEADERS$|(?:^|_)(?:AUTH|PASS|PWD)(?:$|_)|PASS$")
_NO_SECRET = re.compile(
    r"TOKENIZER|(?<!API_)(?<!ACCESS_)(?<!AUTH_)TOKENS|TOKEN_(?:LEN|ID|THRESHOLD)|KEY_?FILE|KEY_?PATH|ALLOW_CREDENTIALS|^(?:OLD)?PWD$|MONKEY|KEYBOARD"
)
# Credentials in a URL, a header, or the well-known forms of access tokens: secret whatever they are called.
_FORMS = (
    re.compile(r"(?<=://)[^\s@'\"]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{8,}=*"),
    re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})\b"),
    re.compile(r"(?i)(?<=[?&])(?:api[_-]?key|token|access[_-]?token|password|secret)=[^&\s'\"]+"),
)
# In a value that is given, not in a log, where a word before an equals sign may be anything.
_GIVEN = re.compile(r"(?i)(?:^|[\s,;{])(?:[\w-]*api[_-]?key|authorization|[\w-]*(?:password|secret|access[_-]?token))\s*[=:]\s*\S")
# Shorter values are words such as 'none' or '1', which must not be starred out of a log.
SHORTEST = 8


def is_secret(name: str) -> bool:
    """True for the name of an option or variable whose value must not be published: api keys, tokens, passwords."""
    upper = name.upper().replace("-", "_")
    return bool(_SECRET.search(upper)) and not _NO_SECRET.search(upper)


def has_form_of_secret(text: str) -> bool:
    """True where a text holds credentials by their form: user:password in a URL, a bearer header, a well-known access token."""
    return bool(_GIVEN.search(text)) or any(form.search(text) for form in _FORMS)


def is_reference(value: str) -> bool:
    """True for $NAME, which stands for the value of the environment variable NAME."""
    return bool(REFERENCE.fullmatch(value))


def resolved(values: Mapping[str, str], environment: Mapping[str, str], where: str) -> dict[str, str]:
    """The values with each $NAME replaced from the environment. Raises BadInput for a variable that is not set, or empty."""
    found = {}
    for key, value in values.items():
        found[key] = value
        if is_reference(value):
            found[key] = environment.get(value[1:], "")
            if not found[key]:
                raise BadInput(f"{where}.{key}: {value} is not set in the environment; export {value[1:]} before the start")
    return found


def without_secrets(words: list[str]) -> list[str]:
    """Command-line words with the values of secret options starred out, in '--option value' and '--option=value' form."""
    shown, hide = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(STARS)
            continue
        hide = word.startswith("--") and is_secret(option)
        shown.append(f"{option}={STARS}" if hide and equals else scrubbed(word, ()))
        hide = hide and not equals
    return shown


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Values of this environment's secrets, the longest first: one may be the beginning of another."""
    held = {value for name, value in (os.environ if environment is None else environment).items() if is_secret(name) and len(value) >= SHORTEST}
    return tuple(sorted(held, key=len, reverse=True))


def referenced(values: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """What the references among these values stand for: secret whatever it is called and however short, but for a word of three letters."""
    found = {environment.get(value[1:], "") for value in values.values() if is_reference(value)}
    return tuple(value for value in found if len(value) > 3)


def scrubbed(text: str, values: tuple[str, ...]) -> str:
    """The text without these values, and without what has the form of a secret."""
    for value in values:
        text = text.replace(value, STARS)
    for form in _FORMS:
        text = form.sub(STARS, text)
    return text
