"""The two grouped GEMMs of an MoE layer: gather in the first, ordered sum after the second.

`gate_up` reads rows of x by index, multiplies with gate and up rows of w13 and stores
`activation(gate) * up` expert after expert; `down` multiplies with w2, scales by the router weight
in float32 and stores by slot. Slots are `t * K + k`; which slots an expert owns comes from
`router.py`. The device code is `grouped_gemm_kernels.py`, the sum over a token's slots
`combine.py`, the path for a handful of tokens `gemv.py`.

Accumulation is float32 in ascending K blocks, without split-K: an element's value depends on
BLOCK_K and the matrix instruction, never on which rows share its tile. Offsets are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from moeserve.triton_kernels.dependent import dependent
from moeserve.triton_kernels.grouped_gemm_kernels import moe_down_kernel, moe_gate_up_kernel


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM; `is_swapped` puts the weights on the M side of the instruction.

    `is_persistent` launches `programs_per_sm` programs for each multiprocessor, which loop over
    tiles; where all operands come through descriptors and there are no short blocks, a program
    fetches its next tile while it stores one. `uses_tma` reads the weights, and in the second GEMM
    the activations, through tensor descriptors; gate and up are then one operand. An expert's last
    row block, where it has at most `tail_m` rows, is computed with that many, and not padded to a
    whole block; 0 turns this off. `is_arranged` has the first GEMM read tokens, copied into the
    experts' order by `moe_arrange.py`, through a descriptor.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 1
    is_swapped: bool = False
    is_persistent: bool = False
    uses_tma: bool = False
    tail_m: int = 0
    is_arranged: bool = False
    programs_per_sm: int = 1


ACTIVATION_CODES = {"silu": 0, "swiglu_oai": 1, "relu2": 2}


def num_row_blocks(num_slots: int, num_local: int, block_m: int) -> int:
    """Upper bound of row blocks over all splits of `num_slots` among the local experts."""
    return min(num_slots, (num_slots + num_local * (block_m - 1)) // block_m)


def _grid(tile: Tile, num_slots: int, num_local: int, width: int, device: torch.device) -> int:
    num_n = -(-width // tile.block_n)
    tiles = num_row_blocks(num_slots, num_local, tile.block_m) * num_n
    if not tile.is_persistent:
        return tiles
    return min(tiles, _num_sms(device) * tile.programs_per_sm)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # interpreted
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms


def _is_flat(tile: Tile, is_described: bool) -> bool:
    """Whether the loops over tiles and depth can be one, in which loads run ahead of a store."""
    return tile.is_persistent and tile.uses_tma and is_described and tile.tail_m == 0


def _is_tail_swapped(tile: Tile) -> bool:
    """Few rows go on the N side of the instruction, if the weights fill its M side."""
    return tile.is_swapped or (tile.tail_m < 64 and tile.block_n >= 64)


def _projections_operand(w13: torch.Tensor, num_projections: int, tile: Tile) -> object:
    """The weights as they are, or a descriptor of blocks of both projections' rows."""
    if not tile.uses_tma:
        return w13
    from triton.tools.tensor_descriptor import TensorDescriptor

    parts = w13.view(w13.shape[0], num_projections, -1, w13.shape[2])
    block = [1, num_projections, tile.block_n, tile.block_k]
    return TensorDescriptor.from_tensor(parts, block)


def _operand(matrix: torch.Tensor, rows: int, tile: Tile, is_described: bool) -> object:
    """A [rows, k] matrix as it is, or a descriptor of blocks of `rows` rows."""
    if not is_described:
        return matrix
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, tile.block_k])


def gate_up(
    x: torch.Tensor,
    w13: torch.Tensor,
    act: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    *,
    top_k: int,
    activation: str,
    weights_on_input: torch.Tensor | None = None,
) -> None:
    """First grouped GEMM with its activation.

    Args:
        x: [T, H], rows may be strided; [T * K, H] in the experts' order where `tile.is_arranged`.
        w13: [E_loc, 2I, H] (or [E_loc, I, H] for "relu2"), contiguous, gate rows first.
        act: [T * K, I], written for every slot listed in `buckets`: the rows of expert 0 in the
            order of its list, then those of expert 1, and so on.
        buckets: (counts [E_loc], slots [E_loc, >= T * K]) from `router.py`.
        tile: Tile sizes.
        top_k: K.
        activation: A name of `ACTIVATION_CODES`.
        weights_on_input: [T, K] float32, multiplied into the token (Llama-4).
    """
    counts, slots = buckets
    num_local, H = w13.shape[0], w13.shape[2]
    I = act.shape[1]
    is_interpreted = not x.is_cuda
    moe_gate_up_kernel[(_grid(tile, act.shape[0], num_local, I, x.device),)](
        _operand(x, tile.block_m, tile, tile.is_arranged),
        _operand(x, tile.tail_m or tile.block_m, tile, tile.is_arranged),
        _projections_operand(w13, w13.shape[1] // I, tile), act, counts, slots,
        weights_on_input if weights_on_input is not None else x,
        slots.stride(0), x.stride(0), num_local, H, I,
        K=top_k, BLOCK_E=triton.next_power_of_2(num_local),
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        FLAT=_is_flat(tile, tile.is_arranged),
        TAIL=tile.tail_m, TAIL_SWAP=_is_tail_swapped(tile),
        SWAP=tile.is_swapped, TMA=tile.uses_tma, ARRANGED=tile.is_arranged, UPCAST=is_interpreted,
        EVEN_N=I % tile.block_n == 0, EVEN_K=H % tile.block_k == 0,
        ACTIVATION=ACTIVATION_CODES[activation],
        WEIGHT_ON_INPUT=weights_on_input is not None, IS_GATED=activation != "relu2",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(x),
    )  # fmt: skip


def down(
    act: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    buckets: tuple[torch.Tensor, torch.Tensor],
    tile: Tile,
    *,
    weights: torch.Tensor | None,
) -> None:
    """Second grouped GEMM.

    Args:
        act: [T * K, I], as `gate_up` leaves it.
        w2: [E_loc, H, I], contiguous.
        out: [T * K, H], written for every slot listed in `buckets`.
        buckets: As for `gate_up`.
        tile: Tile sizes.
        weights: [T, K] float32 multiplied into the result, None where they went into the input.
    """
    counts, slots = buckets
    num_local, H, I = w2.shape
    is_interpreted = not act.is_cuda
    moe_down_kernel[(_grid(tile, act.shape[0], num_local, H, act.device),)](
        _operand(act, tile.block_m, tile, tile.uses_tma),
        _operand(act, tile.tail_m or tile.block_m, tile, tile.uses_tma),
        _operand(w2.view(-1, I), tile.block_n, tile, tile.uses_tma), out, counts, slots,
        weights if weights is not None else act,
        slots.stride(0), num_local, H, I,
        BLOCK_E=triton.next_power_of_2(num_local),
        BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP_M=tile.group_m,
        FLAT=_is_flat(tile, True),
        TAIL=tile.tail_m, TAIL_SWAP=_is_tail_swapped(tile),
        SWAP=tile.is_swapped, TMA=tile.uses_tma, UPCAST=is_interpreted,
        EVEN_N=H % tile.block_n == 0, EVEN_K=I % tile.block_k == 0,
        HAS_WEIGHT=weights is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(act),
    )  # fmt: skip
