"""The MMAs of Hopper's backward for head dimensions beyond 128: two consumer warpgroups with a task each.

dk and dv of 64 columns fill half the registers of two warpgroups, so a tile is 64 × 64. If both warpgroups shared every MMA,
each would read one operand of it whole, and the bandwidth of shared memory would be the limit. Here one holds dv, the other dk:

    softmax_dv_warpgroup    sᵀ = k qᵀ      pᵀ = exp2(…)               dv += pᵀ do      dq slices 0, 2 = ds k
    ds_dk_warpgroup         dpᵀ = v doᵀ    dsᵀ = pᵀ ∘ (dpᵀ + delta)   dk += dsᵀ q      dq slices 1, 3 = ds k

A slice of dq is 64 columns, and D 192 has three. pᵀ goes from the first to the second in float32, with the softcap's factor
1 − t² in it; dsᵀ goes to shared memory for dq, which both multiply. Left operands of dv and dk stay in registers. While one
computes exponentials or ds, the other's MMAs run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_barriers import DO, DS, INPUT_THREADS, MMA_THREADS, P, Q
from .backward_mma import probabilities, splitk_reduce
from .backward_scheduler import DK, DV, FLAG_BITS, LAST, wait_for_tile
from .backward_store_dq import send_dkdv, send_dq
from .pieces import add_dot, dot_rows, tile_of, wait_pieces, zeros
from .pipeline import (
    consumer_release,
    consumer_wait,
    named_arrive,
    named_release,
    named_wait,
    only_stage,
    read_word,
    stage_of,
)

SLICE = gl.constexpr(64)  # columns of a slice of dq
DS_DK_REGISTERS = gl.constexpr(256)  # of a thread; softmax_dv_warpgroup has what is left, 224
ST_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of sᵀ, dpᵀ and a slice of dq
# float32 (64, 64) as a warpgroup's accumulator has it: four numbers of each thread side by side
THREADS_L = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)


class Exchange(NamedTuple):
    """Between the two warpgroups, at the named barriers P and DS. pᵀ of the next tile of rows is stored when dsᵀ of this one
    has come, thus after pᵀ was read; dsᵀ when its own pᵀ has come, thus after dq of the tile before."""

    p: Any
    ds: Any


@gluon.jit
def new_exchange(dtype: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    SCORES_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    p = gl.allocate_shared_memory(gl.float32, [1, BLOCK_N, BLOCK_M], THREADS_L)
    ds = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], SCORES_L)
    return Exchange(p, ds)


@gluon.jit
def _end_tile(
    x, which: gl.constexpr, count, iteration, params, dq_pipeline, tile_info, sums, DTYPE: gl.constexpr, D: gl.constexpr
):
    """dk or dv of a work tile to the dQ store warp, in two parts of D; `count` as in dq_stage."""
    W: gl.constexpr = DV - which
    BLOCK_N: gl.constexpr = x[0].shape[0]
    if params.splits is not None:
        x = splitk_reduce(x, which, 0, iteration, params, tile_info, sums, BLOCK_N, D)
    parts = x
    if len(x) == 1:
        parts = x[0].reshape([BLOCK_N, 2, D // 2]).permute((0, 2, 1)).split()
    send_dkdv(W, (parts[0],), count, dq_pipeline, DTYPE, D)
    send_dkdv(W, (parts[1],), count + 1, dq_pipeline, DTYPE, D)
    consumer_release(tile_info, iteration)


@gluon.jit
def _gradient_of_rows(ds, k, part: gl.constexpr):
    """A slice of dq = ds k, issued."""
    IN_FIRST: gl.constexpr = k[0].shape[1] // SLICE  # slices in the first piece of D
    BLOCK_M: gl.constexpr = ds.shape[1]
    zero = gl.zeros((BLOCK_M, SLICE), gl.float32, layout=ST_L)
    k_slice = k[part // IN_FIRST].slice(part % IN_FIRST * SLICE, SLICE, 1)
    return warpgroup_mma(ds.permute((1, 0)), k_slice, zero, use_acc=False, is_async=True)


@gluon.jit
def softmax_dv_warpgroup(sums, params, inputs, exchange, dq_pipeline, tile_info, factors, D: gl.constexpr):
    """The consumer warpgroup with s, p, dv and every other slice of dq."""
    BLOCK_N: gl.constexpr = inputs.k.stages[0].shape[-2]
    BLOCK_M: gl.constexpr = inputs.neg_lse2.shape[1]
    dtype: gl.constexpr = inputs.k.stages[0].dtype
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)
    state = 0
    iteration = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        dv = zeros(BLOCK_N, inputs.v.stages)
        consumer_wait(inputs.k, iteration)
        more = tile.begin < tile.end
        while more:
            k = tile_of(inputs.k.stages, only_stage(state))
            consumer_wait(inputs.q, state)
            q = tile_of(inputs.q.stages, stage_of(state, inputs.q.full.shape[0]))
            s_token = dot_rows(k, q, zero)
            row_info = read_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]))
            neg_lse2 = inputs.neg_lse2.index(stage_of(state, inputs.neg_lse2.shape[0])).load(gl.SliceLayout(0, ST_L))
            x = warpgroup_mma_wait(0, deps=(s_token,))
            named_release(inputs.q, state, Q, INPUT_THREADS)
            row = (row_info >> FLAG_BITS) * BLOCK_M
            p, t = probabilities(x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N, 0)
            weight = p
            if factors.softcap_log2 is not None:
                weight = p * (1.0 - t * t)
            exchange.p.index(0).store(weight)
            named_arrive(P, MMA_THREADS)

            consumer_wait(inputs.do, state)
            do = tile_of(inputs.do.stages, stage_of(state, inputs.do.full.shape[0]))
            dv_token = add_dot(p.to(dtype), do, dv)
            named_wait(DS, MMA_THREADS)
            ds = exchange.ds.index(only_stage(state))
            dq_token = _gradient_of_rows(ds, k, 0)
            dv = wait_pieces(1, dv_token)
            named_release(inputs.do, state, DO, INPUT_THREADS)
            count = state * 2 + iteration * 2
            dq = warpgroup_mma_wait(0, deps=(dq_token,))
            dq_token = _gradient_of_rows(ds, k, 2)
            send_dq(0, dq, count, dq_pipeline)
            dq = warpgroup_mma_wait(0, deps=(dq_token,))
            send_dq(0, dq, count + 1, dq_pipeline)
            state += 1
            more = row_info & LAST == 0
        consumer_release(inputs.k, iteration)
        _end_tile(dv, DV, state * 2 + iteration * 2, iteration, params, dq_pipeline, tile_info, sums, dtype, D)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)


@gluon.jit
def ds_dk_warpgroup(sums, params, inputs, exchange, dq_pipeline, tile_info, factors, D: gl.constexpr):
    """The consumer warpgroup with dp, ds, dk and the other slices of dq: two, or one where D has three."""
    SLICES: gl.constexpr = D // SLICE // 2
    BLOCK_N: gl.constexpr = inputs.k.stages[0].shape[-2]
    BLOCK_M: gl.constexpr = inputs.delta.shape[1]
    dtype: gl.constexpr = inputs.k.stages[0].dtype
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)
    state = 0
    iteration = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        dk = zeros(BLOCK_N, inputs.k.stages)
        consumer_wait(inputs.k, iteration)
        consumer_wait(inputs.v, iteration)
        more = tile.begin < tile.end
        while more:
            k = tile_of(inputs.k.stages, only_stage(state))
            v = tile_of(inputs.v.stages, only_stage(state))
            consumer_wait(inputs.do, state)
            do = tile_of(inputs.do.stages, stage_of(state, inputs.do.full.shape[0]))
            dp_token = dot_rows(v, do, zero)
            delta = inputs.delta.index(stage_of(state, inputs.delta.shape[0])).load(gl.SliceLayout(0, ST_L))
            named_wait(P, MMA_THREADS)
            weight = exchange.p.index(0).load(ST_L)
            dp = warpgroup_mma_wait(0, deps=(dp_token,))
            named_release(inputs.do, state, DO, INPUT_THREADS)
            ds16 = (weight * (dp + delta[None, :])).to(dtype)
            exchange.ds.index(0).store(ds16)
            fence_async_shared()
            named_arrive(DS, MMA_THREADS)
            ds = exchange.ds.index(only_stage(state))

            consumer_wait(inputs.q, state)
            q = tile_of(inputs.q.stages, stage_of(state, inputs.q.full.shape[0]))
            row_info = read_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]))
            dk_token = add_dot(ds16, q, dk)
            dq1_token = _gradient_of_rows(ds, k, 1)
            count = state * SLICES + iteration * 2
            if SLICES == 2:
                dq3_token = _gradient_of_rows(ds, k, 3)
                dk = wait_pieces(2, dk_token)
                named_release(inputs.q, state, Q, INPUT_THREADS)
                send_dq(1, warpgroup_mma_wait(1, deps=(dq1_token,)), count, dq_pipeline)
                send_dq(1, warpgroup_mma_wait(0, deps=(dq3_token,)), count + 1, dq_pipeline)
            else:
                dk = wait_pieces(1, dk_token)
                named_release(inputs.q, state, Q, INPUT_THREADS)
                send_dq(1, warpgroup_mma_wait(0, deps=(dq1_token,)), count, dq_pipeline)
            state += 1
            more = row_info & LAST == 0
        consumer_release(inputs.k, iteration)
        consumer_release(inputs.v, iteration)
        dk = [x * factors.scale for x in dk]
        _end_tile(dk, DK, state * SLICES + iteration * 2, iteration, params, dq_pipeline, tile_info, sums, dtype, D)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)
