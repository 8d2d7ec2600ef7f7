"""Attention on Hopper: what a call is on the host, and the launches of hopper_fwd.py and hopper_bwd.py.

float16 and bfloat16, head dimensions of 16 to 256 in steps of 8, the same for v, in any layout that TMA can address.
Which calls that leaves out is said by kernels/dispatch.py. Nothing is allocated.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes
from .hopper_fwd import ROWS, _attention_fwd_kernel
from .hopper_tma import Launch, current, four_dims, prepare, refusal, tile_descriptor
from .mask import Mask
from .triton_attention import LEAST_FACTOR, LOG2E, Sizes, multiprocessors, sizes_of

KEPT_BYTES = 24 << 20  # of k and v that programs at work together should find in L2


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
MOST_LAUNCHES = 1024
_launches: dict[tuple[object, ...], Launch] = {}


def _wave(sizes: Sizes, row_tiles: int, programs: int, columns: int) -> int:
    """Heads whose tiles are dealt out together, the longest first; 1 where all tiles are as long."""
    if sizes.right is None or sizes.left is not None:
        return 1
    heads = sizes.batch * sizes.hq
    head_bytes = max(1, 4 * sizes.tk * sizes.d * sizes.hkv // sizes.hq)
    return _balanced_wave(row_tiles, heads, sizes.tk, min(heads, max(1, KEPT_BYTES // head_bytes)), programs, columns)


@functools.lru_cache(1024)
def _balanced_wave(row_tiles: int, heads: int, tk: int, most: int, programs: int, columns: int) -> int:
    """Of 1 … `most` heads, or all where rows are so many that k and v need not stay in L2, the number whose slowest program
    has the least to do, as hopper_fwd.py deals the tiles out."""
    rounds = -(-row_tiles * heads // programs)
    work = 1 + torch.linspace(1.0, tk / columns, row_tiles, device="cpu").flip(0)
    waves = {max(1, most * part // 16) for part in range(2, 17)} | ({heads} if row_tiles >= 40 else set())

    def slowest(wave: int) -> float:
        whole, rest = divmod(heads, wave)
        dealt = torch.cat([work.repeat_interleave(wave).repeat(whole), work.repeat_interleave(rest)])
        dealt = torch.nn.functional.pad(dealt, (0, rounds * programs - dealt.numel())).view(rounds, programs)
        return float((dealt[::2].sum(0) + dealt[1::2].flip(1).sum(0)).max())

    return min(sorted(waves, reverse=True), key=slowest)


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
    unfit = None if o is None else refusal("o", o, varlen)
    if unfit:
        raise ValueError(f"{unfit}; kernel='triton' writes it as it is")
    tiling = TILINGS[sizes.block_d]
    rows = ROWS.value * tiling.warpgroups
    row_tiles = q.shape[0] // rows + sizes.batch if varlen else -(-sizes.tq // rows)
    tiles = row_tiles * sizes.hq * (1 if varlen else sizes.batch)
    programs = min(tiles, multiprocessors(q.device))
    wave = 1 if varlen else _wave(sizes, row_tiles, programs, tiling.columns)
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
    from . import hopper_bwd

    if not backward:
        return {"taken": ((1,), torch.int32)} if mask.varlen else {}
    return hopper_bwd.workspace(q, sizes_of(q, k, v, mask), mask.varlen, deterministic)


def bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    from . import hopper_bwd

    hopper_bwd.launch(
        q, k, v, o, lse, do, dlse, mask, sizes_of(q, k, v, mask),
        dq=dq, dk=dk, dv=dv, dsinks=dsinks, scratch=scratch, deterministic=deterministic,
    )  # fmt: skip
