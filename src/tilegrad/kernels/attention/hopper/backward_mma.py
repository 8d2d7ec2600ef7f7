"""The products of Hopper's backward, by eight warps: backward.py has the equations, backward_schedule.py who does what.

Scores are held transposed, sᵀ (columns, rows): pᵀ and dsᵀ then are the left operands of dv += pᵀ do and dk += dsᵀ q as the
tensor cores left them in registers. Only ds, for dq = ds k, goes through shared memory. Head dimensions beyond 128 are
backward_wide.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_schedule import (
    CROSSED,
    DK,
    DV,
    FIELDS,
    LAST,
    NOTE_BITS,
    RECORD,
    RECORDS,
    acquire,
    await_full,
    hear,
    out_slot,
    read,
    recall,
    release,
    write,
)

NOWHERE = gl.constexpr(2**30)  # a column that no row sees


class Factors(NamedTuple):
    """What products are multiplied by; cap is None without a softcap. With `divided`, shift is to be multiplied by unit."""

    scale: Any
    unit: Any
    cap: Any
    cap_inner: Any
    divided: Any


class Sums(NamedTuple):
    """Float32 dk and dv of shared tiles, and how many programs have added to each."""

    dkdv: Any
    arrived: Any


@gluon.jit
def _tanh(x):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel."""
    y = x * x
    near = 0.020696379244327545 - 0.005768859293311834 * y
    near = -0.333332896232605 + y * (0.13331660628318787 + y * (-0.05375746265053749 + y * near))
    far = 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(gl.maximum(x, -20.0), 20.0) * 2.8853900817779268))
    return gl.where(gl.abs(x) < 0.625, x + x * y * near, far)


@gluon.jit
def _hide(x, row, turn, call, records):
    """−inf where a row of x (columns, rows), the first of which is `row`, does not see a column of the turn's tile, or
    there is no such column."""
    tile = recall(records, turn, call)
    j = tile.n * x.shape[0] + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    j = gl.where(j < tile.tk, j, NOWHERE)[:, None]
    at = row + tile.tk - tile.tq + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    seen = j < NOWHERE
    if call.right is not None:
        seen = j <= at + call.right
    if call.left is not None:
        seen = seen & (j >= at - call.left)
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def probabilities(x, shift, note, row, turn, call, records, factors):
    """(p, t) out of products x; t = tanh where the call has a softcap."""
    t = x
    if factors.cap is None:
        if factors.divided:
            shift = shift * factors.unit
        x = x * factors.unit + shift[None, :]
    else:
        t = _tanh(x * factors.cap_inner)
        x = t * factors.cap + shift[None, :]
    if note & CROSSED != 0:
        x = _hide(x, row, turn, call, records)
    return gl.exp2(x), t


@gluon.jit
def _score_gradient(p, dp, t, delta, factors):
    """dsᵀ = pᵀ ∘ (dpᵀ + delta), and through the softcap."""
    ds = p * (dp + delta[None, :])
    if factors.cap is not None:
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def send(dq, dq_ring, dq_use):
    """dq of a tile of rows, or a slice of it, to `reduce`."""
    acquire(dq_ring, dq_use).store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use)


@gluon.jit
def _add_rows(
    dk, dv, use, dq_use, turn, call, inputs, k, v, ds_s, dq_ring, records, factors,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """dk, dv of one more tile of rows; its dq goes to `reduce`."""
    dtype: gl.constexpr = k.dtype
    BLOCK_N: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[1]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    SLOTS: gl.constexpr = inputs.notes.shape[0]
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(inputs.q, use).reshape([BLOCK_M, D])
    note = read(inputs.notes, use % SLOTS)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(inputs.do, use).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    shift = inputs.shift.index(use % SLOTS).load(ROW_L)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    p, t = probabilities(x, shift, note, (note >> NOTE_BITS) * BLOCK_M, turn, call, records, factors)
    p16 = p.to(dtype)
    delta = inputs.delta.index(use % SLOTS).load(ROW_L)
    ds16 = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, factors).to(dtype)
    ds_s.store(ds16)

    dv_token = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    dq = warpgroup_mma_wait(1, deps=(dq_token,))
    send(dq, dq_ring, dq_use)
    release(inputs.do.empty, use)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    release(inputs.q.empty, use)
    return dk, dv, note


