"""The products of Hopper's backward for head dimensions beyond 128: two warpgroups with a task each.

dk and dv of 64 columns fill half the registers of two warpgroups, so a tile is 64 × 64, and if both shared every product, each
would read one operand of it whole: shared memory would be the limit. Here one holds dv, the other dk:

    weigh   sᵀ = k qᵀ      pᵀ = exp2(…)               dv += pᵀ do      dq slices 0, 2 = ds k
    grade   dpᵀ = v doᵀ    dsᵀ = pᵀ ∘ (dpᵀ + delta)   dk += dsᵀ q      dq slices 1, 3 = ds k

pᵀ goes from `weigh` to `grade` in float32, with the softcap's factor 1 − t² in it; dsᵀ goes to shared memory for dq, which both
multiply. Left operands of dv and dk stay in registers. While one works out exponentials or ds, the other's products run.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_mma import add_up, hand_over, probabilities, send
from .backward_schedule import DK, DV, LAST, NOTE_BITS, await_full, barriers, hear, read, release

SLICES = gl.constexpr(4)  # of dq's columns
OUT_SLOTS = gl.constexpr(2)  # of dq, that a tile of dk or dv takes
WIDE_REGISTERS = gl.constexpr(256)  # of a thread of `grade`; `weigh` has what is left, 224
ST_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of sᵀ, dpᵀ and a slice of dq
KV_L = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # of dk and dv
A_L = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=KV_L.value, k_width=2))  # of pᵀ and dsᵀ beside do and q
# float32 (64, 64) as a warpgroup's accumulator has it: four numbers of each thread side by side
THREADS_L = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]]
    )
)


class Slot(NamedTuple):
    """A ring of one slot whose writer need not ask whether it is empty."""

    slots: Any
    full: Any


class Exchange(NamedTuple):
    """pᵀ and dsᵀ. pᵀ of the next tile of rows is stored when dsᵀ of this one has come, thus after pᵀ was read; dsᵀ when its own
    pᵀ has come, thus after dq of the tile before."""

    p: Any
    ds: Any


@gluon.jit
def new_exchange(dtype: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    SCORES_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    p = gl.allocate_shared_memory(gl.float32, [1, BLOCK_N, BLOCK_M], THREADS_L)
    ds = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], SCORES_L)
    return Exchange(Slot(p, barriers(1, 1)), Slot(ds, barriers(1, 1)))


@gluon.jit
def _end_tile(x, which: gl.constexpr, use, turn, call, inputs, dq_ring, records, sums):
    """dk or dv of a tile of columns to `reduce`, dv first. The slot's use before, dq_use − 1, is the other partition's: until
    it is full, asking whether the slot is empty could hear of the use before that. dq_use + 2·OUT_SLOTS − 1 has its slot and
    its phase and is never negative."""
    if call.splits is not None:
        x = add_up(x, which, turn, call, records, sums)
    dq_use = use * SLICES + turn * 2 * OUT_SLOTS + (DV - which) * OUT_SLOTS
    await_full(dq_ring, dq_use + 2 * OUT_SLOTS - 1)
    hand_over(x, inputs.k.slots, call, dq_ring, dq_use, OUT_SLOTS)
    release(records.empty, turn)


@gluon.jit
def _gradient_of_rows(ds, k, part: gl.constexpr):
    """A slice of dq = ds k, on its way."""
    WIDTH: gl.constexpr = k.shape[1] // SLICES
    BLOCK_M: gl.constexpr = ds.shape[1]
    zero = gl.zeros((BLOCK_M, WIDTH), gl.float32, layout=ST_L)
    return warpgroup_mma(ds.permute((1, 0)), k.slice(part * WIDTH, WIDTH, 1), zero, use_acc=False, is_async=True)


@gluon.jit
def _only_slot(ring, use):
    """Slot 0, by a number that the compiler does not know: else it keeps the address of each of its products in registers."""
    return ring.slots.index(use >> 30).reshape([ring.slots.shape[-2], ring.slots.shape[-1]])


@gluon.jit
def weigh(sums, call, inputs, exchange, dq_ring, records, factors):
    """The partition with s, p, dv and every other slice of dq."""
    BLOCK_N: gl.constexpr = inputs.k.slots.shape[-2]
    D: gl.constexpr = inputs.k.slots.shape[-1]
    BLOCK_M: gl.constexpr = inputs.shift.shape[1]
    dtype: gl.constexpr = inputs.k.slots.dtype
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)
    use = 0
    turn = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        dv = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        await_full(inputs.k, turn)
        more = tile.begin < tile.end
        while more:
            k = _only_slot(inputs.k, use)
            q = await_full(inputs.q, use).reshape([BLOCK_M, D])
            s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            note = read(inputs.notes, use % inputs.notes.shape[0])
            shift = inputs.shift.index(use % inputs.shift.shape[0]).load(gl.SliceLayout(0, ST_L))
            x = warpgroup_mma_wait(0, deps=(s_token,))
            release(inputs.q.empty, use)
            p, t = probabilities(x, shift, note, (note >> NOTE_BITS) * BLOCK_M, turn, call, records, factors)
            weight = p
            if factors.cap is not None:
                weight = p * (1.0 - t * t)
            exchange.p.slots.index(0).store(weight)
            release(exchange.p.full, use)

            do = await_full(inputs.do, use).reshape([BLOCK_M, D])
            dv_token = warpgroup_mma(gl.convert_layout(p.to(dtype), A_L), do, dv, is_async=True)
            await_full(exchange.ds, use)
            ds = _only_slot(exchange.ds, use)
            dq_token = _gradient_of_rows(ds, k, 0)
            dv = warpgroup_mma_wait(1, deps=(dv_token,))
            release(inputs.do.empty, use)
            dq_use = use * SLICES + turn * 2 * OUT_SLOTS
            dq = warpgroup_mma_wait(0, deps=(dq_token,))
            dq_token = _gradient_of_rows(ds, k, 2)
            send(dq, dq_ring, dq_use)
            dq = warpgroup_mma_wait(0, deps=(dq_token,))
            send(dq, dq_ring, dq_use + 2)
            use += 1
            more = note & LAST == 0
        release(inputs.k.empty, turn)
        _end_tile(dv, DV, use, turn, call, inputs, dq_ring, records, sums)
        turn += 1
        tile = hear(records, turn, call)


@gluon.jit
def grade(sums, call, inputs, exchange, dq_ring, records, factors):
    """The partition with dp, ds, dk and the other slices of dq."""
    BLOCK_N: gl.constexpr = inputs.k.slots.shape[-2]
    D: gl.constexpr = inputs.k.slots.shape[-1]
    BLOCK_M: gl.constexpr = inputs.delta.shape[1]
    dtype: gl.constexpr = inputs.k.slots.dtype
    zero = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=ST_L)
    use = 0
    turn = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        dk = gl.zeros((BLOCK_N, D), gl.float32, layout=KV_L)
        await_full(inputs.k, turn)
        await_full(inputs.v, turn)
        more = tile.begin < tile.end
        while more:
            k = _only_slot(inputs.k, use)
            v = _only_slot(inputs.v, use)
            do = await_full(inputs.do, use).reshape([BLOCK_M, D])
            dp_token = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            delta = inputs.delta.index(use % inputs.delta.shape[0]).load(gl.SliceLayout(0, ST_L))
            weight = await_full(exchange.p, use).load(ST_L)
            dp = warpgroup_mma_wait(0, deps=(dp_token,))
            release(inputs.do.empty, use)
            ds16 = (weight * (dp + delta[None, :])).to(dtype)
            exchange.ds.slots.index(0).store(ds16)
            fence_async_shared()
            release(exchange.ds.full, use)
            ds = _only_slot(exchange.ds, use)

            q = await_full(inputs.q, use).reshape([BLOCK_M, D])
            note = read(inputs.notes, use % inputs.notes.shape[0])
            dk_token = warpgroup_mma(gl.convert_layout(ds16, A_L), q, dk, is_async=True)
            dq1_token = _gradient_of_rows(ds, k, 1)
            dq3_token = _gradient_of_rows(ds, k, 3)
            dk = warpgroup_mma_wait(2, deps=(dk_token,))
            release(inputs.q.empty, use)
            dq_use = use * SLICES + turn * 2 * OUT_SLOTS
            send(warpgroup_mma_wait(1, deps=(dq1_token,)), dq_ring, dq_use + 1)
            send(warpgroup_mma_wait(0, deps=(dq3_token,)), dq_ring, dq_use + 3)
            use += 1
            more = note & LAST == 0
        release(inputs.k.empty, turn)
        release(inputs.v.empty, turn)
        _end_tile(dk * factors.scale, DK, use, turn, call, inputs, dq_ring, records, sums)
        turn += 1
        tile = hear(records, turn, call)
