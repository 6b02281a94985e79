"""Checkpoints that cannot be loaded are named, with what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeserve.errors import UsageError
from moeserve.runner.weights import load_safetensors

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def destinations() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(4, 3), "b.weight": torch.zeros(3)}


def save(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    save_file({"a.weight": torch.ones(4, 3, dtype=dtype), "b.weight": torch.ones(3)}, folder / FILE)
    return folder / FILE


def test_what_is_read_is_counted_and_copied(tmp_path: Path) -> None:
    save(tmp_path, torch.bfloat16)
    places = destinations()
    assert load_safetensors(tmp_path, places) == 4 * 3 * 2 + 3 * 4
    assert all(torch.equal(place, torch.ones_like(place)) for place in places.values())


@pytest.mark.parametrize("kept", [0, 5, 40, -4])
def test_a_file_that_was_cut_off(tmp_path: Path, kept: int) -> None:
    path = save(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=rf"{FILE}: is no whole safetensors file of [\d,]+ bytes"):
        load_safetensors(tmp_path, destinations())


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError, match=r"pointer of Git LFS.*git lfs pull"):
        load_safetensors(tmp_path, destinations())


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps({"weight_map": 3}), json.dumps({"weight_map": {"a": 1}})]
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    save(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(
        UsageError, match=rf"{INDEX}: (not valid JSON|expected an object|key 'weight_map' must map)"
    ):
        load_safetensors(tmp_path, destinations())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantized_tensors_without_a_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path, dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UsageError, match=rf"a\.weight is {name}, a quantized checkpoint's"):
        load_safetensors(tmp_path, destinations())
