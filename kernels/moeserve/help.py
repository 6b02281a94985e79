"""The options of `moeserve serve` as text: `--help`, and the table of `docs/server.md`.

Receives the rows of `flags.py` and the defaults of their fields; returns text. Parsing is
`args.py`.
"""

from __future__ import annotations

from moeserve.args import default_of
from moeserve.flags import FLAGS, Flag

_HEAD = """\
usage: moeserve MODEL [options]      (also: moeserve serve MODEL, python -m moeserve)
       moeserve backends|bench|repro ...

MODEL: a Hugging Face folder, moeserve/minigsm-tiny, a hub name that is in the local cache, or a
preset with --load-format dummy.

options (dashes or underscores, --a b or --a=b):"""


def help_text() -> str:
    """Return the text of `moeserve --help`."""
    lines = [_HEAD]
    for flag in FLAGS:
        choices = f" One of: {', '.join(flag.choices)}." if flag.choices else ""
        lines.append(f"  {_spelling(flag)}\n      {flag.help}{choices} Default: {_default(flag)}")
    return "\n".join(lines)


def options_table() -> str:
    """Return the options as a Markdown table."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for flag in FLAGS:
        choices = f" One of {', '.join(flag.choices)}." if flag.choices else ""
        lines.append(f"| `{_spelling(flag)}` | {_default(flag)} | {flag.help}{choices} |")
    return "\n".join(lines)


def _spelling(flag: Flag) -> str:
    name = f"{flag.short}, {flag.name}" if flag.short else flag.name
    if flag.kind == "switch":
        name += ", --no-" + flag.name.removeprefix("--")
    return name


def _default(flag: Flag) -> str:
    value = default_of(flag)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in ("", (), {}):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
