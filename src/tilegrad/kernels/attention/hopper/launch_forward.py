"""The host side of the forward: tile configs, the order of tiles, and the launch of forward.py, without any allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda_launch import Launch, Plan, Zero
from ...gpu import ceil_div, multiprocessors
from ...scratch import Scratch, Shapes, Views
from ...triton_version import takes_more_registers
from ..problem import LEAST_FACTOR, LOG2E, Forward, Sizes, lse_strides, row_strides, sizes_of
from ..triton.arguments import interval_arguments, list_arguments, pairs_of
from ..triton.lists import list_calls
from .forward import _attention_fwd_kernel
from .forward_scheduler import ROWS
from .launch import L2_BYTES, current, launches_of, prepare, right_of
from .pieces import columns_of, width_of
from .tma import tile_descriptor

LONG_ROWS = 5120  # causal calls with fewer rows do not use a tile counter, which was slower at 4,096 rows (D 256)
TOGETHER = 4  # smallest L2 section, in heads, with a tile counter
SINGLE_WG_COST = 1.35  # a tile with one active warpgroup takes as long as with 1.35: no softmax overlaps MMAs


class TileConfig(NamedTuple):
    warpgroups: int  # MMA warpgroups of 64 rows each
    columns: int  # columns of a block of k and v
    k_stages: int
    v_stages: int
    q_stages: int


TILE_CONFIGS = {  # by padded head dimension
    32: TileConfig(2, 128, 2, 2, 2),
    64: TileConfig(3, 128, 3, 3, 2),
    96: TileConfig(2, 128, 2, 2, 2),
    128: TileConfig(2, 128, 2, 2, 2),
    192: TileConfig(2, 64, 2, 2, 2),
    256: TileConfig(2, 64, 2, 2, 1),
}
WINDOW_CONFIG = TileConfig(3, 64, 4, 4, 2)  # for D 96 and 128: narrow blocks waste less work at a window's two edges


def tile_config(sizes: Sizes, programs: int, *, softcap: bool = False) -> TileConfig:
    """The config of the head dimension, or WINDOW_CONFIG for windows at D 96 and 128. A CTA has one warpgroup if there are so
    few rows that each tile of 64 rows can have its own CTA. At D 64, a softcap, or intervals in a window, leave registers for
    only two warpgroups. Intervals with a softcap leave too few registers for WINDOW_CONFIG."""
    width = width_of(sizes.d)
    config = TILE_CONFIGS[width]
    if softcap or (sizes.intervals and sizes.left is not None):
        config = config._replace(warpgroups=2)
    if sizes.varlen:
        return config
    if ceil_div(sizes.tq, ROWS.value) * sizes.hq * sizes.batch <= programs:
        return config._replace(warpgroups=1)
    narrow = width in (96, 128) and sizes.left is not None and not (sizes.intervals and softcap)
    return WINDOW_CONFIG if narrow else config


def q_columns_in_registers(sizes: Sizes, *, softcap: bool) -> int:
    """How many columns of q a warpgroup keeps in registers. In full attention without a softcap: all at D 128, and at D 96 and
    192 if ptxas leaves enough registers. At D 256: a quarter without a window or packed sequences. Otherwise 0."""
    width = width_of(sizes.d)
    full = sizes.left is None and sizes.right is None and not sizes.varlen and not sizes.intervals
    if width == 256:
        return 64 if sizes.left is None and not sizes.varlen else 0
    widths = (128,) if takes_more_registers() else (96, 128, 192)
    return width if full and width in widths and not softcap else 0


def edges_in_the_loop(sizes: Sizes) -> bool:
    """Whether a warpgroup may need a mask for blocks after its first block, which has its last columns. The causal diagonal of
    64 rows spans 64 columns, which are in one block if the first of these columns is a multiple of 64."""
    if sizes.intervals:  # the masked blocks have a loop of their own
        return False
    aligned = sizes.right is None or (not sizes.varlen and (sizes.tk + sizes.right) % ROWS.value == 0)
    return sizes.left is not None or not aligned


def counts_tiles(sizes: Sizes) -> bool:
    """Whether CTAs take work tiles from a counter in memory instead of in rounds. They do for packed sequences and intervals,
    because the host doesn't know how many blocks a tile has. They also do for long causal calls, whose tiles differ most: a
    counter is 1 to 2 % faster at D 128 and 256, but slower at D 64."""
    causal = sizes.right is not None and sizes.left is None
    return sizes.varlen or sizes.intervals or (causal and width_of(sizes.d) >= 128 and sizes.tq >= LONG_ROWS)


def workspace(sizes: Sizes) -> Shapes:
    """The tile counter, if this call or a shorter call needs it: a window that covers all columns of a call is no window."""
    return {"tile_counter": ((1,), torch.int32)} if counts_tiles(sizes._replace(left=None)) else {}


def heads_per_section(sizes: Sizes, row_tiles: int, programs: int, config: TileConfig) -> int:
    """The number of heads whose tiles are scheduled together, longest tiles first: as many as fit into L2 with their k and v
    for a window or few tiles, at least TOGETHER with a tile counter, and otherwise the balanced number."""
    heads = sizes.batch * sizes.hq
    window = sizes.tk if sizes.left is None else min(sizes.tk, sizes.left + ROWS.value * config.warpgroups)
    most = min(heads, max(1, L2_BYTES // max(1, 4 * window * sizes.d * sizes.hkv // sizes.hq)))
    if sizes.left is not None or row_tiles * heads <= programs:
        return most
    if counts_tiles(sizes):
        return min(heads, max(most, TOGETHER))
    return _balanced_section(sizes.tq, sizes.tk, sizes.right, row_tiles, heads, most, programs, config)


def _balanced_section(
    tq: int, tk: int, right: int | None, row_tiles: int, heads: int, most: int, programs: int, config: TileConfig
) -> int:
    """The number of heads per section with which the last CTA finishes earliest, in the order of forward_scheduler.py:
    1 … `most`, or all heads if a causal call has so many row tiles that k and v need not stay in L2."""
    steps = tile_steps(tq, tk, right, row_tiles, config)
    rounds = ceil_div(row_tiles * heads, programs)
    sections = {max(1, most * part // 16) for part in range(17)}
    if right is not None and row_tiles >= 40:
        sections.add(heads)

    def slowest(section: int) -> float:
        full, rest = divmod(heads, section)
        order = torch.cat([steps.repeat_interleave(section).repeat(full), steps.repeat_interleave(rest)])
        order = torch.nn.functional.pad(order, (0, rounds * programs - order.numel())).view(rounds, programs)
        return round(float((order[::2].sum(0) + order[1::2].flip(1).sum(0)).max()), 3)

    return min(sorted(sections), key=slowest)


def tile_steps(tq: int, tk: int, right: int | None, row_tiles: int, config: TileConfig) -> Tensor:
    """The time of each row tile of a head, last rows first. The unit is the time of a block of columns with all warpgroups
    active. Prologue and epilogue take 1; each block takes the share of the warpgroups that are active."""
    end = tq - ROWS.value * config.warpgroups * torch.arange(row_tiles, device="cpu")
    attended = torch.full_like(end, tk) if right is None else (end + (tk - tq + right)).clamp(1, tk)
    active = (end / ROWS.value).ceil().clamp(SINGLE_WG_COST, config.warpgroups) if config.warpgroups > 1 else 1
    return 1 + (attended / config.columns).ceil() * active / config.warpgroups


def prepare_fwd(call: Forward, views: Views) -> Callable[[Forward], None]:
    with current(call.q.device):
        before, launch = _prepare(call, views(*call.memory) if call.memory else {})
        return Plan((*before, launch), call, call.memory, launch.device)


def _prepare(call: Forward, scratch: Scratch) -> tuple[list[Launch | Zero], Launch]:
    """The launches before the main kernel, and the launch of that kernel."""
    q, k, v, mask, o, lse, *_ = call
    sizes = sizes_of(q, k, v, mask)
    varlen, softcap = mask.varlen, mask.softcap != 0.0
    config = tile_config(sizes, multiprocessors(q.device), softcap=softcap)
    width, rows = width_of(sizes.d), ROWS.value * config.warpgroups
    tile_counter = scratch["tile_counter"] if counts_tiles(sizes) else None
    row_tiles = q.shape[0] // rows + sizes.batch if varlen else ceil_div(sizes.tq, rows)
    tiles = row_tiles * sizes.hq * (1 if varlen else sizes.batch)
    programs = min(tiles, multiprocessors(q.device))
    section = 1 if varlen else heads_per_section(sizes, row_tiles, programs, config)
    scale, sinks, right = float(mask.scale_for(sizes.d)), mask.sinks, right_of(sizes, softcap=softcap)
    tile = config.warpgroups, config.columns, width, config.k_stages, config.v_stages, config.q_stages
    q_in_regs = q_columns_in_registers(sizes, softcap=softcap)
    constants = *tile, q_in_regs, scale < 0.0, edges_in_the_loop(sizes), pairs_of(mask)
    intervals, lists = interval_arguments(mask), list_arguments(mask, scratch.get("runs"), row_tiles)
    edges = list_arguments(mask, scratch.get("edges"), ceil_div(sizes.tk, config.columns))
    steps = [intervals["intervals_b"], intervals["intervals_h"], edges["runs_b"], edges["runs_h"]]
    steps += [lists["runs_b"], lists["runs_h"]]
    absent = [x is None for x in (tile_counter, o, lse, sizes.left, right)]
    far = [step is not None and step >= 2**31 for step in steps]
    key = (q.dtype, varlen, sinks is not None and sinks.dtype, *absent, sizes.d == width, softcap, constants, *far)
    halves = 2 if config.q_stages == 1 else 1  # parts of D in which o is stored
    boxes = ((q, ROWS.value, 1), (k, config.columns, 1), (v, config.columns, 1), (o, ROWS.value, halves))
    descriptors = [
        None if x is None or not columns else tile_descriptor(x, rows, columns // parts, varlen=varlen)
        for columns in columns_of(width)
        for x, rows, parts in boxes
    ]
    arguments = (
        *descriptors, mask.cu_seqlens_q, mask.cu_seqlens_k, sinks, intervals["intervals"], edges["runs"],
        lists["runs"], o, lse, tile_counter,
        *row_strides(o, varlen=varlen), *lse_strides(lse, varlen=varlen), 0 if sinks is None else sinks.stride(0),
        *steps,
        sizes.batch, sizes.hq, sizes.group, row_tiles, section,
        sizes.tq, sizes.tk, sizes.left, right, None if sizes.d == width else sizes.d // 8,
        max(abs(scale) * LOG2E, LEAST_FACTOR), mask.softcap * LOG2E if mask.softcap else None, *constants,
    )  # fmt: skip
    launch = prepare(_attention_fwd_kernel, key, programs, arguments, num_warps=4)
    first_row = sizes.tq - row_tiles * rows
    listed = list_calls(scratch, sizes, mask, rows, config.columns, columns=False, first_row=first_row)
    zero = [] if tile_counter is None else [Zero(tile_counter)]
    return [*zero, *launches_of(listed, launch.device)], launch
