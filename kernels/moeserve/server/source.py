"""Which code this server runs, as one short hash, so that a rebuilt kernel can be told from before.

Receives nothing; returns what `/version` says under `source`. Weights are not in it: which model
is served is the client's to ask.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import moeserve

# Out-of-tree backends; the same group as `moe/backends/registry.py`, which imports torch.
_GROUP = "moeserve.moe_backends"
# Where kernels come from besides our own files; whatever is not installed is left out.
_LIBRARIES = ("torch", "triton", "flashinfer-python", "amd-aiter", "sonic-moe")
_NOT_CODE = frozenset({".pyc", ".safetensors"})


def source_hash() -> str:
    """Hash the files of this package and of other packages' backends, and the libraries' versions.

    Returns:
        16 hex digits; equal on every machine that has the same files and versions.
    """
    digest = hashlib.sha256()
    for root in (Path(moeserve.__file__).parent, *_backend_roots()):
        paths = [root] if root.is_file() else sorted(root.rglob("*"))
        for path in paths:
            if path.is_file() and path.suffix not in _NOT_CODE:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root.parent)} {len(content)}\n".encode())
                digest.update(content)
    for name in _LIBRARIES:
        try:
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()[:16]


def _backend_roots() -> Iterator[Path]:
    """Folder or file of each package that brings a backend; none is imported."""
    points = importlib.metadata.entry_points(group=_GROUP)
    for name in sorted({point.module.partition(".")[0] for point in points}):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        if spec.submodule_search_locations:
            yield from map(Path, spec.submodule_search_locations)
        elif spec.origin:
            yield Path(spec.origin)
