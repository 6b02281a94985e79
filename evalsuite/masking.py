"""Secrets out of everything that is written: names decide, known values follow.

Receives environments, command lines and texts; returns them with secret values replaced.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

MASK = "***"
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW(OR)?D|CREDENTIAL", re.IGNORECASE)
# Names that look secret and are not; their values ("max tokens 256") must stay readable.
_HARMLESS_NAME = re.compile(r"TOKENIZER|TOKENS|KEYS?_?(SIZE|DIM|LEN)", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
# Shorter values ("1", "true") would blank half of a log.
_MIN_SECRET_CHARS = 6


def is_secret_name(name: str) -> bool:
    """Whether a variable or flag of this name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Values to hide, longest first; passwords inside proxy URLs included."""
    found = {v for k, v in env.items() if is_secret_name(k) and len(v) >= _MIN_SECRET_CHARS}
    for value in env.values():
        for match in _URL_USER.finditer(value):
            password = match.group()[:-1].partition(":")[2]
            if len(password) >= _MIN_SECRET_CHARS:
                found.add(password)
    return tuple(sorted(found, key=len, reverse=True))


def secret_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Values that follow a secret flag: `--api-key V`, `--api-key=V`."""
    found: list[str] = []
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.startswith("-") and is_secret_name(flag):
            value = value if equals else next(iter(argv[position + 1 : position + 2]), "")
            if value and not value.startswith("-"):
                found.append(value)
    return tuple(found)


def mask_text(text: str, secrets: Sequence[str]) -> str:
    """Replace known values and the user part of URLs."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return _URL_USER.sub(f"{MASK}@", text)


def mask_env(env: Mapping[str, str], secrets: Sequence[str] = ()) -> dict[str, str]:
    """A copy with secret variables hidden."""
    return {k: MASK if is_secret_name(k) else mask_text(v, secrets) for k, v in env.items()}


def mask_command(
    argv: Sequence[str], env: Mapping[str, str] | None = None, secrets: Sequence[str] = ()
) -> str:
    """`A=1 program args`, quoted for a shell, secrets hidden."""
    known = (*secret_arguments(argv), *secrets)
    words = [f"{k}={shlex.quote(v)}" for k, v in mask_env(env or {}, known).items()]
    return mask_text(" ".join([*words, shlex.join(argv)]), known)


def mask_file(path: Path, secrets: Sequence[str]) -> None:
    """Rewrite a log in place where it holds a known value (a server may print its arguments)."""
    values = [secret.encode() for secret in secrets]
    if not values or not path.exists():
        return
    data = path.read_bytes()
    if not any(value in data for value in values):
        return
    for value in values:
        data = data.replace(value, MASK.encode())
    path.write_bytes(data)
