"""Rounding to float8 in Triton, and the step of the scales. One pass writes both orders of a tensor: (N, C) and (C, N).

A program rounds tiles of a tensor, and stores the largest magnitude of its tiles in its own element of the state, so no atomics
are needed. In this maximum a NaN counts as infinite, so that it is not lost. A number that is computed here (an activation, its
gradient, the gradient of the logits) is rounded once, from float32.

A step with float8 products runs at the power limit, where clocks are low, so these kernels are limited by instructions as much
as by memory. Four neighbouring rows are rounded together: `_four_rows_in_words` collects the four bytes of a column in a word.
So a tile transposes words in shared memory, a quarter as many as elements. All stores are of 8 or 16 bytes a thread.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation.triton_ops import activate, derivative, sigmoids_next_to_1
from ..column_sum.triton_ops import add_partials
from ..cross_entropy.triton_ops import capped, slope
from ..gpu import ceil_div, interpreting, launch
from ..scratch import Scratch, Shapes, TensorLike
from . import state as states

BLOCK_N, BLOCK_C, WARPS = 128, 64, 8  # the tile that a program rounds at once
PADDED = 2048  # a power of two above PARTS

FIRST_PART = tl.constexpr(states.FIRST_PART)
PARTS = tl.constexpr(states.PARTS)
JUMP, JUMPS = tl.constexpr(states.JUMP), tl.constexpr(states.JUMPS)
FOLLOWED, FORMAT = tl.constexpr(states.FOLLOWED), tl.constexpr(states.FORMAT)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _update_largest(largest, a):
    """The maximum of `largest` (N, C / 8) and of |a| (N, C) over groups of 8 columns. One thread has a group. A NaN wins."""
    a = tl.abs(a)
    for _ in tl.static_range(3):
        even, odd = tl.split(tl.reshape(a, [a.shape[0], a.shape[1] // 2, 2]))
        a = tl.maximum(even, odd, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(largest, a, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _keep_largest(state, part, largest):
    largest = tl.where(largest == largest, largest, float("inf"))
    pointer = state + FIRST_PART + part
    tl.store(pointer, tl.maximum(tl.load(pointer), tl.max(tl.max(largest, 1), 0)))


@triton.jit
def _round_row(a, inverse, bound, x8, x8t, rows, columns, N, C, WIDTH, INTERPRETED: tl.constexpr):
    """Rounds a (one row for each of `rows`), and stores it in x8 (N, WIDTH). Returns the rounded numbers. The conversion
    instruction clamps to the largest number of the format; Triton's interpreter does not."""
    a *= inverse
    if INTERPRETED:
        a = tl.clamp(a, -bound, bound, propagate_nan=tl.PropagateNan.ALL)
    if x8 is not None:
        a8 = a.to(x8.dtype.element_ty)
        inside = (rows[:, None] < N) & (columns[None, :] < C)
        tl.store(x8 + rows[:, None].to(tl.int64) * WIDTH + columns[None, :], a8, mask=inside)
        return a8
    else:
        return a.to(x8t.dtype.element_ty)


