"""The MMAs of Hopper's backward for head dimensions beyond 128: two consumer warpgroups with different tasks.

dk and dv of 64 columns fill half of the registers of two warpgroups, so a tile is 64 × 64. If both warpgroups shared every MMA,
each would read one whole operand, and shared memory bandwidth would be the limit. Instead one accumulates dv and the other dk
(GEMMs numbered as in backward_mma.py):

    softmax_dv_warpgroup    (1) sᵀ = k qᵀ      pᵀ = exp2(…)               (3) dv += pᵀ do      (5) dq slices 0, 2 = ds k
    ds_dk_warpgroup         (2) dpᵀ = v doᵀ    dsᵀ = pᵀ ∘ (dpᵀ + delta)   (4) dk += dsᵀ q      (5) dq slices 1, 3 = ds k

A slice of dq is 64 columns; D 192 has three. The first warpgroup passes pᵀ to the second in float32, already multiplied by the
softcap's 1 − t². dsᵀ is stored in shared memory, because both compute slices of dq. The left operands of (3) and (4) stay in
registers. While one warpgroup computes exponentials or ds, the other warpgroup's MMAs run.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_mma import probabilities, read_row_info, row_values, splitk_reduce
from .backward_scheduler import DK, DV, LAST, row_of, wait_for_tile
from .backward_store_dq import send_dkdv, send_dq
from .pieces import add_dot, dot_rows, only_tile, stage_tile, wait_pieces, zeros
from .pipeline import (
    DO_EMPTY,
    DS_READY,
    INPUT_THREADS,
    MMA_THREADS,
    P_READY,
    Q_EMPTY,
    consumer_release,
    consumer_wait,
    named_arrive,
    named_release,
    named_wait,
    only_stage,
)

SLICE = gl.constexpr(64)  # columns of a slice of dq
DS_DK_REGISTERS = gl.constexpr(256)  # per thread; softmax_dv_warpgroup has the remaining 224
ST_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # layout of sᵀ, dpᵀ and a slice of dq
# float32 (64, 64) in the order of the accumulator: four elements of each thread are contiguous
THREADS_L = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)

# Buffers between the two warpgroups, with barriers P_READY and DS_READY. pᵀ of the next row tile is stored after DS_READY of
# this one, which implies that pᵀ has been read; dsᵀ is stored after P_READY, which implies that the previous dq is done.
Exchange = namedtuple("Exchange", "p ds")


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
    """Sends dk or dv of a work tile to the dQ store warp, in two parts of D; `count` as in dq_stage."""
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
def _dq_slice(ds, k, part: gl.constexpr):
    """Issues (5) for one slice: dq = ds k."""
    IN_FIRST: gl.constexpr = k[0].shape[1] // SLICE  # slices in the first piece of D
    BLOCK_M: gl.constexpr = ds.shape[1]
    zero = gl.zeros((BLOCK_M, SLICE), gl.float32, layout=ST_L)
    k_slice = k[part // IN_FIRST].slice(part % IN_FIRST * SLICE, SLICE, 1)
    return warpgroup_mma(ds.permute((1, 0)), k_slice, zero, use_acc=False, is_async=True)


@gluon.jit
def softmax_dv_warpgroup(sums, params, inputs, exchange, dq_pipeline, tile_info, factors, D: gl.constexpr):
    """The consumer warpgroup that computes s, p, dv and the even slices of dq."""
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
            k = only_tile(inputs.k, state)
            consumer_wait(inputs.q, state)
            q = stage_tile(inputs.q, state)
            s_token = dot_rows(k, q, zero)  # (1)
            row_info = read_row_info(inputs, state)
            neg_lse2 = row_values(inputs.neg_lse2, state, ST_L)
            x = warpgroup_mma_wait(0, deps=(s_token,))
            named_release(inputs.q, state, Q_EMPTY, INPUT_THREADS)
            row = row_of(row_info, params, BLOCK_M)
            p, t = probabilities(x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N, 0)
            p_slope = p
            if factors.softcap_log2 is not None:
                p_slope = p * (1.0 - t * t)
            exchange.p.index(0).store(p_slope)
            named_arrive(P_READY, MMA_THREADS)

            consumer_wait(inputs.do, state)
            do = stage_tile(inputs.do, state)
            dv_token = add_dot(p.to(dtype), do, dv)  # (3)
            named_wait(DS_READY, MMA_THREADS)
            ds = exchange.ds.index(only_stage(state))
            dq_token = _dq_slice(ds, k, 0)
            dv = wait_pieces(1, dv_token)
            named_release(inputs.do, state, DO_EMPTY, INPUT_THREADS)
            count = state * 2 + iteration * 2
            dq = warpgroup_mma_wait(0, deps=(dq_token,))
            dq_token = _dq_slice(ds, k, 2)
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
    """The consumer warpgroup that computes dp, ds, dk and the odd slices of dq: two, or one at D 192."""
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
            k = only_tile(inputs.k, state)
            v = only_tile(inputs.v, state)
            consumer_wait(inputs.do, state)
            do = stage_tile(inputs.do, state)
            dp_token = dot_rows(v, do, zero)  # (2)
            delta = row_values(inputs.delta, state, ST_L)
            named_wait(P_READY, MMA_THREADS)
            p_slope = exchange.p.index(0).load(ST_L)
            dp = warpgroup_mma_wait(0, deps=(dp_token,))
            named_release(inputs.do, state, DO_EMPTY, INPUT_THREADS)
            ds16 = (p_slope * (dp + delta[None, :])).to(dtype)
            exchange.ds.index(0).store(ds16)
            fence_async_shared()
            named_arrive(DS_READY, MMA_THREADS)
            ds = exchange.ds.index(only_stage(state))

            consumer_wait(inputs.q, state)
            q = stage_tile(inputs.q, state)
            row_info = read_row_info(inputs, state)
            dk_token = add_dot(ds16, q, dk)  # (4)
            dq1_token = _dq_slice(ds, k, 1)
            count = state * SLICES + iteration * 2
            if SLICES == 2:
                dq3_token = _dq_slice(ds, k, 3)
                dk = wait_pieces(2, dk_token)
                named_release(inputs.q, state, Q_EMPTY, INPUT_THREADS)
                send_dq(1, warpgroup_mma_wait(1, deps=(dq1_token,)), count, dq_pipeline)
                send_dq(1, warpgroup_mma_wait(0, deps=(dq3_token,)), count + 1, dq_pipeline)
            else:
                dk = wait_pieces(1, dk_token)
                named_release(inputs.q, state, Q_EMPTY, INPUT_THREADS)
                send_dq(1, warpgroup_mma_wait(0, deps=(dq1_token,)), count, dq_pipeline)
            state += 1
            more = row_info & LAST == 0
        consumer_release(inputs.k, iteration)
        consumer_release(inputs.v, iteration)
        dk = [x * factors.scale for x in dk]
        _end_tile(dk, DK, state * SLICES + iteration * 2, iteration, params, dq_pipeline, tile_info, sums, dtype, D)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)
