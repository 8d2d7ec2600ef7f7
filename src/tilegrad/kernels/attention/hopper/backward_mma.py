"""The MMAs of Hopper's backward for head dimensions up to 128, by two consumer warpgroups; backward.py has the equations.

Scores are held transposed, sᵀ (columns, rows): pᵀ and dsᵀ then are the left operands of dv += pᵀ do and dk += dsᵀ q as the
tensor cores left them in registers. Only ds, for dq = ds k, goes through shared memory, and there alone a tile of rows makes
the two warpgroups meet: else one's exponentials run beside the other's MMAs. Head dimensions beyond 128 are in
backward_wide.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..triton import numerics
from .backward_barriers import DO, DS, INPUT_THREADS, MMA_THREADS, Q
from .backward_scheduler import (
    DK,
    DV,
    FLAG_BITS,
    INFO_STAGES,
    INFO_WORDS,
    LAST,
    MASKED,
    TILE_FIELDS,
    read_tile,
    stored_word,
    wait_for_tile,
)
from .backward_store_dq import send_dkdv, send_dq
from .band import keep_between
from .gluon_names import barrier
from .pieces import add_dot, cut, dot_rows, load_held, tile_of, wait_pieces, zeros
from .pipeline import (
    consumer_release,
    consumer_wait,
    named_release,
    named_wait,
    only_stage,
    read_word,
    stage_of,
    write_word,
)

tanh = gluon.jit(numerics.tanh.fn)

HALF = gl.constexpr(64)  # columns of a warpgroup
NOWHERE = gl.constexpr(2**30)  # a column that no row attends to


class Factors(NamedTuple):
    """What scores are multiplied by; softcap_log2 is None without a softcap. With `divided`, neg_lse2 has been divided by
    scale_log2."""

    scale: Any
    scale_log2: Any
    softcap_log2: Any
    scale_over_softcap: Any
    divided: Any


class SplitSums(NamedTuple):
    """Split-K: float32 dk and dv of split work tiles, and how many CTAs have added to each."""

    dkdv: Any
    arrivals: Any


@gluon.jit
def _mask_out(x, row, first, iteration, params, tile_info, BLOCK_N: gl.constexpr):
    """x (columns, rows), −inf where a row, the first is `row`, does not attend to a column of the iteration's work tile, of
    which the first is `first`."""
    tile = read_tile(tile_info, iteration, params)
    j = tile.n * BLOCK_N + first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    j = gl.where(j < tile.tk, j, NOWHERE)
    back = j - (row + tile.tk - tile.tq)  # the first row whose diagonal is not before j
    if params.left is not None:
        after = back + params.left
        if params.right is not None:
            return keep_between(x, back - params.right, after)
        else:
            return keep_between(gl.where((j < NOWHERE)[:, None], x, float("-inf")), None, after)
    elif params.right is not None:
        return keep_between(x, back - params.right, None)
    else:
        return gl.where((j < NOWHERE)[:, None], x, float("-inf"))


@gluon.jit
def probabilities(
    x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N: gl.constexpr, FIRST: gl.constexpr
):
    """(p, t) of the scores x, whose first column is FIRST of a work tile's BLOCK_N; t is the softcap's tanh."""
    t = x
    if factors.softcap_log2 is None:
        if factors.divided:
            neg_lse2 = neg_lse2 * factors.scale_log2
        x = x * factors.scale_log2 + neg_lse2[None, :]
    else:
        t = tanh(x * factors.scale_over_softcap, IEEE_FP32=False)
        x = t * factors.softcap_log2 + neg_lse2[None, :]
    if row_info & MASKED != 0:
        iteration += row_info >> 30  # 0, but unknown to the compiler: else it holds the tile's info in registers
        x = _mask_out(x, row, FIRST, iteration, params, tile_info, BLOCK_N)
    return gl.exp2(x), t


@gluon.jit
def _score_gradient(p, dp, t, delta, factors):
    """dsᵀ = pᵀ ∘ (dpᵀ + delta), and through the softcap."""
    ds = p * (dp + delta[None, :])
    if factors.softcap_log2 is not None:
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def _sums_of(
    x, COLUMN: gl.constexpr, which: gl.constexpr, HALF: gl.constexpr, index, sums, BLOCK_N: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Where the sums of a piece of dk or dv are, from COLUMN on."""
    ROWS: gl.constexpr = x.shape[0]
    j = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    c = COLUMN + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    return sums.dkdv + (2 * index + which) * (BLOCK_N * D) + j * D + c


