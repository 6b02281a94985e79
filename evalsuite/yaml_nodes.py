"""YAML events -> a tree of nodes with lines, without recursion and without building objects.

Receives the text of one file and a function that takes faults; returns the root of its only
document. libyaml does the scanning; what the nodes mean is `yaml_loader.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import yaml

# Deeper than any config; libyaml itself stops at 1000 levels.
MAX_DEPTH = 40


class Report(Protocol):
    """Takes one fault: message, 1-based line, key path as text."""

    def __call__(self, message: str, line: int, key: str = "") -> None:
        """Record the fault."""
        ...


@dataclass
class Node:
    """One node of the tree.

    Attributes:
        kind: "scalar", "list", "map", or "refused" for an alias without an anchor.
        line: 1-based line where it starts.
        value: The scalar event; the items; or key, value, key, value, ...
        tag: Explicit tag, None where there is none.
        is_alias_target: Whether an alias of this file names it.
    """

    kind: str
    line: int
    value: Any = None
    tag: str | None = None
    is_alias_target: bool = False


def compose(text: str, report: Report) -> Node | None:
    """Events -> node tree of the first document, without recursion (libyaml does the scanning)."""
    stack: list[Node] = []
    anchors: dict[str, Node] = {}
    # Anchor of each open collection: it counts only once the collection is closed, so that
    # a collection cannot hold itself.
    open_anchors: list[str | None] = []
    root: Node | None = None
    num_documents = 0

    def attach(node: Node) -> None:
        nonlocal root
        if stack:
            stack[-1].value.append(node)
        elif root is None:
            root = node

    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.DocumentStartEvent):
            num_documents += 1
            if num_documents > 1:
                report("a second document starts here (`---`); one file holds one config", line)
                return root
        elif isinstance(event, yaml.ScalarEvent):
            node = Node("scalar", line, event, event.tag)
            attach(node)
            if event.anchor:
                anchors[event.anchor] = node
        elif isinstance(event, yaml.AliasEvent):
            target = anchors.get(str(event.anchor))
            if target is None:
                report(f"alias `*{event.anchor}` names no anchor defined before it", line)
                target = Node("refused", line)
            target.is_alias_target = True
            attach(target)
        elif isinstance(event, yaml.CollectionStartEvent):
            kind = "map" if isinstance(event, yaml.MappingStartEvent) else "list"
            node = Node(kind, line, [], event.tag)
            attach(node)
            stack.append(node)
            open_anchors.append(event.anchor)
            if len(stack) > MAX_DEPTH:
                report(f"is nested more than {MAX_DEPTH} levels deep", line)
                return None
        elif isinstance(event, yaml.CollectionEndEvent):
            node, anchor = stack.pop(), open_anchors.pop()
            if anchor:
                anchors[anchor] = node
    return root
