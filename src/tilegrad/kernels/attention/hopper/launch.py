"""Attention on Hopper: what a call is on the host, and the launches of forward.py and backward.py.

float16 and bfloat16, head dimensions of 16 to 256 in steps of 8, the same for v, in any layout that TMA can address.
Which calls that leaves out is said by ../table.py. Nothing is allocated.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...scratch import Scratch, Shapes
from ..mask import Mask
from ..problem import LOG2E, Sizes, four_dims, sizes_of, tma_refusal
from ..triton.launch import LEAST_FACTOR, multiprocessors
from .forward import _attention_fwd_kernel
from .forward_schedule import ROWS
from .tma import Launch, current, prepare, tile_descriptor

KEPT_BYTES = 24 << 20  # of k and v that programs at work together should find in L2
ALONE = 1.35  # warpgroups that share a multiprocessor and take as long as one that has it for itself


class Tiling(NamedTuple):
    """Warpgroups of 64 rows, columns of a tile, slots for tiles of k and of v, slots for q."""

    warpgroups: int
    columns: int
    slots: int
    q_slots: int


TILINGS = {  # by the head dimension, padded
    32: Tiling(2, 128, 2, 2),
    64: Tiling(3, 128, 3, 2),
    128: Tiling(2, 128, 2, 2),
    256: Tiling(2, 64, 2, 1),
}
WINDOW_TILING = Tiling(3, 64, 4, 2)  # of a padded dimension of 128: less beyond a window's two edges
MOST_LAUNCHES = 1024
_launches: dict[tuple[object, ...], Launch] = {}


def _tiling(sizes: Sizes, varlen: bool, programs: int) -> Tiling:
    """The usual one; of one warpgroup where there is a program for each of its tiles; narrow columns for a window at D 128."""
    tiling = TILINGS[sizes.block_d]
    if varlen:
        return tiling
    if -(-sizes.tq // ROWS.value) * sizes.hq * sizes.batch <= programs:
        return tiling._replace(warpgroups=1)
    return WINDOW_TILING if sizes.block_d == 128 and sizes.left is not None else tiling


def _wave(sizes: Sizes, row_tiles: int, programs: int, tiling: Tiling) -> int:
    """Heads whose tiles are dealt out together, the longest first; of windows, as many as keep their k and v in L2."""
    heads = sizes.batch * sizes.hq
    window = sizes.tk if sizes.left is None else min(sizes.tk, sizes.left + ROWS.value * tiling.warpgroups)
    most = min(heads, max(1, KEPT_BYTES // max(1, 4 * window * sizes.d * sizes.hkv // sizes.hq)))
    if sizes.left is not None or row_tiles * heads <= programs:
        return most
    return _balanced_wave(sizes.tq, sizes.tk, sizes.right, row_tiles, heads, most, programs, tiling)


@functools.lru_cache(1024)
def _balanced_wave(
    tq: int, tk: int, right: int | None, row_tiles: int, heads: int, most: int, programs: int, tiling: Tiling
) -> int:
    """Of 1 … `most` heads, or all where rows under a causal edge are so many that k and v need not stay in L2, the number
    whose slowest program has the least to do, as forward_schedule.py deals the tiles out."""
    steps = _tile_steps(tq, tk, right, row_tiles, tiling)
    rounds = -(-row_tiles * heads // programs)
    waves = {max(1, most * part // 16) for part in range(17)}
    if right is not None and row_tiles >= 40:
        waves.add(heads)

    def slowest(wave: int) -> float:
        whole, rest = divmod(heads, wave)
        dealt = torch.cat([steps.repeat_interleave(wave).repeat(whole), steps.repeat_interleave(rest)])
        dealt = torch.nn.functional.pad(dealt, (0, rounds * programs - dealt.numel())).view(rounds, programs)
        return round(float((dealt[::2].sum(0) + dealt[1::2].flip(1).sum(0)).max()), 3)

    return min(sorted(waves), key=slowest)


def _tile_steps(tq: int, tk: int, right: int | None, row_tiles: int, tiling: Tiling) -> Tensor:
    """How long each tile of rows of a head takes, last rows first, in steps of all warpgroups over a tile of columns: one to
    start and to end, and for each tile of columns the share of the warpgroups that have rows."""
    end = tq - ROWS.value * tiling.warpgroups * torch.arange(row_tiles, device="cpu")
    seen = torch.full_like(end, tk) if right is None else (end + (tk - tq + right)).clamp(1, tk)
    at_work = (end / ROWS.value).ceil().clamp(ALONE, tiling.warpgroups) if tiling.warpgroups > 1 else 1
    return 1 + (seen / tiling.columns).ceil() * at_work / tiling.warpgroups


def fwd(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch) -> None:
    if o is lse is None:
        return
    taken = scratch["taken"] if mask.varlen else None
    tensors = (q, k, v, o, lse, mask.sinks, mask.cu_seqlens_q, mask.cu_seqlens_k, taken)
    addresses = tuple([None if x is None else x.data_ptr() for x in tensors])
    strides = (q.stride(), k.stride(), v.stride(), o is not None and o.stride(), lse is not None and lse.stride())
    cu, sinks = mask.cu_seqlens_q, mask.sinks
    lengths = None if cu is None else (cu.shape, mask.max_seqlen_q, mask.max_seqlen_k)
    options = (mask.band, mask.scale, mask.softcap, lengths, None if sinks is None else (sinks.dtype, sinks.stride()))
    key = (addresses, q.shape, k.shape, strides, options, q.dtype, q.device)
    with current(q.device):
        launch = _launches.get(key)
        if launch is None:
            if len(_launches) >= MOST_LAUNCHES:
                _launches.clear()
            launch = _launches[key] = _prepare_fwd(q, k, v, mask, o, lse, taken)
        if taken is not None:
            taken.zero_()
        launch()


def _prepare_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, o: Tensor | None, lse: Tensor | None, taken: Tensor | None
) -> Launch:
    sizes = sizes_of(q, k, v, mask)
    varlen = mask.varlen
    unfit = None if o is None else tma_refusal("o", o, varlen)
    if unfit:
        raise ValueError(f"{unfit}; kernel='triton' writes it as it is")
    tiling = _tiling(sizes, varlen, multiprocessors(q.device))
    rows = ROWS.value * tiling.warpgroups
    row_tiles = q.shape[0] // rows + sizes.batch if varlen else -(-sizes.tq // rows)
    tiles = row_tiles * sizes.hq * (1 if varlen else sizes.batch)
    programs = min(tiles, multiprocessors(q.device))
    wave = 1 if varlen else _wave(sizes, row_tiles, programs, tiling)
    scale, sinks = float(mask.scale_for(sizes.d)), mask.sinks
    lse_strides = (0, 0, 0) if lse is None else (0, *lse.stride()) if varlen else lse.stride()
    o_strides = (0, 0, 0) if o is None else four_dims(o, varlen)[1][:3]
    strides = (*o_strides, *lse_strides, 0 if sinks is None else sinks.stride(0))
    constants = (
        tiling.warpgroups, tiling.columns, sizes.block_d, sizes.d, tiling.slots, tiling.q_slots, scale < 0.0
    )  # fmt: skip
    key = (
        q.dtype, varlen, sinks is not None and sinks.dtype, o is None, lse is None, sizes.left is None,
        sizes.right is None, mask.softcap == 0.0, constants, *(stride >= 2**31 for stride in strides),
    )  # fmt: skip
    arguments = (
        tile_descriptor(q, varlen, ROWS.value, sizes.block_d),
        tile_descriptor(k, varlen, tiling.columns, sizes.block_d),
        tile_descriptor(v, varlen, tiling.columns, sizes.block_d),
        mask.cu_seqlens_q, mask.cu_seqlens_k, sinks,
        None if o is None else tile_descriptor(o, varlen, ROWS.value, sizes.block_d),
        o, lse, taken,
        *strides, sizes.batch, sizes.hq, sizes.hq // sizes.hkv, row_tiles, wave,
        sizes.tq, sizes.tk, sizes.left, sizes.right,
        max(abs(scale) * LOG2E, LEAST_FACTOR), mask.softcap * LOG2E if mask.softcap else None, *constants,
    )  # fmt: skip
    return prepare(_attention_fwd_kernel, key, programs, arguments, num_warps=4)


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    from . import backward as hopper_bwd

    if not backward:
        return {"taken": ((1,), torch.int32)} if mask.varlen else {}
    return hopper_bwd.workspace(q, sizes_of(q, k, v, mask), mask.varlen, deterministic)


def bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    from . import backward as hopper_bwd

    hopper_bwd.launch(
        q, k, v, o, lse, do, dlse, mask, sizes_of(q, k, v, mask),
        dq=dq, dk=dk, dv=dv, dsinks=dsinks, scratch=scratch, deterministic=deterministic,
    )  # fmt: skip
