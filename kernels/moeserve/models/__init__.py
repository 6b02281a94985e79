"""Model classes, found by the architecture name in `config.json`.

Each file here that sets `ARCHITECTURES` (a mapping from architecture name to class) is known by
being in this folder. `config.py` reads the shapes; `runner/weights.py` fills the parameters.
"""

from __future__ import annotations

import pkgutil
from difflib import get_close_matches
from importlib import import_module

from torch import nn

from moeserve.errors import Unsupported


def known_architectures() -> dict[str, type[nn.Module]]:
    """Architecture name -> class, over every file of this folder."""
    found: dict[str, type[nn.Module]] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = import_module(f"{__name__}.{module.name}")
        found.update(getattr(loaded, "ARCHITECTURES", {}))
    return found


def model_class(architecture: str) -> type[nn.Module]:
    """Return the class that runs an architecture.

    Raises:
        Unsupported: None does; lists the known ones and the closest.
    """
    known = known_architectures()
    if architecture in known:
        return known[architecture]
    close = get_close_matches(architecture, known, n=1)
    hint = f"; the closest is {close[0]}" if close else ""
    raise Unsupported(
        f"architecture {architecture!r} cannot be served{hint}. Known: {', '.join(sorted(known))}"
    )
