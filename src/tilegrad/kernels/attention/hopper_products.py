"""The products of Hopper's backward, by eight warps: hopper_bwd.py has the equations, hopper_walk.py who does what.

Scores are held transposed, sᵀ (columns, rows): pᵀ and dsᵀ then are the left operands of dv += pᵀ do and dk += dsᵀ q as the
tensor cores left them in registers. Only ds, for dq = ds k, goes through shared memory. For head dimensions beyond 128,
whose dk and dv fill the registers, p does so too (`multiply_wide`). Tiles of rows that an edge crosses are masked, in a loop
of their own.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper_walk import END, acquire, await_full, hear, is_whole, record, release, row_tile

NOWHERE = gl.constexpr(2**30)  # a column that no row sees


@gluon.jit
def _tanh(x):
    """Odd polynomial near 0, where 1 − 2 / (1 + exp(2x)) would cancel."""
    y = x * x
    near = 0.020696379244327545 - 0.005768859293311834 * y
    near = -0.333332896232605 + y * (0.13331660628318787 + y * (-0.05375746265053749 + y * near))
    far = 1.0 - 2.0 / (1.0 + gl.exp2(gl.minimum(gl.maximum(x, -20.0), 20.0) * 2.8853900817779268))
    return gl.where(gl.abs(x) < 0.625, x + x * y * near, far)


@gluon.jit
def _hide(x, i, turn, call, tiles_ring, LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """−inf where a row of the i-th row tile does not see a column of the turn's tile, or there is no such column."""
    tile = record(tiles_ring, turn, call)
    j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.where(j < tile.tk, j, NOWHERE)[:, None]
    ahead = row_tile(tile, i) * BLOCK_M + tile.tk - tile.tq
    at = ahead + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    seen = j < NOWHERE
    if call.right is not None:
        seen = j <= at + call.right
    if call.left is not None:
        seen = seen & (j >= at - call.left)
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def _add_rows(
    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring,
    unit, cap, cap_inner,
    ST_L: gl.constexpr, KV_L: gl.constexpr, DQ_L: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """dk, dv of one more tile of rows; its dq goes to `reduce`."""
    dtype: gl.constexpr = k.dtype
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=KV_L, k_width=2)
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    shift_s = shift_s.index(use % SLOTS)
    delta_s = delta_s.index(use % SLOTS)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, SLOTS).reshape([BLOCK_M, D])
    if cap is None:  # shift as the accumulator's first value costs no registers and no addition
        seed = shift_s.load(ROW_L)[None, :] + zero
        s_token = warpgroup_mma(k, q.permute((1, 0)), seed, is_async=True)
    else:
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    do = await_full(do_ring, use, SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    if cap is None:
        x = x * unit
    else:
        t = _tanh(x * cap_inner)
        x = t * cap + shift_s.load(ROW_L)[None, :]
    if MASKED:
        x = _hide(x, i, turn, call, tiles_ring, ST_L, BLOCK_M, BLOCK_N)
    p = gl.exp2(x)
    p16 = p.to(dtype)
    delta = delta_s.load(ROW_L)
    ds = p * (warpgroup_mma_wait(0, deps=(dp_token,)) + delta[None, :])
    if cap is not None:
        ds = ds * (1.0 - t * t)
    ds16 = ds.to(dtype)
    ds_s.store(ds16)

    dv_token = warpgroup_mma(gl.convert_layout(p16, A_L), do, dv, is_async=True)
    fence_async_shared()
    zero_dq = gl.zeros((BLOCK_M, D), gl.float32, layout=DQ_L)
    dq_token = warpgroup_mma(ds_s.permute((1, 0)), k, zero_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    dq = warpgroup_mma_wait(1, deps=(dq_token,))
    dq_use = use + 2 * turn
    dq_s = acquire(dq_ring, dq_use, DQ_SLOTS).reshape([BLOCK_M, D])
    dq_s.store(dq)
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
    release(do_ring.empty, use, SLOTS)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    release(q_ring.empty, use, SLOTS)
    return dk, dv


@gluon.jit
def multiply(
    dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring, ds_s, dq_ring,
    tiles_ring, scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
):  # fmt: skip
    """The partition with all products. Eight warps: two warpgroups share the columns of sᵀ, dpᵀ, dk, dv."""
    WARPS: gl.constexpr = gl.num_warps()
    WM: gl.constexpr = BLOCK_M // 16 if BLOCK_M // 16 < WARPS else WARPS
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WARPS // WM], [16, D // (WARPS // WM), 16])
    k = k_ring.buffer.index(0).reshape([BLOCK_N, D])
    v = v_ring.buffer.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    count = hear(tiles_ring, turn, call).count
    while count != END:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        masked = record(tiles_ring, turn, call).masked
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        for _g in range(0, call.group):
            for i in range(0, masked):
                dk, dv = _add_rows(
                    dk, dv, use, turn, i, call,
                    q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring, unit, cap, cap_inner,
                    ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, True,
                )  # fmt: skip
                use += 1
            for i in range(masked, count):
                dk, dv = _add_rows(
                    dk, dv, use, turn, i, call,
                    q_ring, do_ring, shift_s, delta_s, k, v, ds_s, dq_ring, tiles_ring, unit, cap, cap_inner,
                    ST_L, KV_L, DQ_L, BLOCK_M, BLOCK_N, D, SLOTS, DQ_SLOTS, False,
                )  # fmt: skip
                use += 1
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = record(tiles_ring, turn, call)
        dq_use = use + 2 * turn
        _hand_over(dv_ptr, dv, dv_h, dv_t, d, tile, call, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS)
        _hand_over(dk_ptr, dk * scale, dk_h, dk_t, d, tile, call, dq_ring, dq_use + 1, KV_L, BLOCK_N, D, DQ_SLOTS)
        release(tiles_ring.empty, turn, 2)
        turn += 1
        count = hear(tiles_ring, turn, call).count


@gluon.jit
def _add_rows_wide(
    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
    unit, cap, cap_inner,
    ST_L: gl.constexpr, DQ_L: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
    Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The same with p and ds through shared memory and dq in SLICES of its columns."""
    dtype: gl.constexpr = k.dtype
    ROW_L: gl.constexpr = gl.SliceLayout(0, ST_L)
    WIDTH: gl.constexpr = D // SLICES
    shift_s = shift_s.index(use % Q_SLOTS)
    delta_s = delta_s.index(use % DO_SLOTS)
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)

    q = await_full(q_ring, use, Q_SLOTS).reshape([BLOCK_M, D])
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    shift = shift_s.load(ROW_L)
    do = await_full(do_ring, use, DO_SLOTS).reshape([BLOCK_M, D])
    dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(1, deps=(s_token,))
    if cap is None:
        x = x * unit + (shift * unit)[None, :]
    else:
        t = _tanh(x * cap_inner)
        x = t * cap + shift[None, :]
    if MASKED:
        x = _hide(x, i, turn, call, tiles_ring, ST_L, BLOCK_M, BLOCK_N)
    p = gl.exp2(x)
    p_s.store(p.to(dtype))
    delta = delta_s.load(ROW_L)
    ds = p * (warpgroup_mma_wait(0, deps=(dp_token,)) + delta[None, :])
    if cap is not None:
        ds = ds * (1.0 - t * t)
    ds_s.store(ds.to(dtype))
    fence_async_shared()

    zero_dq = gl.zeros((BLOCK_M, WIDTH), gl.float32, layout=DQ_L)
    dq_use = use * SLICES + 2 * turn
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
    return dk, dv


@gluon.jit
def multiply_wide(
    dk_ptr, dv_ptr, dk_h, dk_t, dv_h, dv_t, d, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring, p_s, ds_s,
    dq_ring, tiles_ring, scale, unit, cap, cap_inner,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    DQ_SLOTS: gl.constexpr, SLICES: gl.constexpr,
):  # fmt: skip
    """The partition with all products for D > 128: two warpgroups share the head's columns of dk, dv, dq."""
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_M // 2, 16])
    KV_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // SLICES // 2, 16])
    k = k_ring.buffer.index(0).reshape([BLOCK_N, D])
    v = v_ring.buffer.index(0).reshape([BLOCK_N, D])
    use = 0
    turn = 0
    count = hear(tiles_ring, turn, call).count
    while count != END:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        masked = record(tiles_ring, turn, call).masked
        await_full(k_ring, turn, 1)
        await_full(v_ring, turn, 1)
        for _g in range(0, call.group):
            for i in range(0, masked):
                dk, dv = _add_rows_wide(
                    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
                    unit, cap, cap_inner, ST_L, DQ_L, BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, True,
                )  # fmt: skip
                use += 1
            for i in range(masked, count):
                dk, dv = _add_rows_wide(
                    dk, dv, use, turn, i, call, q_ring, do_ring, shift_s, delta_s, k, v, p_s, ds_s, dq_ring, tiles_ring,
                    unit, cap, cap_inner, ST_L, DQ_L, BLOCK_M, BLOCK_N, D, Q_SLOTS, DO_SLOTS, DQ_SLOTS, SLICES, False,
                )  # fmt: skip
                use += 1
        release(k_ring.empty, turn, 1)
        release(v_ring.empty, turn, 1)
        tile = record(tiles_ring, turn, call)
        dq_use = use * SLICES + 2 * turn
        _hand_over(dv_ptr, dv, dv_h, dv_t, d, tile, call, dq_ring, dq_use, KV_L, BLOCK_N, D, DQ_SLOTS)
        _hand_over(dk_ptr, dk * scale, dk_h, dk_t, d, tile, call, dq_ring, dq_use + 1, KV_L, BLOCK_N, D, DQ_SLOTS)
        release(tiles_ring.empty, turn, 2)
        turn += 1
        count = hear(tiles_ring, turn, call).count


@gluon.jit
def _hand_over(
    x, acc, x_h, x_t, d, tile, call, dq_ring, dq_use,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DQ_SLOTS: gl.constexpr,
):  # fmt: skip
    """dk or dv to `reduce`. Of a packed sequence's last tile the rows that are its own are stored here: those behind them
    belong to the next sequence."""
    dtype: gl.constexpr = x.dtype.element_ty
    if call.cu_seqlens_q is not None:  # noqa: SIM102 (known when compiled; the other is not)
        if not is_whole(tile, call, BLOCK_N):
            j = tile.n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))[:, None]
            c = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
            head = x + gl.cast(tile.kv_head, gl.int64) * x_h + gl.cast(tile.start_k, gl.int64) * x_t
            gl.store(head + gl.cast(j, gl.int64) * x_t + c, acc.to(dtype), mask=(j < tile.tk) & (c < d))
    out_s = acquire(dq_ring, dq_use, DQ_SLOTS)
    H_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_N, D], dtype)
    out_s._reinterpret(dtype, [1, 1, BLOCK_N, D], H_L).reshape([BLOCK_N, D]).store(acc.to(dtype))
    fence_async_shared()
    release(dq_ring.full, dq_use, DQ_SLOTS)
