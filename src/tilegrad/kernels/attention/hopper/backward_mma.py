"""The MMAs of Hopper's backward for head dimensions up to 128, by two consumer warpgroups; backward.py has the equations.

Scores are held transposed, sᵀ (columns, rows): pᵀ and dsᵀ then are the left operands of dv += pᵀ do and dk += dsᵀ q as the
tensor cores left them in registers. Only ds, for dq = ds k, goes through shared memory. Head dimensions beyond 128 are in
backward_wide.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

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
    wait_for_tile,
)
from .backward_store_dq import dq_layout, out_stage
from .pipeline import consumer_release, consumer_wait, producer_acquire, producer_commit, read_word, write_word

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
def _tanh(x):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel."""
    y = x * x
    near = 0.020696379244327545 - 0.005768859293311834 * y
    near = -0.333332896232605 + y * (0.13331660628318787 + y * (-0.05375746265053749 + y * near))
    far = 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(gl.maximum(x, -20.0), 20.0) * 2.8853900817779268))
    return gl.where(gl.abs(x) < 0.625, x + x * y * near, far)


@gluon.jit
def _mask_out(x, row, iteration, params, tile_info):
    """x (columns, rows), −inf where a row, the first is `row`, does not attend to a column of the iteration's work tile."""
    tile = read_tile(tile_info, iteration, params)
    j = tile.n * x.shape[0] + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    j = gl.where(j < tile.tk, j, NOWHERE)[:, None]
    at = row + tile.tk - tile.tq + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    attends = j < NOWHERE
    if params.right is not None:
        attends = j <= at + params.right
    if params.left is not None:
        attends = attends & (j >= at - params.left)
    return gl.where(attends, x, float("-inf"))


@gluon.jit
def probabilities(x, neg_lse2, row_info, row, iteration, params, tile_info, factors):
    """(p, t) of the scores x; t is the softcap's tanh."""
    t = x
    if factors.softcap_log2 is None:
        if factors.divided:
            neg_lse2 = neg_lse2 * factors.scale_log2
        x = x * factors.scale_log2 + neg_lse2[None, :]
    else:
        t = _tanh(x * factors.scale_over_softcap)
        x = t * factors.softcap_log2 + neg_lse2[None, :]
    if row_info & MASKED != 0:
        x = _mask_out(x, row, iteration, params, tile_info)
    return gl.exp2(x), t


@gluon.jit
def _score_gradient(p, dp, t, delta, factors):
    """dsᵀ = pᵀ ∘ (dpᵀ + delta), and through the softcap."""
    ds = p * (dp + delta[None, :])
    if factors.softcap_log2 is not None:
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def send_dq(dq, dq_pipeline, dq_state):
    """dq of a tile of rows, or a slice of it, to the dQ store warp."""
    M: gl.constexpr = dq.shape[0]
    N: gl.constexpr = dq.shape[1]
    producer_acquire(dq_pipeline, dq_state)._reinterpret(gl.float32, [M, N], dq_layout(M, N)).store(dq)
    fence_async_shared()
    producer_commit(dq_pipeline, dq_state)


@gluon.jit
def _add_rows(
    dk, dv, state, dq_state, iteration, params, inputs, k, v, ds_s, dq_pipeline, tile_info, factors,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """dk, dv of one more tile of rows; its dq goes to the dQ store warp. `state`: of the pipelines q and do."""
    dtype: gl.constexpr = k.dtype
    BLOCK_N: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[1]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    STAGES: gl.constexpr = inputs.row_info.shape[0]
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = consumer_wait(inputs.q, state).reshape([BLOCK_M, D])
    row_info = read_word(inputs.row_info, state % STAGES)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = consumer_wait(inputs.do, state).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    neg_lse2 = inputs.neg_lse2.index(state % STAGES).load(ROW_L)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    p, t = probabilities(
        x, neg_lse2, row_info, (row_info >> FLAG_BITS) * BLOCK_M, iteration, params, tile_info, factors
    )
    p16 = p.to(dtype)
    delta = inputs.delta.index(state % STAGES).load(ROW_L)
    ds16 = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, factors).to(dtype)
    ds_s.store(ds16)

    dv_token = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    dq = warpgroup_mma_wait(1, deps=(dq_token,))
    send_dq(dq, dq_pipeline, dq_state)
    consumer_release(inputs.do, state)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    consumer_release(inputs.q, state)
    return dk, dv, row_info


