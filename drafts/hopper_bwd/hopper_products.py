"""The products of Hopper's backward, by eight warps: hopper_bwd.py has the equations, hopper_walk.py who does what.

Scores are held transposed, sᵀ (columns, rows): pᵀ and dsᵀ then are the left operands of dv += pᵀ do and dk += dsᵀ q as the
tensor cores left them in registers. Only ds, for dq = ds k, goes through shared memory. For head dimensions beyond 128,
whose dk and dv fill the registers, p does so too (`multiply_wide`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper_walk import (
    CROSSED,
    LAST,
    NOTE_BITS,
    RECORDS,
    acquire,
    await_full,
    hear,
    is_whole,
    out_slot,
    read,
    recall,
    release,
)

NOWHERE = gl.constexpr(2**30)  # a column that no row sees


class Out(NamedTuple):
    """dk or dv by its address; x is None where it is not wanted."""

    x: Any
    b: Any
    h: Any
    t: Any


@gluon.jit
def _tanh(x):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel."""
    y = x * x
    near = 0.020696379244327545 - 0.005768859293311834 * y
    near = -0.333332896232605 + y * (0.13331660628318787 + y * (-0.05375746265053749 + y * near))
    far = 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(gl.maximum(x, -20.0), 20.0) * 2.8853900817779268))
    return gl.where(gl.abs(x) < 0.625, x + x * y * near, far)


