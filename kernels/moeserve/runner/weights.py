"""Fills a model's parameters from safetensors, or with random numbers of the right scale.

Receives a model folder and the model's `destinations` (checkpoint name -> part of a parameter);
returns what was read. Which name goes where is the model's business. Where the model is cut over
ranks, its `Shards` say which part of a tensor is wanted here, and nothing else is read.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.errors import UsageError
from moeserve.json_file import json_object
from moeserve.models.shards import NOT_CUT, Cut, Shards

logger = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
# Files read side by side; each holds one copy to the device.
MAX_READERS = 8
_LFS_POINTER = b"version https://git-lfs"
# Without a scale beside them, others would be copied as if they were the weights.
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Written by some exporters although they can be computed; not parameters.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index where it has one.

    Raises:
        UsageError: There is none, or the index is none or names a file that is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(_weight_map(index).values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise UsageError(f"{index}: names files that are missing: {', '.join(missing)}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder}: no *.safetensors file; use --load-format dummy for no weights")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    names = json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{index}: key 'weight_map' must map tensors to file names")
    return names


def load_safetensors(
    folder: Path, destinations: Mapping[str, Tensor], shards: Shards = NOT_CUT
) -> int:
    """Copy every checkpoint tensor, or this rank's part of it, to its place.

    Args:
        folder: Model folder.
        destinations: From the model.
        shards: From the model.

    Returns:
        Bytes read.

    Raises:
        UsageError: A file cannot be read; a tensor is missing, unknown, of another shape or of a
            dtype that is no plain number; names it.
    """
    start = time.perf_counter()
    files = checkpoint_files(folder)
    # Copies release the interpreter, so files are read side by side, straight to the device.
    with ThreadPoolExecutor(min(MAX_READERS, len(files))) as pool:
        parts = list(pool.map(lambda path: _load_file(path, destinations, shards), files))
    missing = set(destinations).difference(*(names for names, _ in parts))
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise UsageError(f"{folder}: {len(missing)} tensors missing, among them {some}")
    if any(tensor.is_cuda for tensor in destinations.values()):
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    total = sum(num_bytes for _, num_bytes in parts)
    rate = total / max(seconds, 1e-9)
    logger.info("loaded %.3f GB in %.2f s (%.2f GB/s)", total / 1e9, seconds, rate / 1e9)
    return total


def _load_file(
    path: Path, destinations: Mapping[str, Tensor], shards: Shards
) -> tuple[set[str], int]:
    """Copy one file's tensors; returns their names and bytes."""
    try:
        return _load_tensors(path, destinations, shards)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: {_unreadable(path, error)}") from error


def _unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        return "is a pointer of Git LFS, not the weights; fetch them with git lfs pull"
    return f"is no whole safetensors file of {path.stat().st_size:,} bytes: {error}"


def _load_tensors(
    path: Path, destinations: Mapping[str, Tensor], shards: Shards
) -> tuple[set[str], int]:
    names: set[str] = set()
    num_bytes = 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the handle is no mapping
            if name in shards.elsewhere or name.endswith(_IGNORED_SUFFIXES):
                continue
            if _is_repeated_head(name, destinations):
                continue
            if name not in destinations:
                unknown = set(destinations).difference(file.keys())
                raise UsageError(f"{path}: unknown tensor {name!r}{_hint(name, unknown)}")
            label, cut = f"{path}: {name}", shards.cuts.get(name)
            if cut is None:
                tensor = file.get_tensor(name)
            else:
                part = file.get_slice(name)
                _check_shape(tuple(part.get_shape()), cut.whole(destinations[name]), label)
                tensor = part[cut.index(destinations[name])]
            _fill(destinations[name], tensor, label)
            num_bytes += tensor.numel() * tensor.dtype.itemsize
            names.add(name)
    return names, num_bytes


def _is_repeated_head(name: str, destinations: Mapping[str, Tensor]) -> bool:
    """A tied model's output projection, which some exporters write a second time."""
    return name == "lm_head.weight" and name not in destinations


def _hint(name: str, missing: set[str]) -> str:
    close = get_close_matches(name, missing, n=1)
    return f"; the closest one wanted is {close[0]!r}" if close else ""


def _fill(destination: Tensor, tensor: Tensor, label: str) -> None:
    is_spread = tensor.dim() == 1 and destination.dim() == 2  # a norm shared by all heads
    expected = destination.shape[1:] if is_spread else destination.shape
    _check_shape(tuple(tensor.shape), tuple(expected), label)
    if tensor.dtype not in _PLAIN_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _PLAIN_DTYPES)
        raise UsageError(
            f"{label} is {str(tensor.dtype).removeprefix('torch.')}, a quantized checkpoint's; "
            f"weights can be {known}"
        )
    destination.copy_(tensor)


def _check_shape(shape: tuple[int, ...], expected: tuple[int, ...], label: str) -> None:
    if shape != expected:
        raise UsageError(
            f"{label} has shape {list(shape)}, expected {list(expected)}: "
            "config.json and weights do not belong together"
        )


def fill_dummy(destinations: Mapping[str, Tensor], seed: int, shards: Shards = NOT_CUT) -> None:
    """Draw every weight so that activations keep their size from layer to layer.

    Norms stay 1, biases 0; a matrix [out, in] is normal with standard deviation in ** -0.5, so
    router logits have a spread of about one and routing is neither even nor collapsed.

    Args:
        destinations: From the model.
        seed: The same weights for the same seed, device and dtype; on one rank and on several they
            differ, but all ranks of one server hold parts of the same model.
        shards: From the model.
    """
    generator: torch.Generator | None = None
    for name, destination in destinations.items():
        if shards is not NOT_CUT:
            # A stream for each name: ranks hold different names, and what they share is equal.
            draw = torch.Generator(device=destination.device)
            draw.manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
            _fill_dummy_part(name, destination, draw, shards.cuts.get(name))
            continue
        if generator is None:
            generator = torch.Generator(device=destination.device).manual_seed(seed)
        _fill_dummy_part(name, destination, generator, None)


def _fill_dummy_part(
    name: str, destination: Tensor, generator: torch.Generator, cut: Cut | None
) -> None:
    if name.endswith("norm.weight"):
        destination.fill_(1.0)
    elif name.endswith(".bias"):
        destination.zero_()
    elif cut is None:
        std = float(destination.shape[-1] ** -0.5)
        destination.normal_(0.0, std, generator=generator)
    else:
        whole = destination.new_empty(cut.whole(destination))
        whole.normal_(0.0, float(whole.shape[-1] ** -0.5), generator=generator)
        destination.copy_(whole[cut.index(destination)])
