"""Which backends there are: those of this folder, then those of other packages.

Receives nothing, returns instances by name. The order of preference is `policy.py`, never the
order here. A package adds a backend by an entry point in the group `moeserve.moe_backends` that
names an instance of `Backend`, or its class.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from moeserve.moe import backends as folder
from moeserve.moe.backends.base import Backend

GROUP = "moeserve.moe_backends"


@dataclass(frozen=True)
class Registry:
    """Every backend that can be named.

    Attributes:
        in_tree: Name to backend.
        out_of_tree: The same, of other packages; chosen only by explicit name.
        broken: Name of an out-of-tree backend that could not be loaded, to the reason.
    """

    in_tree: Mapping[str, Backend]
    out_of_tree: Mapping[str, Backend]
    broken: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in-tree first."""
        return (*self.in_tree, *self.out_of_tree, *self.broken)

    def get(self, name: str) -> Backend:
        """The backend of that name.

        Raises:
            KeyError: There is none, or it is broken.
        """
        return self.in_tree[name] if name in self.in_tree else self.out_of_tree[name]

    def unknown(self, name: str) -> str:
        """What to say of a name that is none, with the closest one."""
        close = get_close_matches(name, self.names, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        return f"no backend {name!r}; known: {list(self.names)}{hint}"


@cache
def registry() -> Registry:
    """The registry of this process; folder and entry points are read once."""
    in_tree = load_folder()
    out_of_tree, broken = load_entry_points(entry_points(group=GROUP), in_tree)
    return Registry(in_tree, out_of_tree, broken)


def load_folder() -> dict[str, Backend]:
    """Backends of this tree; a module without a `BACKEND` is a helper of the others."""
    found: dict[str, Backend] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        backend = getattr(
            importlib.import_module(f"{folder.__name__}.{module.name}"), "BACKEND", None
        )
        if backend is not None:
            found[backend.name] = backend
    return found


def load_entry_points(
    points: Iterable[EntryPoint], in_tree: Mapping[str, Backend]
) -> tuple[dict[str, Backend], dict[str, str]]:
    """Loads other packages' backends; one that fails becomes a reason, never a crash."""
    out_of_tree: dict[str, Backend] = {}
    broken: dict[str, str] = {}
    for point in points:
        name = point.name
        if name in in_tree:
            continue  # a name of this tree stays this tree's
        try:
            loaded = point.load()
            backend = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # noqa: BLE001 - other people's code; the fault becomes data
            broken[name] = f"entry point {point.value} failed: {type(error).__name__}: {error}"
            continue
        if not isinstance(backend, Backend):
            broken[name] = f"entry point {point.value} is no moeserve.moe.backends.base.Backend"
        elif name in out_of_tree:
            broken[name] = f"entry point {point.value} takes a name that is in use"
        elif backend.name != name:
            broken[name] = f"entry point {point.value} calls its backend {backend.name!r}"
        else:
            out_of_tree[name] = backend
    return out_of_tree, broken