@gluon.jit
def _add_rows_in_halves(
    dk, dv, use, dq_use, turn, call, inputs, k, v, ds_s, dq_ring, records, factors,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
):  # fmt: skip
    """The same with the exponentials of one half of the rows beside the products of the other."""
    dtype: gl.constexpr = k.dtype
    BLOCK_N: gl.constexpr = k.shape[0]
    D: gl.constexpr = k.shape[1]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    SLOTS: gl.constexpr = inputs.notes.shape[0]
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    shift_s = inputs.shift.index(use % SLOTS)
    delta_s = inputs.delta.index(use % SLOTS)
    zero = gl.zeros((BLOCK_N, HALF), gl.float32, layout=ST_L)

    q = await_full(inputs.q, use).reshape([BLOCK_M, D])
    note = read(inputs.notes, use % SLOTS)
    q0 = q.slice(0, HALF, 0)
    q1 = q.slice(HALF, HALF, 0)
    s0 = warpgroup_mma(k, q0.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(inputs.do, use).reshape([BLOCK_M, D])
    do0 = do.slice(0, HALF, 0)
    do1 = do.slice(HALF, HALF, 0)
    dp0 = warpgroup_mma(v, do0.permute((1, 0)), zero, use_acc=False, is_async=True)
    s1 = warpgroup_mma(k, q1.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp1 = warpgroup_mma(v, do1.permute((1, 0)), zero, use_acc=False, is_async=True)

    row = (note >> NOTE_BITS) * BLOCK_M
    shift = shift_s.slice(0, HALF, 0).load(ROW_L)
    p, t = probabilities(warpgroup_mma_wait(3, deps=(s0,)), shift, note, row, turn, call, records, factors)
    p16 = p.to(dtype)
    delta = delta_s.slice(0, HALF, 0).load(ROW_L)
    ds0 = _score_gradient(p, warpgroup_mma_wait(2, deps=(dp0,)), t, delta, factors).to(dtype)
    ds_s.slice(0, HALF, 1).store(ds0)
    dv = warpgroup_mma(gl.convert_layout(p16, A_L), do0, dv, is_async=True)

    row = (note >> NOTE_BITS) * BLOCK_M + HALF
    shift = shift_s.slice(HALF, HALF, 0).load(ROW_L)
    p, t = probabilities(warpgroup_mma_wait(2, deps=(s1,)), shift, note, row, turn, call, records, factors)
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
    send(dq, dq_ring, dq_use)
    release(inputs.do.empty, use)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    release(inputs.q.empty, use)
    return dk, dv, note


@gluon.jit
def hand_over(acc, like, call, dq_ring, dq_use, OUT_SLOTS: gl.constexpr):
    """dk or dv to `reduce`."""
    dtype: gl.constexpr = like.dtype
    for part in gl.static_range(OUT_SLOTS):
        acquire(dq_ring, dq_use + part)
    out_s = out_slot(dq_ring, dq_use, call, dtype, acc.shape[0], acc.shape[1], OUT_SLOTS)
    out_s.reshape([acc.shape[0], acc.shape[1]]).store(acc.to(dtype))
    fence_async_shared()
    for part in gl.static_range(OUT_SLOTS):
        release(dq_ring.full, dq_use + part)


@gluon.jit
def add_up(x, which: gl.constexpr, turn, call, records, sums):
    """dk or dv of a shared tile, added to that of the programs that came before; the last of them stores it."""
    BLOCK_N: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    index = read(records.slots, turn % RECORDS * RECORD + FIELDS - 1)
    j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    c = gl.arange(0, D, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    at = sums.dkdv + (2 * index + which) * (BLOCK_N * D) + j * D + c
    gl.atomic_add(at, x, sem="relaxed")
    gl.thread_barrier()
    last = gl.atomic_add(sums.arrived + 2 * index + which, 1, sem="acq_rel") == call.splits - 1
    gl.thread_barrier()
    if last:
        x = gl.load(at, cache_modifier=".cg")
    write(records.slots, turn % RECORDS * RECORD + FIELDS + which, gl.where(last, 1, 0))
    return x


@gluon.jit
def multiply(sums, call, inputs, ds_s, dq_ring, records, factors, HALVES: gl.constexpr):
    """The partition with all products. Eight warps: two warpgroups share the columns of sᵀ, dpᵀ, dk, dv."""
    BLOCK_N: gl.constexpr = ds_s.shape[0]
    BLOCK_M: gl.constexpr = ds_s.shape[1]
    D: gl.constexpr = inputs.k.slots.shape[-1]
    DQ_WARPS: gl.constexpr = [8, 1] if BLOCK_M == 128 else [4, 2]
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M // 2 if HALVES else BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], DQ_WARPS, [16, D // DQ_WARPS[1], 16])
    ADD: gl.constexpr = _add_rows_in_halves if HALVES else _add_rows
    k = inputs.k.slots.index(0).reshape([BLOCK_N, D])
    v = inputs.v.slots.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        await_full(inputs.k, turn)
        await_full(inputs.v, turn)
        more = tile.begin < tile.end
        while more:
            dk, dv, note = ADD(
                dk, dv, use, use + turn * 2, turn, call, inputs, k, v, ds_s, dq_ring, records, factors, ST_L, KV_L, DQ_L
            )
            use += 1
            more = note & LAST == 0
        release(inputs.k.empty, turn)
        release(inputs.v.empty, turn)
        dk = dk * factors.scale
        if call.splits is not None:
            dv = add_up(dv, DV, turn, call, records, sums)
            dk = add_up(dk, DK, turn, call, records, sums)
        hand_over(dv, k, call, dq_ring, use + turn * 2, 1)
        hand_over(dk, k, call, dq_ring, use + turn * 2 + 1, 1)
        release(records.empty, turn)
        turn += 1
        tile = hear(records, turn, call)
