"""Strict YAML: bytes of one file -> plain values with the line of every key.

Receives a path; returns a `Document` (values, lines, problems) and never raises for what a
file contains. PyYAML's own loaders keep the last of two equal keys, build objects from tags,
and read `010` as 8 and `1:30` as 90; here each of these is a `Problem` with its line. What the
values mean is `config.py`, `hardware.py` and `lists.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evalsuite.errors import Problem
from evalsuite.yaml_nodes import MAX_DEPTH, Node, Report, compose
from evalsuite.yaml_scalars import read_scalar

# Our largest config has under 100 values; an alias bomb has millions.
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000

# What a path is to which nothing answers.
NO_FILE = "no such file"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """What one file holds.

    Attributes:
        file: The path as the user wrote it.
        value: Plain Python values, None where the file could not be read at all.
        lines: Key path -> 1-based line of the key (of the item, in a list).
        problems: Everything wrong with the file as YAML.
        holders: Top-level keys whose value carries an anchor that the file uses; they exist
            to be merged elsewhere and need be no known key.
    """

    file: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    holders: frozenset[str] = frozenset()

    def line(self, path: KeyPath) -> int:
        """Line of the nearest enclosing key that has one, 0 if none has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


class Unreadable:
    """Stands where a value was refused, so that later checks pass over it."""

    def __repr__(self) -> str:
        """Name the marker."""
        return "<unreadable>"


UNREADABLE = Unreadable()


def load_document(path: Path, display: str = "") -> Document:
    """Read one YAML file.

    Args:
        path: The file.
        display: How messages name it; `str(path)` by default.
    """
    file = display or str(path)
    text, problem = read_text(path, file)
    if problem is not None:
        return Document(file, None, problems=[problem])
    return parse_document(text, file)


def read_text(path: Path, file: str) -> tuple[str, Problem | None]:
    """Text of a regular UTF-8 file (a byte-order mark is dropped), or why there is none."""

    def refuse(message: str, line: int = 0) -> tuple[str, Problem]:
        return "", Problem("error", message, file, line)

    try:
        if path.is_dir():
            return refuse("is a folder; name a file in it")
        if not path.is_file():
            return refuse(absence(path))
        if path.stat().st_size > MAX_BYTES:
            return refuse(f"has {path.stat().st_size} bytes; the limit is {MAX_BYTES}")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        return refuse(f"cannot be read: {error}")
    try:
        return data.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return refuse(
            f"is not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); "
            "save it as UTF-8",
            line,
        )


def absence(path: Path) -> str:
    """What stands in the place of a regular file."""
    if path.is_dir():
        return "is a folder"
    if path.exists():
        return "is not a regular file"
    return f"is a link to {path.readlink()}, which is not there" if path.is_symlink() else NO_FILE


def parse_document(text: str, file: str) -> Document:
    """Parse YAML text; see `load_document`."""
    problems: list[Problem] = []

    def report(message: str, line: int, key: str = "") -> None:
        problems.append(Problem("error", message, file, line, key))

    try:
        root = compose(text, report)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = text.splitlines()[mark.line : mark.line + 1] if mark else []
        report(_syntax_message(error, "".join(at)), mark.line + 1 if mark else 0)
        return Document(file, None, problems=problems)
    except yaml.YAMLError as error:
        report(f"is not YAML: {str(error).splitlines()[0]}", 0)
        return Document(file, None, problems=problems)
    if root is None:
        if not problems:
            report("is empty: it holds no keys", 0)
        return Document(file, None, problems=problems)
    builder = _Builder(report)
    value = builder.build(root, (), 0)
    if builder.is_too_large:
        value = None
        report(f"holds more than {MAX_VALUES} values once its aliases are expanded", root.line)
    return Document(file, value, builder.lines, problems, frozenset(builder.holders))


