"""The MMAs of Hopper's backward for head dimensions up to 128, by two consumer warpgroups; backward.py has the equations.

    (1) S = Q Kᵀ      (2) dP = dO Vᵀ      (3) dV += Pᵀ dO      (4) dK += dSᵀ Q      (5) dQ = dS K

Scores are computed transposed, sᵀ (columns, rows), so that pᵀ and dsᵀ stay in registers as the left operands of (3) and (4).
Only ds, for (5), is exchanged through shared memory. The two warpgroups synchronise there, once per row tile; otherwise the
exponentials of one warpgroup overlap the MMAs of the other. Head dimensions beyond 128 are in backward_wide.py.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_scheduler import (
    DK,
    DV,
    INFO_STAGES,
    INFO_WORDS,
    LAST,
    MASKED,
    PARTIAL,
    TILE_FIELDS,
    read_tile,
    row_of,
    stored_word,
    wait_for_tile,
)
from .backward_store_dq import send_dkdv, send_dq
from .gluon_names import barrier
from .pieces import add_dot, cut, dot_rows, load_first_piece, only_tile, stage_tile, wait_pieces, zeros
from .pipeline import (
    DO_EMPTY,
    DS_READY,
    INPUT_THREADS,
    MMA_THREADS,
    Q_EMPTY,
    consumer_release,
    consumer_wait,
    named_release,
    named_wait,
    read_word,
    stage_of,
    write_word,
)
from .registers import drop_between, keep_between, tanh

HALF = gl.constexpr(64)  # columns of a warpgroup
NOWHERE = gl.constexpr(2**30)  # a column that no row attends to

# Factors of scores. softcap_log2 is None without a softcap; `divided`: neg_lse2 has been divided by scale_log2.
Factors = namedtuple("Factors", "scale scale_log2 softcap_log2 scale_over_softcap divided")

# Split-K: float32 sums of dk and dv of split work tiles, and how many CTAs have added to each.
SplitSums = namedtuple("SplitSums", "dkdv arrivals")


@gluon.jit
def row_values(x, state, L: gl.constexpr):
    """neg_lse2 or delta of the row tile, in the layout of scores L."""
    return x.index(stage_of(state, x.shape[0])).load(gl.SliceLayout(0, L))


@gluon.jit
def read_row_info(inputs, state):
    return read_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]))


@gluon.jit
def _mask_out(x, row, first, iteration, params, tile_info, BLOCK_N: gl.constexpr):
    """x (columns, rows), −inf where a row doesn't attend to a column. The rows start at `row`, the columns at column `first` of
    the iteration's work tile."""
    tile = read_tile(tile_info, iteration, params)
    j = tile.n * BLOCK_N + first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    j = gl.where(j < tile.tk, j, NOWHERE)
    back = j - (row + tile.tk - tile.tq)  # the row of the tile whose diagonal is at column j
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
def _mask_out_intervals(x, row, first, iteration, params, tile_info, BLOCK_N: gl.constexpr):
    """x as in _mask_out, −inf where an interval of a column has the row."""
    tile = read_tile(tile_info, iteration, params)
    NUMBERS: gl.constexpr = 2 if params.second is None else 4  # numbers of a column
    j = tile.n * BLOCK_N + first + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout))
    head = gl.cast(tile.b, gl.int64) * params.intervals_b + gl.cast(tile.kv_head, gl.int64) * params.intervals_h
    ends = params.intervals + head + j * NUMBERS
    inside = j < tile.tk
    x = drop_between(x, gl.load(ends, mask=inside, other=0) - row, gl.load(ends + 1, mask=inside, other=0) - row)
    if params.second is not None:
        ends += params.second
        x = drop_between(x, gl.load(ends, mask=inside, other=0) - row, gl.load(ends + 1, mask=inside, other=0) - row)
    return x