@gluon.jit
def _add_rows_in_halves(
    dk, dv, state, dq_state, iteration, params, inputs, k, v, ds_s, dq_pipeline, tile_info, factors,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """The same with the exponentials of one half of the rows while the MMAs of the other run."""
    dtype: gl.constexpr = k.dtype
    BLOCK_N: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[1]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    STAGES: gl.constexpr = inputs.row_info.shape[0]
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    neg_lse2_s = inputs.neg_lse2.index(state % STAGES)
    delta_s = inputs.delta.index(state % STAGES)
    zero = gl.zeros((BLOCK_N, HALF), gl.float32, layout=ST_L)

    q = consumer_wait(inputs.q, state).reshape([BLOCK_M, D])
    row_info = read_word(inputs.row_info, state % STAGES)
    q0 = q.slice(0, HALF, 0)
    q1 = q.slice(HALF, HALF, 0)
    s0 = warpgroup_mma(k, q0.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = consumer_wait(inputs.do, state).reshape([BLOCK_M, D])
    do0 = do.slice(0, HALF, 0)
    do1 = do.slice(HALF, HALF, 0)
    dp0 = warpgroup_mma(v, do0.permute((1, 0)), zero, use_acc=False, is_async=True)
    s1 = warpgroup_mma(k, q1.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp1 = warpgroup_mma(v, do1.permute((1, 0)), zero, use_acc=False, is_async=True)

    row = (row_info >> FLAG_BITS) * BLOCK_M
    neg_lse2 = neg_lse2_s.slice(0, HALF, 0).load(ROW_L)
    p, t = probabilities(
        warpgroup_mma_wait(3, deps=(s0,)), neg_lse2, row_info, row, iteration, params, tile_info, factors
    )
    p16 = p.to(dtype)
    delta = delta_s.slice(0, HALF, 0).load(ROW_L)
    ds0 = _score_gradient(p, warpgroup_mma_wait(2, deps=(dp0,)), t, delta, factors).to(dtype)
    ds_s.slice(0, HALF, 1).store(ds0)
    dv = warpgroup_mma(gl.convert_layout(p16, A_L), do0, dv, is_async=True)

    row = (row_info >> FLAG_BITS) * BLOCK_M + HALF
    neg_lse2 = neg_lse2_s.slice(HALF, HALF, 0).load(ROW_L)
    p, t = probabilities(
        warpgroup_mma_wait(2, deps=(s1,)), neg_lse2, row_info, row, iteration, params, tile_info, factors
    )
    p16 = p.to(dtype)
    delta = delta_s.slice(HALF, HALF, 0).load(ROW_L)
    ds1 = _score_gradient(p, warpgroup_mma_wait(1, deps=(dp1,)), t, delta, factors).to(dtype)
    ds_s.slice(HALF, HALF, 1).store(ds1)
    dv = warpgroup_mma(gl.convert_layout(p16, A_L), do1, dv, is_async=True)

    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds0, A_L), q0, dk, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds1, A_L), q1, dk, is_async=True)
    dv = warpgroup_mma_wait(3, deps=(dv,))
    dq = warpgroup_mma_wait(2, deps=(dq_token,))
    send_dq(dq, dq_pipeline, dq_state)
    consumer_release(inputs.do, state)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    consumer_release(inputs.q, state)
    return dk, dv, row_info


@gluon.jit
def send_dkdv(acc, like, params, dq_pipeline, dq_state, OUT_STAGES: gl.constexpr):
    """dk or dv to the dQ store warp."""
    dtype: gl.constexpr = like.dtype
    for part in gl.static_range(OUT_STAGES):
        producer_acquire(dq_pipeline, dq_state + part)
    out_s = out_stage(dq_pipeline, dq_state, params, dtype, acc.shape[0], acc.shape[1], OUT_STAGES)
    out_s.reshape([acc.shape[0], acc.shape[1]]).store(acc.to(dtype))
    fence_async_shared()
    for part in gl.static_range(OUT_STAGES):
        producer_commit(dq_pipeline, dq_state + part)


@gluon.jit
def splitk_reduce(x, which: gl.constexpr, iteration, params, tile_info, sums):
    """dk or dv of a split work tile, added to those of the CTAs before; the last to add stores the sum."""
    BLOCK_N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    index = read_word(tile_info.stages, iteration % INFO_STAGES * INFO_WORDS + TILE_FIELDS - 1)
    j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    c = gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    at = sums.dkdv + (2 * index + which) * (BLOCK_N * D) + j * D + c
    gl.atomic_add(at, x, sem="relaxed")
    gl.thread_barrier()
    last = gl.atomic_add(sums.arrivals + 2 * index + which, 1, sem="acq_rel") == params.splits - 1
    gl.thread_barrier()
    if last:
        x = gl.load(at, cache_modifier=".cg")
    write_word(tile_info.stages, iteration % INFO_STAGES * INFO_WORDS + TILE_FIELDS + which, gl.where(last, 1, 0))
    return x


@gluon.jit
def mma_warpgroups(sums, params, inputs, ds_s, dq_pipeline, tile_info, factors, HALVES: gl.constexpr):
    """The consumer: two MMA warpgroups, which share the columns of sᵀ, dpᵀ, dk, dv."""
    BLOCK_N: gl.constexpr = ds_s.shape[0]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    D: gl.constexpr = inputs.k.stages.shape[-1]
    DQ_WARPS: gl.constexpr = [8, 1] if BLOCK_M == 128 else [4, 2]
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M // 2 if HALVES else BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], DQ_WARPS, [16, D // DQ_WARPS[1], 16])
    ADD: gl.constexpr = _add_rows_in_halves if HALVES else _add_rows
    k = inputs.k.stages.index(0).reshape([BLOCK_N, D])
    v = inputs.v.stages.index(0).reshape([BLOCK_N, D])
    state = 0
    iteration = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        consumer_wait(inputs.k, iteration)
        consumer_wait(inputs.v, iteration)
        more = tile.begin < tile.end
        while more:
            dk, dv, row_info = ADD(
                dk, dv, state, state + iteration * 2, iteration, params, inputs, k, v, ds_s, dq_pipeline, tile_info,
                factors, ST_L, KV_L, DQ_L,
            )  # fmt: skip
            state += 1
            more = row_info & LAST == 0
        consumer_release(inputs.k, iteration)
        consumer_release(inputs.v, iteration)
        dk = dk * factors.scale
        if params.splits is not None:
            dv = splitk_reduce(dv, DV, iteration, params, tile_info, sums)
            dk = splitk_reduce(dk, DK, iteration, params, tile_info, sums)
        send_dkdv(dv, k, params, dq_pipeline, state + iteration * 2, 1)
        send_dkdv(dk, k, params, dq_pipeline, state + iteration * 2 + 1, 1)
        consumer_release(tile_info, iteration)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)