@gluon.jit
def _hide(
    x, m, skipped, turn, call, records,
    LAYOUT: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """−inf where a row of row tile m, of which the first are skipped, does not see a column of the turn's tile, or there is
    no such column."""
    tile = recall(records, turn, call)
    j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.where(j < tile.tk, j, NOWHERE)[:, None]
    ahead = m * BLOCK_M + skipped + tile.tk - tile.tq
    at = ahead + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    seen = j < NOWHERE
    if call.right is not None:
        seen = j <= at + call.right
    if call.left is not None:
        seen = seen & (j >= at - call.left)
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def _pin(p16):
    """Keeps ptxas from waiting for products before the exponentials: a store that never happens depends on all of p."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred pp; .reg .b32 aa, t0, t1;
        or.b32 t0, $4, $5; or.b32 t1, $6, $7; or.b32 t0, t0, t1; mov.b32 aa, 0;
        setp.lt.s32 pp, t0, 0; @pp st.volatile.shared.b32 [aa], t0;
        mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }""",
        "=r,=r,=r,=r,r,r,r,r", [p16], dtype=p16.dtype, is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def _probabilities(
    x, shift, note, skipped, turn, call, records, unit, cap, cap_inner,
    ST_L: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(p, t) out of products x; t = tanh where the call has a softcap."""
    t = x
    if cap is None:
        x = x * unit + (shift * unit)[None, :]
    else:
        t = _tanh(x * cap_inner)
        x = t * cap + shift[None, :]
    if note & CROSSED != 0:
        x = _hide(x, note >> NOTE_BITS, skipped, turn, call, records, ST_L, ROWS, BLOCK_M, BLOCK_N)
    return gl.exp2(x), t


@gluon.jit
def _score_gradient(p, dp, t, delta, cap):
    """dsᵀ = pᵀ ∘ (dpᵀ + delta), and through the softcap."""
    ds = p * (dp + delta[None, :])
    if cap is not None:
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def _add_rows(
    dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, ds_s, dq_ring, records, unit, cap, cap_inner,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    OUTPUTS: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """dk, dv of one more tile of rows; its dq goes to `reduce`."""
    dtype: gl.constexpr = k.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, SLOTS).reshape([BLOCK_M, D])
    note = read(notes, use % SLOTS)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(do_ring, use, SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    shift = shift_s.index(use % SLOTS).load(ROW_L)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    p, t = _probabilities(x, shift, note, 0, turn, call, records, unit, cap, cap_inner, ST_L, BLOCK_M, BLOCK_M, BLOCK_N)
    p16 = p.to(dtype)
    if PIN:
        p16 = _pin(p16)
    delta = delta_s.index(use % SLOTS).load(ROW_L)
    ds16 = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, cap).to(dtype)
    ds_s.store(ds16)

    dv_token = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    dq = warpgroup_mma_wait(1, deps=(dq_token,))
    dq_use = use + 2 * OUTPUTS * turn
    acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, D]).store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    release(do_ring.empty, use, SLOTS)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    release(q_ring.empty, use, SLOTS)
    return dk, dv, note


@gluon.jit
def _add_rows_in_halves(
    dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, ds_s, dq_ring, records, unit, cap, cap_inner,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    OUTPUTS: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """The same with the exponentials of one half of the rows beside the products of the other."""
    dtype: gl.constexpr = k.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    HALF: gl.constexpr = BLOCK_M // 2
    shift_s = shift_s.index(use % SLOTS)
    delta_s = delta_s.index(use % SLOTS)
    zero = gl.zeros((BLOCK_N, HALF), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, SLOTS).reshape([BLOCK_M, D])
    note = read(notes, use % SLOTS)
    q0 = q.slice(0, HALF, 0)
    q1 = q.slice(HALF, HALF, 0)
    s0 = warpgroup_mma(k, q0.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(do_ring, use, SLOTS).reshape([BLOCK_M, D])
    do0 = do.slice(0, HALF, 0)
    do1 = do.slice(HALF, HALF, 0)
    dp0 = warpgroup_mma(v, do0.permute((1, 0)), zero, use_acc=False, is_async=True)
    s1 = warpgroup_mma(k, q1.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp1 = warpgroup_mma(v, do1.permute((1, 0)), zero, use_acc=False, is_async=True)

    shift = shift_s.slice(0, HALF, 0).load(ROW_L)
    p, t = _probabilities(
        warpgroup_mma_wait(3, deps=(s0,)), shift, note, 0, turn, call, records, unit, cap, cap_inner,
        ST_L, HALF, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    p16 = p.to(dtype)
    if PIN:
        p16 = _pin(p16)
    delta = delta_s.slice(0, HALF, 0).load(ROW_L)
    ds0 = _score_gradient(p, warpgroup_mma_wait(2, deps=(dp0,)), t, delta, cap).to(dtype)
    ds_s.slice(0, HALF, 1).store(ds0)
    dv = warpgroup_mma(gl.convert_layout(p16, A_L), do0, dv, is_async=True)

    shift = shift_s.slice(HALF, HALF, 0).load(ROW_L)
    p, t = _probabilities(
        warpgroup_mma_wait(2, deps=(s1,)), shift, note, HALF, turn, call, records, unit, cap, cap_inner,
        ST_L, HALF, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    p16 = p.to(dtype)
    delta = delta_s.slice(HALF, HALF, 0).load(ROW_L)
    ds1 = _score_gradient(p, warpgroup_mma_wait(1, deps=(dp1,)), t, delta, cap).to(dtype)
    ds_s.slice(HALF, HALF, 1).store(ds1)
    dv = warpgroup_mma(gl.convert_layout(p16, A_L), do1, dv, is_async=True)

    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds0, A_L), q0, dk, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds1, A_L), q1, dk, is_async=True)
    dv = warpgroup_mma_wait(3, deps=(dv,))
    dq = warpgroup_mma_wait(2, deps=(dq_token,))
    dq_use = use + 2 * OUTPUTS * turn
    acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, D]).store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    release(do_ring.empty, use, SLOTS)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    release(q_ring.empty, use, SLOTS)
    return dk, dv, note


@gluon.jit
def _hand_over(
    out, acc, d, tile, call, like, dq_ring, dq_use,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DQ_SLOTS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """dk or dv to `reduce`. What TMA may not store is written here: rows of a packed sequence's last tile, for those behind
    them are the next sequence's. Where programs share the tile they all add to float32."""
    dtype: gl.constexpr = like.dtype
    if call.splits is not None or call.cu_seqlens_q is not None:  # noqa: SIM102 (known when compiled; the last is not)
        if out.x is not None:  # noqa: SIM102
            if call.splits is not None or not is_whole(tile, call, BLOCK_N):
                j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))[:, None]
                c = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
                b = tile.b * 0 if call.cu_seqlens_q is not None else tile.b
                at = out.x + b * out.b + tile.kv_head * out.h + tile.start_k * out.t + j * out.t + c
                inside = (j < tile.tk) & (c < d)
                if call.splits is not None:
                    gl.atomic_add(at, acc, mask=inside, sem="relaxed")
                else:
                    gl.store(at, acc.to(dtype), mask=inside)
    if call.splits is None:
        for part in gl.static_range(OUTPUTS):
            acquire(dq_ring, dq_use + part, DQ_SLOTS)
        out_s = out_slot(dq_ring, dq_use, dtype, BLOCK_N, D, DQ_SLOTS, OUTPUTS)
        out_s.reshape([BLOCK_N, D]).store(acc.to(dtype))
        fence_async_shared()
        for part in gl.static_range(OUTPUTS):
            release(dq_ring.full, dq_use + part, DQ_SLOTS)