@gluon.jit
def splitk_reduce(
    x, which: gl.constexpr, HALF: gl.constexpr, iteration, params, tile_info, sums, BLOCK_N: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """dk or dv of a split work tile, or a half of its columns, added to those of the CTAs before; the last to add stores the
    sum."""
    index = read_word(tile_info.stages, stage_of(iteration, INFO_STAGES) * INFO_WORDS + TILE_FIELDS - 1)
    at = [_sums_of(x[0], 0, which, HALF, index, sums, BLOCK_N, D)]
    if len(x) == 2:
        at = [at[0], _sums_of(x[1], x[0].shape[1], which, HALF, index, sums, BLOCK_N, D)]
    for i in gl.static_range(len(x)):
        gl.atomic_add(at[i], x[i], sem="relaxed")
    barrier()
    last = gl.atomic_add(sums.arrivals + 4 * index + 2 * which + HALF, 1, sem="acq_rel") == params.splits - 1
    barrier()
    if last:
        x = [gl.load(each, cache_modifier=".cg") for each in at]
    write_word(tile_info.stages, stored_word(iteration, which, HALF), gl.where(last, 1, 0))
    return x


@gluon.jit
def _own_columns(W: gl.constexpr, tile):
    """Of a tile of k or v, the columns of warpgroup W."""
    return [x.slice(W * HALF, HALF, 0) for x in tile]


@gluon.jit
def _add_rows(
    W: gl.constexpr, dk, dv, state, iteration, row_info, q, k, v, do, v_held, ds_s, params, inputs, dq_pipeline, tile_info,
    factors,
):  # fmt: skip
    """dk, dv of warpgroup W after one more tile of rows; it sends a part of dq, of 64 rows: one of the pieces of D, half of D
    where that is one piece, or D where the tile has as many rows as columns."""
    PIECES: gl.constexpr = len(k)
    BLOCK_N: gl.constexpr = k[0].shape[0]
    BLOCK_M: gl.constexpr = q[0].shape[0]
    dtype: gl.constexpr = k[0].dtype
    STAGES: gl.constexpr = inputs.row_info.shape[0]
    DQ_COLUMNS: gl.constexpr = k[W].shape[1] if PIECES == 2 else k[0].shape[1] * BLOCK_M // 128
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    zero = gl.zeros((HALF, BLOCK_M), gl.float32, layout=ST_L)
    s_token = dot_rows(_own_columns(W, k), q, zero)
    consumer_wait(inputs.do, state)
    dp_token = dot_rows(_own_columns(W, v), do, zero, v_held)
    DP_MMAS: gl.constexpr = PIECES if v_held is None else len(cut(do, v_held.shape[1]))
    neg_lse2 = inputs.neg_lse2.index(stage_of(state, STAGES)).load(ROW_L)
    x = warpgroup_mma_wait(DP_MMAS, deps=(s_token,))
    row = (row_info >> FLAG_BITS) * BLOCK_M
    p, t = probabilities(x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N, W * HALF)
    p16 = p.to(dtype)
    delta = inputs.delta.index(stage_of(state, STAGES)).load(ROW_L)
    ds16 = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, factors).to(dtype)
    ds_s.slice(W * HALF, HALF, 0).store(ds16)
    dv_token = add_dot(p16, do, dv)

    fence_async_shared()
    named_wait(DS, MMA_THREADS)
    zero_dq = gl.zeros((64, DQ_COLUMNS), gl.float32, layout=DQ_L)
    if BLOCK_M == 64:
        k_part = k[W] if PIECES == 2 else k[0].slice(W * DQ_COLUMNS, DQ_COLUMNS, 1)
        dq_token = warpgroup_mma(ds_s.permute((1, 0)), k_part, zero_dq, use_acc=False, is_async=True)
    else:
        ds_part = ds_s.slice(W * 64, 64, 1)
        dq_token = warpgroup_mma(ds_part.permute((1, 0)), k[0], zero_dq, use_acc=False, is_async=True)
    dk_token = add_dot(ds16, q, dk)
    dv = wait_pieces(1 + PIECES, dv_token)
    named_release(inputs.do, state, DO, INPUT_THREADS)
    dq = warpgroup_mma_wait(PIECES, deps=(dq_token,))
    send_dq(W, dq, state + iteration * 2, dq_pipeline)
    dk = wait_pieces(0, dk_token)
    named_release(inputs.q, state, Q, INPUT_THREADS)
    return dk, dv


@gluon.jit
def mma_warpgroup(
    W: gl.constexpr, sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D: gl.constexpr,
    V_HELD: gl.constexpr,
):  # fmt: skip
    """MMA warpgroup W of two: columns 64 W … of sᵀ, dpᵀ, dk and dv, and a half of dq.

    dsᵀ has two stages, so its store waits for nobody: who stores dsᵀ of a tile of rows has met the other at DS of the tile
    before, and there the other's dq of the tile before that was done."""
    BLOCK_N: gl.constexpr = ds_stages.shape[1]
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ds_stages.shape[2], 16])
    dtype: gl.constexpr = ds_stages.dtype
    state = 0
    iteration = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        dk = zeros(HALF, inputs.k.stages)
        dv = zeros(HALF, inputs.v.stages)
        consumer_wait(inputs.k, iteration)
        consumer_wait(inputs.v, iteration)
        v_held = None
        if V_HELD > 0:
            v_held = load_held(_own_columns(W, tile_of(inputs.v.stages, only_stage(state))), V_HELD, ST_L)
        more = tile.begin < tile.end
        while more:
            k = tile_of(inputs.k.stages, only_stage(state))
            v = tile_of(inputs.v.stages, only_stage(state))
            consumer_wait(inputs.q, state)
            q = tile_of(inputs.q.stages, stage_of(state, inputs.q.full.shape[0]))
            row_info = read_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]))
            do = tile_of(inputs.do.stages, stage_of(state, inputs.do.full.shape[0]))
            ds_s = ds_stages.index(stage_of(state, ds_stages.shape[0]))
            dk, dv = _add_rows(
                W, dk, dv, state, iteration, row_info, q, k, v, do, v_held, ds_s, params, inputs, dq_pipeline, tile_info,
                factors,
            )  # fmt: skip
            state += 1
            more = row_info & LAST == 0
        consumer_release(inputs.k, iteration)
        consumer_release(inputs.v, iteration)
        dk = [x * factors.scale for x in dk]
        if params.splits is not None:
            dv = splitk_reduce(dv, DV, W, iteration, params, tile_info, sums, BLOCK_N, D)
            dk = splitk_reduce(dk, DK, W, iteration, params, tile_info, sums, BLOCK_N, D)
        send_dkdv(W, dv, state + iteration * 2, dq_pipeline, dtype, D)
        send_dkdv(W, dk, state + iteration * 2 + 1, dq_pipeline, dtype, D)
        consumer_release(tile_info, iteration)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)
