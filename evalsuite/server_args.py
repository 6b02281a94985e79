"""`server_args` in any of its forms -> argv, and what argv says about the layout.

Receives the YAML value (a string split by shell rules, a folded block, a list, or a mapping)
and returns a tuple with exactly one element per value. No shell is ever involved: `$HOME` and
`#` stay as written, and `shlex.join` of the result gives the same argv back. How an engine
combines it with its own flags is `engines/`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

# The suite's own: the port is bound by the child, the host is loopback, the model is
# `model_name`. A second definition would send requests to the wrong server or model.
OWN_FLAGS = {
    "--port": "the suite starts the server on a free port",
    "--host": "the server listens on the loopback address that the suite asks",
    "--model": "the model is `model_name`",
    "--model-path": "the model is `model_name`",
    "--uds": "the suite speaks to the server over TCP",
}

TP_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
DP_FLAGS = ("--data-parallel-size", "--dp-size", "--dp", "-dp")
PP_FLAGS = ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp")
EP_FLAGS = ("--enable-expert-parallel", "-ep", "--enable-ep-moe")
EP_SIZE_FLAGS = ("--ep-size", "--ep", "--expert-parallel-size")
DP_ATTENTION_FLAGS = ("--enable-dp-attention",)
# The engines' parsers take any beginning of a flag that no other flag shares.
TRUST_FLAGS = tuple("--trust-remote-code"[:end] for end in range(len("--trust"), 20))

_QUOTES = "\"'"
# A flag as a text program spoils it: a long dash in place of `--`, a curved quote before `-`.
_TYPOGRAPHIC = re.compile("(?:[\u2013\u2014]+|[\u201c\u201d\u201e\u2018\u2019]+-)[\\w-]")


def parse_server_args(value: Any) -> tuple[str, ...]:
    """Turn the YAML value into argv.

    Args:
        value: None, a string, a list, a tuple, or a mapping of flag to value.

    Raises:
        ValueError: The value cannot be read; the message names the position and the remedy.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        argv = split_shell(value)
    elif isinstance(value, list | tuple):
        argv = [_list_item(index, item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        argv = list(_from_mapping(value))
    else:
        raise ValueError(
            f"must be a string, a list or a mapping of flags, not {_type_name(value)} ({value!r})"
        )
    for element in argv:
        if "\0" in element:
            raise ValueError("holds a NUL character, which no command line can carry")
        if _TYPOGRAPHIC.match(element):
            raise ValueError(
                f"{element!r} begins with a typographic dash or quote; write - and quotes as a "
                "keyboard does"
            )
    check_own_flags(argv)
    return tuple(argv)


def split_shell(text: str) -> list[str]:
    """Split by POSIX shell quoting rules.

    Raises:
        ValueError: A quote is not closed or a backslash ends the text; names the position.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        position, quote = _open_quote(text)
        if quote:
            what = f"the quote {quote} opened at character {position + 1}"
            shown = text[position : position + 30]
            raise ValueError(f"{what} is never closed: {shown!r}; close it") from error
        raise ValueError(
            f"ends in a backslash (character {len(text)}) with nothing after it"
        ) from error


def _open_quote(text: str) -> tuple[int, str]:
    """Index and kind of the quote that is never closed, (-1, "") if there is none."""
    index, opened, quote = 0, -1, ""
    while index < len(text):
        char = text[index]
        if char == "\\" and quote != "'":
            index += 1
        elif not quote and char in _QUOTES:
            opened, quote = index, char
        elif char == quote:
            opened, quote = -1, ""
        index += 1
    return opened, quote


def _list_item(index: int, item: Any) -> str:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise ValueError(
            f"item {index} is {_type_name(item)} ({item!r}); an item of the list form is one "
            "command-line element; write it as text or a number"
        )
    text = str(item)
    if re.match(r"--?[A-Za-z][\w.-]*\s+\S", text):
        flag, rest = text.split(None, 1)
        raise ValueError(
            f"item {index} ({text!r}) would reach the server as one element; "
            f"write two items: {flag!r}, {rest!r}"
        )
    return text


def _from_mapping(flags: dict[str, Any]) -> Iterable[str]:
    """Yield argv of a mapping: `true` a bare flag, `false` and null nothing, the rest a value."""
    for name, value in flags.items():
        flag = name if name.startswith("-") else "--" + _dashed(name)
        if not re.fullmatch(r"--?[A-Za-z][^\s=]*", flag):
            raise ValueError(f"{name!r} is not the name of a flag")
        if value is None or value is False:
            continue
        yield flag
        if value is True:
            continue
        if isinstance(value, dict | list):
            try:
                # Compact and in file order; allow_nan=False because NaN is not JSON.
                yield json.dumps(value, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(f"the value of {name} is not JSON: {error}") from error
        elif isinstance(value, str | int | float):
            yield str(value)
        else:
            raise ValueError(f"the value of {name} is {_type_name(value)}")


def _dashed(name: str) -> str:
    """Write `tensor_parallel_size` the way every engine takes it; dotted parts keep theirs."""
    head, dot, rest = name.partition(".")
    return (head if dot else head.replace("_", "-")) + dot + rest


def canonical_flag(element: str) -> str:
    """`--tensor_parallel_size=2` -> `--tensor-parallel-size`; "" for what is no flag."""
    if not re.match(r"--?[A-Za-z]", element):
        return ""
    name = element.partition("=")[0]
    return name.replace("_", "-") if "." not in name else name


def check_own_flags(argv: Sequence[str]) -> None:
    """Refuse flags that the suite sets itself.

    Raises:
        ValueError: Naming the flag and what to do instead.
    """
    for element in argv:
        flag = canonical_flag(element)
        if flag in OWN_FLAGS:
            raise ValueError(f"{flag} is the suite's own: {OWN_FLAGS[flag]}; remove it")


def flag_values(argv: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """Every value given to a flag under any of its names, in order; None where it is bare."""
    found: list[str | None] = []
    for index, element in enumerate(argv):
        if canonical_flag(element) not in names:
            continue
        if "=" in element:
            found.append(element.partition("=")[2])
        elif index + 1 < len(argv) and not canonical_flag(argv[index + 1]):
            found.append(argv[index + 1])
        else:
            found.append(None)
    return found


def has_switch(argv: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a bare switch is on; `--no-<name>` switches it off, the last one counts.

    Raises:
        ValueError: The switch was given a value.
    """
    is_on = False
    off = {name.replace("--", "--no-", 1) for name in names if name.startswith("--")}
    for element in argv:
        flag = canonical_flag(element)
        if flag in names or flag in off:
            if "=" in element:
                raise ValueError(f"{flag} takes no value, but is written {element!r}")
            is_on = flag in names
    return is_on


def parallel_size(argv: Sequence[str], names: Sequence[str]) -> int:
    """A size such as TP, 1 where it is absent.

    Raises:
        ValueError: Not a positive whole number, or two different values.
    """
    values = flag_values(argv, names)
    sizes = set()
    for value in values:
        if value is None or not re.fullmatch(r"[0-9]{1,5}", value) or int(value) < 1:
            raise ValueError(
                f"{names[0]} must be a positive whole number, not {value or 'nothing'}"
            )
        sizes.add(int(value))
    if len(sizes) > 1:
        raise ValueError(f"{names[0]} is given twice, as {' and '.join(map(str, sorted(sizes)))}")
    return sizes.pop() if sizes else 1


def _type_name(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", dict: "a mapping"}
    return names.get(type(value), "a list" if isinstance(value, list) else "nothing usable")