def dotted(path: KeyPath) -> str:
    """Write a key path the way messages show it: `env.NAME`, `tags[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _syntax_message(error: yaml.MarkedYAMLError, line: str) -> str:
    """One line out of PyYAML's problem, with the usual cause where there is one."""
    problem = error.problem or "syntax error"
    context = f" {error.context}" if error.context else ""
    hint = ""
    if line[: len(line) - len(line.lstrip())].count("\t"):
        hint = "; YAML indents with blanks, not tabs"
    elif "mapping values are not allowed" in problem:
        hint = "; quote a value that holds `: `, or mend the indentation"
    elif "could not find expected ':'" in problem or "expected <block end>" in problem:
        hint = "; write `key: value`, all keys at the same indentation"
    return f"is not YAML: {problem}{context}{hint}"


class _Builder:
    """Node tree -> plain values, with lines, duplicates, merges, tags and the size limit."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.lines: dict[KeyPath, int] = {}
        self.num_values = 0
        self.holders: set[str] = set()

    @property
    def is_too_large(self) -> bool:
        return self.num_values > MAX_VALUES

    def build(self, node: Node, path: KeyPath, depth: int) -> Any:
        self.num_values += 1
        if self.is_too_large or node.kind == "refused":
            return UNREADABLE
        if depth > MAX_DEPTH:
            self.report(f"is nested more than {MAX_DEPTH} levels deep", node.line, dotted(path))
            return UNREADABLE
        if not self._is_tag_allowed(node, path):
            return UNREADABLE
        if node.kind == "scalar":
            return self._scalar(node, path)
        if node.kind == "list":
            items = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.line
                items.append(self.build(item, (*path, index), depth + 1))
            return items
        return self._mapping(node, path, depth)

    def _is_tag_allowed(self, node: Node, path: KeyPath) -> bool:
        allowed = {"scalar": "str", "list": "seq", "map": "map"}[node.kind]
        if node.tag in (None, "!", f"tag:yaml.org,2002:{allowed}"):
            return True
        tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        self.report(
            f"tag `{tag}` is refused: a config holds plain values and never builds objects "
            "or runs code; remove the tag",
            node.line,
            dotted(path),
        )
        return False

    def _scalar(self, node: Node, path: KeyPath) -> Any:
        event = node.value
        if event.style or node.tag is not None:
            return event.value
        value, fault = read_scalar(event.value)
        if fault:
            self.report(fault, node.line, dotted(path))
            return UNREADABLE
        return value

    def _mapping(self, node: Node, path: KeyPath, depth: int) -> dict[str, Any]:
        pairs = list(zip(node.value[::2], node.value[1::2], strict=True))
        own_lines: dict[str, int] = {}
        result: dict[str, Any] = {}
        merges = [(k, v) for k, v in pairs if _is_merge(k)]
        for key_node, value_node in merges:
            self._merge(result, value_node, path, depth)
            if key_node is not merges[0][0]:
                self.report(
                    f"`<<` given twice (first on line {merges[0][0].line}); "
                    "merge a list: `<<: [*a, *b]`",
                    key_node.line,
                    dotted(path),
                )
        for key_node, value_node in pairs:
            if _is_merge(key_node):
                continue
            if key_node.kind != "scalar":
                self.report("a key must be plain text", key_node.line, dotted(path))
                continue
            key = str(key_node.value.value)
            if key in own_lines:
                self.report(
                    f"given twice, on lines {own_lines[key]} and {key_node.line}; remove one",
                    key_node.line,
                    dotted((*path, key)),
                )
                continue
            own_lines[key] = key_node.line
            self.lines[(*path, key)] = key_node.line
            if not path and value_node.is_alias_target:
                self.holders.add(key)
            result[key] = self.build(value_node, (*path, key), depth + 1)
        return result

    def _merge(self, result: dict[str, Any], node: Node, path: KeyPath, depth: int) -> None:
        sources = node.value if node.kind == "list" else [node]
        for source in sources:
            if source.kind == "refused":
                continue
            if source.kind != "map":
                self.report("`<<` takes a mapping or a list of them", source.line, dotted(path))
                continue
            merged = self.build(source, path, depth + 1)
            # A refused one (its tag, its size) is reported where it stands.
            for key, value in merged.items() if isinstance(merged, dict) else ():
                result.setdefault(key, value)


def _is_merge(node: Node) -> bool:
    return node.kind == "scalar" and not node.value.style and node.value.value == "<<"