@gluon.jit
def probabilities(
    x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N: gl.constexpr, FIRST: gl.constexpr
):
    """(p, t) of the scores x, whose first column is column FIRST of the work tile; t is the softcap's tanh."""
    t = x
    if factors.softcap_log2 is None:
        if factors.divided:
            neg_lse2 = neg_lse2 * factors.scale_log2
        x = x * factors.scale_log2 + neg_lse2[None, :]
    else:
        t = tanh(x * factors.scale_over_softcap, IEEE_FP32=False)
        x = t * factors.softcap_log2 + neg_lse2[None, :]
    if row_info & MASKED != 0:
        iteration += row_info >> 30  # adds 0, opaque to the compiler: otherwise tile info stays in registers
        x = _mask_out(x, row, FIRST, iteration, params, tile_info, BLOCK_N)
    if params.intervals is not None:  # noqa: SIM102 (constexpr)
        if row_info & PARTIAL != 0:
            iteration += row_info >> 30
            x = _mask_out_intervals(x, row, FIRST, iteration, params, tile_info, BLOCK_N)
    return gl.exp2(x), t


@gluon.jit
def _score_gradient(p, dp, t, delta, factors):
    """dsᵀ = pᵀ ∘ (dpᵀ + delta), times 1 − t² with a softcap."""
    ds = p * (dp + delta[None, :])
    if factors.softcap_log2 is not None:
        ds = ds * (1.0 - t * t)
    return ds