@gluon.jit
def multiply(
    dk_out, dv_out, d, call, q_ring, do_ring, notes, shift_s, delta_s, k_ring, v_ring, ds_s, dq_ring, records,
    scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    OUTPUTS: gl.constexpr, HALVES: gl.constexpr, PIN: gl.constexpr,
):  # fmt: skip
    """The partition with all products. Eight warps: two warpgroups share the columns of sᵀ, dpᵀ, dk, dv."""
    WARPS: gl.constexpr = gl.num_warps()
    WM: gl.constexpr = BLOCK_M // 16 if BLOCK_M // 16 < WARPS else WARPS
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M // 2 if HALVES else BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WARPS // WM], [16, D // (WARPS // WM), 16])
    k = k_ring.slots.index(0).reshape([BLOCK_N, D])
    v = v_ring.slots.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        more = tile.begin < tile.end
        while more:
            if HALVES:
                dk, dv, note = _add_rows_in_halves(
                    dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, ds_s, dq_ring, records,
                    unit, cap, cap_inner, ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, OUTPUTS, PIN,
                )  # fmt: skip
            else:
                dk, dv, note = _add_rows(
                    dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, ds_s, dq_ring, records,
                    unit, cap, cap_inner, ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, OUTPUTS, PIN,
                )  # fmt: skip
            use += 1
            more = note & LAST == 0
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = recall(records, turn, call)
        dq_use = use + 2 * OUTPUTS * turn
        _hand_over(dv_out, dv, d, tile, call, k, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS, OUTPUTS)
        _hand_over(dk_out, dk * scale, d, tile, call, k, dq_ring, dq_use + OUTPUTS, KV_L, BLOCK_N, D, DQ_SLOTS, OUTPUTS)
        release(records.empty, turn, RECORDS)
        turn += 1
        tile = hear(records, turn, call)


@gluon.jit
def _add_rows_wide(
    dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, records,
    unit, cap, cap_inner,
    ST_L: gl.constexpr, DQ_L: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """The same with p and ds through shared memory and dq in SLICES of its columns."""
    dtype: gl.constexpr = k.dtype
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    WIDTH: gl.constexpr = D // SLICES
    shift_s = shift_s.index(use % Q_SLOTS)
    delta_s = delta_s.index(use % DO_SLOTS)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, Q_SLOTS).reshape([BLOCK_M, D])
    note = read(notes, use % Q_SLOTS)
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    shift = shift_s.load(ROW_L)
    do = await_full(do_ring, use, DO_SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    p, t = _probabilities(x, shift, note, 0, turn, call, records, unit, cap, cap_inner, ST_L, BLOCK_M, BLOCK_M, BLOCK_N)
    p_s.store(p.to(dtype))
    delta = delta_s.load(ROW_L)
    ds = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, cap)
    ds_s.store(ds.to(dtype))
    fence_async_shared()

    zero_dq = gl.zeros((BLOCK_M, WIDTH), gl.float32, layout=DQ_L)
    dq_use = use * SLICES + 2 * OUTPUTS * turn
    dv_token = warpgroup_mma(p_s, do, dv, is_async=True)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k.slice(0, WIDTH, 1), zero_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv_token,))
    dq = warpgroup_mma_wait(0, deps=(dq_token,))
    release(do_ring.empty, use, DO_SLOTS)
    dk_token = warpgroup_mma(ds_s, q, dk, is_async=True)
    acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, WIDTH]).store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    for part in gl.static_range(1, SLICES):
        k_part = k.slice(part * WIDTH, WIDTH, 1)
        dq_token = warpgroup_mma(ds_s.permute((1, 0)), k_part, zero_dq, use_acc=False, is_async=True)
        if part == 1:
            dk = warpgroup_mma_wait(1, deps=(dk_token,))
        dq = warpgroup_mma_wait(0, deps=(dq_token,))
        if part == SLICES - 1:
            release(q_ring.empty, use, Q_SLOTS)
        acquire(dq_ring, dq_use + part, DQ_SLOTS).reshape([BLOCK_M, WIDTH]).store(dq)
        fence_async_shared()
        release(dq_ring.full, dq_use + part, DQ_SLOTS)
    return dk, dv, note


@gluon.jit
def multiply_wide(
    dk_out, dv_out, d, call, q_ring, do_ring, notes, shift_s, delta_s, k_ring, v_ring, p_s, ds_s, dq_ring, records,
    scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr,
    OUTPUTS: gl.constexpr,
):  # fmt: skip
    """The partition with all products for D > 128: two warpgroups share the head's columns of dk, dv, dq."""
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_M // 2, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // SLICES // 2, 16])
    k = k_ring.slots.index(0).reshape([BLOCK_N, D])
    v = v_ring.slots.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        more = tile.begin < tile.end
        while more:
            dk, dv, note = _add_rows_wide(
                dk, dv, use, turn, call, q_ring, do_ring, notes, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, records,
                unit, cap, cap_inner, ST_L, DQ_L, BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, OUTPUTS,
            )  # fmt: skip
            use += 1
            more = note & LAST == 0
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = recall(records, turn, call)
        dq_use = use * SLICES + 2 * OUTPUTS * turn
        _hand_over(dv_out, dv, d, tile, call, k, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS, OUTPUTS)
        _hand_over(dk_out, dk * scale, d, tile, call, k, dq_ring, dq_use + OUTPUTS, KV_L, BLOCK_N, D, DQ_SLOTS, OUTPUTS)
        release(records.empty, turn, RECORDS)
        turn += 1
        tile = hear(records, turn, call)
