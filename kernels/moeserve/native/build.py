"""Compiles `kernels.c` with the machine's C compiler and loads it by ctypes.

Receives nothing; returns the library, or the reason why there is none, once a process. The result
is kept in the user's cache folder under a hash of source, flags and processor, so that a start
after the first one only loads it. Nothing of a model or a request gets near the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

# Floats in a vector of the kernels; widths are multiples of it.
LANES = 16

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "attention.c"))
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-shared", "-fPIC")
_TIMEOUT_S = 120.0

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True)
class Native:
    """The library's functions, or why there is none; see `kernels.c` for their arguments.

    Attributes:
        reason: "" where the functions are there.
        functions: The loaded library.
    """

    reason: str = ""
    functions: ctypes.CDLL | None = None


@functools.cache
def native() -> Native:
    """The library of this process."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return Native(reason=f"no C compiler on this machine ({', '.join(_COMPILERS)})")
    try:
        return Native(functions=_declared(ctypes.CDLL(str(_built(compiler)))))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        detail = said.decode(errors="replace").strip()[-300:] or str(error)
        logger.warning("native kernels are left out: %s", detail)
        return Native(reason=f"the native kernels do not compile here: {detail}")


def _built(compiler: str) -> Path:
    """The compiled library, from the cache folder or made now."""
    # `-march=native` is refused by some compilers on some processors; -mcpu is the other spelling.
    tune = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = (*_FLAGS, tune)
    parts = [path.read_bytes() for path in _SOURCES]
    parts += [compiler.encode(), " ".join(flags).encode(), _processor()]
    name = f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    folder = _cache_folder()
    target = folder / name
    if target.is_file():
        return target
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    made = Path(name)
    command = [compiler, *flags, "-o", name, str(_SOURCES[0]), "-lm"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        # Atomic: another server that starts now finds the whole file or none.
        made.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink()
        raise
    return target


def _cache_folder() -> Path:
    """A folder that only this user writes to; code is loaded from it."""
    folder = Path("~/.cache/moeserve").expanduser()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="moeserve-native-"))


def _processor() -> bytes:
    """What tells processors apart: a cache folder may be shared by several machines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part"))]
        return "\n".join(sorted(set(kept))).encode()
    return platform.processor().encode()


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.moeserve_add_norm.argtypes = [*(_POINTER,) * 4, _INT, _INT, _FLOAT]
    library.moeserve_add_norm.restype = None
    library.moeserve_route.argtypes = [
        *(_POINTER, _INT, _INT, _INT, ctypes.c_int, _FLOAT, _POINTER, _POINTER, _POINTER)
    ]
    library.moeserve_route.restype = _INT
    library.moeserve_experts_work.argtypes = [_INT] * 5
    library.moeserve_experts_work.restype = _INT
    library.moeserve_experts.argtypes = [_POINTER] * 6
    library.moeserve_experts.restype = None
    library.moeserve_attend.argtypes = [_POINTER] * 7
    library.moeserve_attend.restype = ctypes.c_int
    return library