@gluon.jit
def _sums_of(
    x, COLUMN: gl.constexpr, which: gl.constexpr, HALF: gl.constexpr, index, sums, BLOCK_N: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Pointers to the split-K sums of a piece of dk or dv whose first column is COLUMN."""
    ROWS: gl.constexpr = x.shape[0]
    j = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    c = COLUMN + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))[None, :]
    return sums.dkdv + (2 * index + which) * (BLOCK_N * D) + j * D + c


@gluon.jit
def splitk_reduce(
    x, which: gl.constexpr, HALF: gl.constexpr, iteration, params, tile_info, sums, BLOCK_N: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Adds dk or dv of a split work tile (or of half of its columns) to the sums. The last CTA returns the sum and marks it for
    the dQ store warp to store."""
    index = read_word(tile_info.stages, stage_of(iteration, INFO_STAGES) * INFO_WORDS + TILE_FIELDS - 1)
    pointers = [_sums_of(x[0], 0, which, HALF, index, sums, BLOCK_N, D)]
    if len(x) == 2:
        pointers = [pointers[0], _sums_of(x[1], x[0].shape[1], which, HALF, index, sums, BLOCK_N, D)]
    for i in gl.static_range(len(x)):
        gl.atomic_add(pointers[i], x[i], sem="relaxed")
    barrier()
    last = gl.atomic_add(sums.arrivals + 4 * index + 2 * which + HALF, 1, sem="acq_rel") == params.splits - 1
    barrier()
    if last:
        x = [gl.load(pointer, cache_modifier=".cg") for pointer in pointers]
    write_word(tile_info.stages, stored_word(iteration, which, HALF), gl.where(last, 1, 0))
    return x


@gluon.jit
def _own_columns(W: gl.constexpr, tile):
    """The columns of warpgroup W in a tile of k or v."""
    return [x.slice(W * HALF, HALF, 0) for x in tile]


@gluon.jit
def _add_rows(
    W: gl.constexpr, dk, dv, state, iteration, row_info, q, k, v, do, v_in_regs, ds_s, params, inputs, dq_pipeline,
    tile_info, factors,
):  # fmt: skip
    """One row tile: returns dk and dv of warpgroup W, and sends its part of dq. With BLOCK_M 64 the part is all rows of one of
    two pieces of D, or of half of D; with BLOCK_M 128 it is 64 rows of all of D."""
    PIECES: gl.constexpr = len(k)
    BLOCK_N: gl.constexpr = k[0].shape[0]
    BLOCK_M: gl.constexpr = q[0].shape[0]
    dtype: gl.constexpr = k[0].dtype
    DQ_COLUMNS: gl.constexpr = k[W].shape[1] if PIECES == 2 else k[0].shape[1] * BLOCK_M // 128
    ST_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    zero = gl.zeros((HALF, BLOCK_M), gl.float32, layout=ST_L)
    # (1) Sᵀ = K Qᵀ
    s_token = dot_rows(_own_columns(W, k), q, zero)
    # (2) dPᵀ = V dOᵀ
    consumer_wait(inputs.do, state)
    dp_token = dot_rows(_own_columns(W, v), do, zero, v_in_regs)
    DP_MMAS: gl.constexpr = PIECES if v_in_regs is None else len(cut(do, v_in_regs.shape[1]))
    neg_lse2 = row_values(inputs.neg_lse2, state, ST_L)
    x = warpgroup_mma_wait(DP_MMAS, deps=(s_token,))
    row = row_of(row_info, params, BLOCK_M)
    p, t = probabilities(x, neg_lse2, row_info, row, iteration, params, tile_info, factors, BLOCK_N, W * HALF)
    p16 = p.to(dtype)
    delta = row_values(inputs.delta, state, ST_L)
    ds16 = _score_gradient(p, warpgroup_mma_wait(0, deps=(dp_token,)), t, delta, factors).to(dtype)
    ds_s.slice(W * HALF, HALF, 0).store(ds16)
    # (3) dV += Pᵀ dO
    dv_token = add_dot(p16, do, dv)

    fence_async_shared()
    named_wait(DS_READY, MMA_THREADS)
    # (5) dQ = dS K
    zero_dq = gl.zeros((64, DQ_COLUMNS), gl.float32, layout=DQ_L)
    if BLOCK_M == 64:
        k_part = k[W] if PIECES == 2 else k[0].slice(W * DQ_COLUMNS, DQ_COLUMNS, 1)
        dq_token = warpgroup_mma(ds_s.permute((1, 0)), k_part, zero_dq, use_acc=False, is_async=True)
    else:
        ds_part = ds_s.slice(W * 64, 64, 1)
        dq_token = warpgroup_mma(ds_part.permute((1, 0)), k[0], zero_dq, use_acc=False, is_async=True)
    # (4) dK += dSᵀ Q
    dk_token = add_dot(ds16, q, dk)
    dv = wait_pieces(1 + PIECES, dv_token)
    named_release(inputs.do, state, DO_EMPTY, INPUT_THREADS)
    dq = warpgroup_mma_wait(PIECES, deps=(dq_token,))
    send_dq(W, dq, state + iteration * 2, dq_pipeline)
    dk = wait_pieces(0, dk_token)
    named_release(inputs.q, state, Q_EMPTY, INPUT_THREADS)
    return dk, dv


@gluon.jit
def mma_warpgroup(
    W: gl.constexpr, sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D: gl.constexpr,
    V_IN_REGS: gl.constexpr,
):  # fmt: skip
    """MMA warpgroup W of two: columns 64 W … of sᵀ, dpᵀ, dk and dv, and half of dq.

    dsᵀ is double-buffered, so there is no wait before its store: both warpgroups passed barrier DS_READY in iteration i − 1,
    which implies that dq of i − 2 (same stage) is done."""
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
        v_in_regs = None
        if V_IN_REGS > 0:
            v_in_regs = load_first_piece(_own_columns(W, only_tile(inputs.v, state)), V_IN_REGS, ST_L)
        more = tile.begin < tile.end
        while more:
            k = only_tile(inputs.k, state)
            v = only_tile(inputs.v, state)
            consumer_wait(inputs.q, state)
            q = stage_tile(inputs.q, state)
            row_info = read_row_info(inputs, state)
            do = stage_tile(inputs.do, state)
            ds_s = ds_stages.index(stage_of(state, ds_stages.shape[0]))
            dk, dv = _add_rows(
                W, dk, dv, state, iteration, row_info, q, k, v, do, v_in_regs, ds_s, params, inputs, dq_pipeline,
                tile_info, factors,
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