@triton.jit
def _four_rows_in_words(a, b, c, d, INTERPRETED: tl.constexpr):
    """Words of four bytes, the numbers of one column in four rows. A thread has four columns of each row in a register, so this
    is the transpose of 4 × 4 bytes, in eight instructions."""
    if INTERPRETED:
        low = a.to(tl.uint8, bitcast=True).to(tl.int32) | (b.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
        high = c.to(tl.uint8, bitcast=True).to(tl.int32) | (d.to(tl.uint8, bitcast=True).to(tl.int32) << 8)
        return low | (high << 16)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 ab, ab2, cd, cd2;
            prmt.b32 ab, $4, $5, 0x5140;
            prmt.b32 ab2, $4, $5, 0x7362;
            prmt.b32 cd, $6, $7, 0x5140;
            prmt.b32 cd2, $6, $7, 0x7362;
            prmt.b32 $0, ab, cd, 0x5410;
            prmt.b32 $1, ab, cd, 0x7632;
            prmt.b32 $2, ab2, cd2, 0x5410;
            prmt.b32 $3, ab2, cd2, 0x7632;
            }""",
            "=r,=r,=r,=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )


@triton.jit
def _store_columns(a, b, c, d, x8t, x8t_c, fours, columns, C, PITCH, INTERPRETED: tl.constexpr):
    """x8t (C, PITCH) from rows 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 of x8, i = `fours`."""
    if x8t is not None:
        words = _four_rows_in_words(a, b, c, d, INTERPRETED)
        into = x8t.to(tl.pointer_type(tl.int32), bitcast=True)
        pitch, stride = tl.multiple_of(PITCH // 4, 4), tl.multiple_of(x8t_c // 4, 4)
        inside = (columns[:, None] < C) & (fours[None, :] < pitch)
        tl.store(into + columns[:, None].to(tl.int64) * stride + fours[None, :], tl.trans(words), mask=inside)


@triton.jit
def _load_numbers(x, rows, columns, x_n, N, C, KIND: tl.constexpr):
    """x, or act(h) if KIND is the name of an activation; swiglu: x = [up, gate], and gate is C columns after up."""
    inside = (rows[:, None] < N) & (columns[None, :] < C)
    pointers = x + rows[:, None].to(tl.int64) * x_n + columns[None, :]
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    exact: tl.constexpr = x.dtype.element_ty == tl.float32
    if KIND == "swiglu":
        gate = tl.load(pointers + C, mask=inside, other=0.0).to(tl.float32)
        sigmoid_gate, _ = sigmoids_next_to_1(gate, exact)
        return gate * sigmoid_gate * a
    elif KIND != "":
        return activate(a, KIND, exact)
    else:
        return a


@triton.jit
def _quantize_kernel(
    x, state, x8, x8t, x_n, x8t_c, N, C, PITCH,
    KIND: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x8 = q(x) and x8t = q(x)ᵀ; x is act(h) if KIND is the name of an activation. Rows N … PITCH of x count as 0."""
    part = tl.program_id(0)
    bound = tl.load(state + FORMAT)
    inverse = tl.math.div_rn(1.0, tl.load(state))
    largest = tl.zeros([BLOCK_N // 4, BLOCK_C // 8], tl.float32)
    across = tl.cdiv(C, BLOCK_C)
    for tile in range(part, tl.cdiv(PITCH, BLOCK_N) * across, PARTS):
        fours = tile // across * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
        columns = tile % across * BLOCK_C + tl.arange(0, BLOCK_C)
        rows = fours * 4
        a = _load_numbers(x, rows, columns, x_n, N, C, KIND)
        b = _load_numbers(x, rows + 1, columns, x_n, N, C, KIND)
        c = _load_numbers(x, rows + 2, columns, x_n, N, C, KIND)
        d = _load_numbers(x, rows + 3, columns, x_n, N, C, KIND)
        largest = _update_largest(_update_largest(_update_largest(_update_largest(largest, a), b), c), d)
        a = _round_row(a, inverse, bound, x8, x8t, rows, columns, N, C, C, INTERPRETED)
        b = _round_row(b, inverse, bound, x8, x8t, rows + 1, columns, N, C, C, INTERPRETED)
        c = _round_row(c, inverse, bound, x8, x8t, rows + 2, columns, N, C, C, INTERPRETED)
        d = _round_row(d, inverse, bound, x8, x8t, rows + 3, columns, N, C, C, INTERPRETED)
        _store_columns(a, b, c, d, x8t, x8t_c, fours, columns, C, PITCH, INTERPRETED)
    _keep_largest(state, part, largest)


@triton.jit
def _gradients(da, h, a, rows, columns, N, C, KIND: tl.constexpr):
    """dh = da ∘ act'(h) of a row, and dgate for swiglu, else dh again. Stores a = act(h) if it is given."""
    inside = (rows[:, None] < N) & (columns[None, :] < C)
    exact: tl.constexpr = h.dtype.element_ty == tl.float32
    row = rows[:, None].to(tl.int64)
    da_tile = tl.load(da + row * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if KIND == "swiglu":
        up = tl.load(h + row * (2 * C) + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(h + row * (2 * C) + C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid_gate, sigmoid_minus_gate = sigmoids_next_to_1(gate, exact)
        dh = da_tile * gate * sigmoid_gate
        dgate = da_tile * up * (sigmoid_gate * (1.0 + gate * sigmoid_minus_gate))
        recomputed = gate * sigmoid_gate * up
    else:
        h_tile = tl.load(h + row * C + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dh = da_tile * derivative(h_tile, KIND, exact)
        dgate = dh
        recomputed = activate(h_tile, KIND, exact)
    if a is not None:
        tl.store(a + row * C + columns[None, :], recomputed.to(a.dtype.element_ty), mask=inside)
    return dh, dgate


@triton.jit
def _round_gradients(
    a, b, c, d, largest, total, inverse, bound, dh8, dh8t, dh8t_c, fours, columns, first_column, N, C, WIDTH, PITCH,
    SUMS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rounds a tile of C columns into columns first_column … of dh8 (N, WIDTH) and dh8t (WIDTH, PITCH). Returns `largest` and
    the column sums of the tile's rows added to total."""
    if SUMS:
        total += (a + b) + (c + d)
    largest = _update_largest(_update_largest(_update_largest(_update_largest(largest, a), b), c), d)
    last, into, rows = first_column + C, columns + first_column, fours * 4
    a = _round_row(a, inverse, bound, dh8, dh8t, rows, into, N, last, WIDTH, INTERPRETED)
    b = _round_row(b, inverse, bound, dh8, dh8t, rows + 1, into, N, last, WIDTH, INTERPRETED)
    c = _round_row(c, inverse, bound, dh8, dh8t, rows + 2, into, N, last, WIDTH, INTERPRETED)
    d = _round_row(d, inverse, bound, dh8, dh8t, rows + 3, into, N, last, WIDTH, INTERPRETED)
    _store_columns(a, b, c, d, dh8t, dh8t_c, fours, into, last, PITCH, INTERPRETED)
    return largest, total


@triton.jit
def _quantize_activation_bwd_kernel(
    da, h, state, dh8, dh8t, a, partials, dh8t_c, N, C, PITCH,
    KIND: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dh8 = q(dh) and dh8t = q(dh)ᵀ, dh = da ∘ act'(h). swiglu: h = [up, gate], and dh, of the same shape, is dup, then dgate.
    a = act(h), which may overwrite h (swiglu: da). Program p of a tile of columns has the row tiles p, p + P, p + 2P, … and
    writes partials[:, p] = Σ dh of its rows."""
    p, programs = tl.program_id(1), tl.num_programs(1)
    gated: tl.constexpr = KIND == "swiglu"
    sums: tl.constexpr = partials is not None
    bound = tl.load(state + FORMAT)
    inverse = tl.math.div_rn(1.0, tl.load(state))
    largest = tl.zeros([BLOCK_N // 4, BLOCK_C // 8], tl.float32)
    columns = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    width = 2 * C if gated else C
    dh_sum = tl.zeros([BLOCK_N // 4, BLOCK_C], tl.float32)
    dgate_sum = tl.zeros([BLOCK_N // 4, BLOCK_C], tl.float32)

    for first in range(p * BLOCK_N, PITCH, programs * BLOCK_N):
        fours = first // 4 + tl.arange(0, BLOCK_N // 4)
        rows = fours * 4
        dh0, dgate0 = _gradients(da, h, a, rows, columns, N, C, KIND)
        dh1, dgate1 = _gradients(da, h, a, rows + 1, columns, N, C, KIND)
        dh2, dgate2 = _gradients(da, h, a, rows + 2, columns, N, C, KIND)
        dh3, dgate3 = _gradients(da, h, a, rows + 3, columns, N, C, KIND)
        largest, dh_sum = _round_gradients(
            dh0, dh1, dh2, dh3, largest, dh_sum, inverse, bound, dh8, dh8t, dh8t_c, fours, columns, 0, N, C, width, PITCH,
            sums, INTERPRETED,
        )  # fmt: skip
        if gated:
            largest, dgate_sum = _round_gradients(
                dgate0, dgate1, dgate2, dgate3, largest, dgate_sum, inverse, bound, dh8, dh8t, dh8t_c, fours, columns, C,
                N, C, width, PITCH, sums, INTERPRETED,
            )  # fmt: skip

    if sums:
        place = partials + p.to(tl.int64) * C + columns
        tl.store(place, tl.sum(dh_sum, 0), mask=columns < C)
        if gated:
            tl.store(place + programs.to(tl.int64) * C, tl.sum(dgate_sum, 0), mask=columns < C)
    _keep_largest(state, p * tl.num_programs(0) + tl.program_id(0), largest)


@triton.jit
def _gradient_of_logits(logits, targets, row_max, factor, scale, logits_n, rows, columns, N, V, SOFTCAP: tl.constexpr):
    row_inside, inside = rows < N, (rows[:, None] < N) & (columns[None, :] < V)
    maxima = tl.load(row_max + rows, mask=row_inside, other=float("inf"))
    factors = tl.load(factor + rows, mask=row_inside, other=0.0)
    target = tl.load(targets + rows, mask=row_inside, other=-1)
    exact: tl.constexpr = logits.dtype.element_ty == tl.float32
    x = tl.load(logits + rows[:, None].to(tl.int64) * logits_n + columns[None, :], mask=inside, other=0.0)
    x = capped(x.to(tl.float32), SOFTCAP, exact)
    dl = tl.exp2(x * LOG2E - (maxima * LOG2E)[:, None]) * factors[:, None]
    dl = tl.where(columns[None, :] == target.to(tl.int32)[:, None], dl - scale, dl)
    if SOFTCAP != 0.0:
        dl *= slope(x, SOFTCAP, exact)
    return dl


@triton.jit
def _quantize_softmax_bwd_kernel(
    logits, targets, row_max, factor, inv_total, state, dl8, dl8t, logits_n, dl8t_c, N, V, PITCH,
    SOFTCAP: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dl8 = q(dl) and dl8t = q(dl)ᵀ, dl = exp(l − row_max) · factor, minus inv_total in the target's column."""
    bound = tl.load(state + FORMAT)
    inverse = tl.math.div_rn(1.0, tl.load(state))
    scale = tl.load(inv_total)
    across = tl.cdiv(V, BLOCK_C)
    for tile in range(tl.program_id(0), tl.cdiv(PITCH, BLOCK_N) * across, tl.num_programs(0)):
        fours = tile // across * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
        columns = tile % across * BLOCK_C + tl.arange(0, BLOCK_C)
        rows = fours * 4
        a = _gradient_of_logits(logits, targets, row_max, factor, scale, logits_n, rows, columns, N, V, SOFTCAP)
        b = _gradient_of_logits(logits, targets, row_max, factor, scale, logits_n, rows + 1, columns, N, V, SOFTCAP)
        c = _gradient_of_logits(logits, targets, row_max, factor, scale, logits_n, rows + 2, columns, N, V, SOFTCAP)
        d = _gradient_of_logits(logits, targets, row_max, factor, scale, logits_n, rows + 3, columns, N, V, SOFTCAP)
        a = _round_row(a, inverse, bound, dl8, dl8t, rows, columns, N, V, V, INTERPRETED)
        b = _round_row(b, inverse, bound, dl8, dl8t, rows + 1, columns, N, V, V, INTERPRETED)
        c = _round_row(c, inverse, bound, dl8, dl8t, rows + 2, columns, N, V, V, INTERPRETED)
        d = _round_row(d, inverse, bound, dl8, dl8t, rows + 3, columns, N, V, V, INTERPRETED)
        _store_columns(a, b, c, d, dl8t, dl8t_c, fours, columns, V, PITCH, INTERPRETED)


@triton.jit
def _scale_kernel(state, jumps, stride, PADDED: tl.constexpr):
    """s = largest magnitude / L, if this magnitude is finite and not 0; resets the magnitudes. One program for each state."""
    i = tl.arange(0, PADDED)
    state += tl.program_id(0).to(tl.int64) * stride
    largest = tl.max(tl.load(state + FIRST_PART + i, mask=i < PARTS, other=0.0), 0)
    bound = tl.load(state + FORMAT)
    if (largest > 0.0) & (largest < float("inf")):
        jumped = (tl.load(state + FOLLOWED) > 0.0) & (largest > JUMP * tl.load(state) * bound)
        tl.store(state + JUMPS, tl.load(state + JUMPS) + jumped.to(tl.float32))
        tl.atomic_add(jumps, 1.0, mask=jumped)
        tl.store(state, tl.math.div_rn(largest, bound))
        tl.store(state + FOLLOWED, 1.0)
    tl.store(state + FIRST_PART + i, tl.zeros([PADDED], tl.float32), mask=i < PARTS)


def quantize(x: Tensor, *, x8: Tensor | None, x8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    _quantize(x, "", *x.shape, x8=x8, x8t=x8t, state=state)


def activation(h: Tensor, kind: str, *, a8: Tensor | None, a8t: Tensor | None, state: Tensor, scratch: Scratch) -> None:
    n, c = h.shape
    _quantize(h, kind, n, c // 2 if kind == "swiglu" else c, x8=a8, x8t=a8t, state=state)


def _quantize(x: Tensor, kind: str, n: int, c: int, *, x8: Tensor | None, x8t: Tensor | None, state: Tensor) -> None:
    constants = {"KIND": kind, **_tile()}
    launch(_quantize_kernel, (states.PARTS,), x, state, x8, x8t, x.stride(0), *_sizes(n, c, x8t), **constants)


def _sizes(n: int, c: int, x8t: Tensor | None) -> tuple[int, int, int, int]:
    """The stride of x8t, N, C, and the rows of x that are written to x8t."""
    return (n, n, c, n) if x8t is None else (x8t.stride(0), n, c, x8t.shape[1])


def _tile() -> dict[str, int | bool]:
    return {"INTERPRETED": interpreting(), "BLOCK_N": BLOCK_N, "BLOCK_C": BLOCK_C, "num_warps": WARPS}


def _programs(c: int) -> int:
    """P, the programs of each tile of columns in an activation's backward. Each program has its own element of the state."""
    return max(1, states.PARTS // ceil_div(c, BLOCK_C))


def activation_workspace(da: TensorLike, summed: int) -> Shapes:
    """summed: how many column sums are computed, which is 1, or 2 for swiglu"""
    c = da.shape[1]
    return {"partials": ((summed, _programs(c), c), torch.float32)}


def activation_bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh8: Tensor | None, dh8t: Tensor | None, a: Tensor | None, sums: tuple[Tensor, ...], accumulate: bool, state: Tensor,
    scratch: Scratch,
) -> None:  # fmt: skip
    """sums: Σ dh, or nothing; swiglu: Σ dup and Σ dgate."""
    n, c = da.shape
    if c > (widest := states.PARTS * BLOCK_C):
        raise ValueError(
            f"da: got {c} columns; accepted: at most {widest}, with an element of the state for each program"
        )
    partials = scratch["partials"] if sums else None
    grid = (ceil_div(c, BLOCK_C), _programs(c))
    given = (da, h, state, dh8, dh8t, a, partials, *_sizes(n, c, dh8t))
    launch(_quantize_activation_bwd_kernel, grid, *given, KIND=kind, **_tile())
    if partials is not None:
        add_partials(partials, *sums, accumulate=accumulate)


def softmax_bwd(
    logits: Tensor, targets: Tensor, row_max: Tensor, factor: Tensor, inv_total: Tensor, softcap: float, *,
    dl8: Tensor, dl8t: Tensor, state: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    n, v = logits.shape
    given = (logits, targets, row_max, factor, inv_total, state, dl8, dl8t, logits.stride(0), *_sizes(n, v, dl8t))
    launch(_quantize_softmax_bwd_kernel, (states.PARTS,), *given, SOFTCAP=softcap, **_tile())


def scale_step(*, states: Sequence[Tensor], jumps: Tensor, scratch: Scratch) -> None:
    """Takes one launch if the addresses of the states are equally spaced, as in an arena."""
    jumps.zero_()
    addresses = [state.data_ptr() for state in states]
    spacings = {b - a for a, b in pairwise(addresses)}
    if len(spacings) == 1:
        launch(
            _scale_kernel, (len(states),), states[0], jumps, spacings.pop() // states[0].element_size(), PADDED=PADDED
        )
    else:
        for state in states:
            launch(_scale_kernel, (1,), state, jumps, 0, PADDED=PADDED)
