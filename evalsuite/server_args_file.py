"""`--config FILE` inside `server_args` -> the arguments that the file stands for.

Receives argv as the YAML gives it, returns argv with the file's flags in the place where vLLM and
SGLang put them: in front, so that the command line wins. What is read here is checked like every
other flag (layout, remote code, port) and passed on; a file that cannot be read is refused,
because a server would follow it unseen. The forms of `server_args` itself are `server_args.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evalsuite.server_args import canonical_flag, check_own_flags, flag_values
from evalsuite.yaml_loader import load_document

_FLAG = "--config"
_ADVICE = (
    "the suite reads it, since it may set the port, the layout or remote code; "
    "write its flags into `server_args`, or name a file that is there"
)


def expand_config_file(argv: Sequence[str]) -> tuple[str, ...]:
    """Put the flags of `--config FILE` in the place of the flag.

    Args:
        argv: As the YAML gives it. A relative FILE is looked for where the server would: in the
            working directory.

    Raises:
        ValueError: No file or two, one that cannot be read or holds no flags, or a flag in it
            that is the suite's own.
    """
    files = flag_values(argv, (_FLAG,))
    if not files:
        return tuple(argv)
    if len(files) > 1:
        raise ValueError(f"{_FLAG} is given {len(files)} times; the servers take one")
    if not files[0]:
        raise ValueError(f"{_FLAG} names no file")
    at = next(index for index, word in enumerate(argv) if canonical_flag(word) == _FLAG)
    num_words = 1 if "=" in argv[at] else 2
    rest = (*argv[:at], *argv[at + num_words :])
    path = Path(files[0])
    flags = _flags(path)
    given = {canonical_flag(word) for word in rest}
    words = [word for flag, values in flags if flag not in given for word in (flag, *values)]
    try:
        check_own_flags(words)
    except ValueError as error:
        raise ValueError(f"{_FLAG} {path}: {error}") from error
    return (*words, *rest)


def _flags(path: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(flag, values) of every key, by the rules of vLLM's reader.

    `true` is the bare flag, `false` and null nothing, a list several values, a mapping JSON.

    Raises:
        ValueError: See `expand_config_file`.
    """
    document = load_document(path)
    faults = [problem for problem in document.problems if problem.severity == "error"]
    if faults:
        where = f" line {faults[0].line}" if faults[0].line else ""
        raise ValueError(f"{_FLAG} {path}{where}: {faults[0].message}; {_ADVICE}")
    if not isinstance(document.value, dict):
        raise ValueError(f"{_FLAG} {path}: holds no `flag: value` lines")
    found = []
    for name, value in document.value.items():
        flag = canonical_flag(f"--{name}")
        if not flag or flag == _FLAG or set(flag) & set(" ="):
            raise ValueError(f"{_FLAG} {path}: {name!r} is no flag that a file can hold")
        if value is None or value is False:
            continue
        values = () if value is True else tuple(_words(name, path, value))
        found.append((flag, values))
    return found


def _words(name: str, path: Path, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield json.dumps(item)
        elif isinstance(item, str | int | float) and not isinstance(item, bool):
            yield str(item)
        else:
            raise ValueError(f"{_FLAG} {path}: the value of {name} cannot be an argument: {item!r}")
