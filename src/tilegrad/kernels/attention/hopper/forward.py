"""Attention's forward on Hopper (sm_90a), in Gluon: persistent CTAs of one producer warp and one to three MMA warpgroups.

../triton/forward.py has the equations. A warpgroup owns 64 rows of a work tile and loops over the blocks of columns
from last to first, so that the blocks on the causal diagonal come first; with intervals, over a list of blocks, masked blocks
first. Only blocks with a masked-out pair are masked, and a warpgroup skips blocks that none of its rows attends to:

    s = q kᵀ of the first block        p = softmax step of s
    for each further block of columns:
      wait for the turn     issue s = q kᵀ        issue acc += p v of the previous block        pass the turn     wait for s
      p = softmax step of s        wait for acc        acc ∘= alpha
    acc += p v of the last block       o = acc / row_sum

**Pipelines** (pipeline.py) run from the producer warp (forward_load.py) to the warpgroups. A stage of q has the rows of one
warpgroup. A stage of k or v has one block of columns, and every thread of the warpgroups releases it at a named barrier. With
two stages of q, a warpgroup writes o to the stage of its q once it has read q, and TMA stores o from there. That stage is
released in the next work tile, after TMA has read o. With one stage of q (D 256), the stage is released after the last scores,
so that the next q is loaded while this work tile ends. o then has a separate stage and is stored in two halves of D.

**Turns.** Up to D 128 the warpgroups issue their MMAs in turn (one named barrier each), so that the softmax of a warpgroup
overlaps the MMAs of the other warpgroups: FlashAttention-3's ping-pong. A warpgroup that skips a block passes its turn.

**Head dimensions** 96 and 192 are two pieces of columns (pieces.py): q, k, v, o and acc are tuples of one piece or two.

**q in registers.** In full attention without a softcap, warpgroups keep q in registers at D 96, 128 and 192, if ptxas leaves
enough: a block then reads a third less shared memory. Under a causal mask this is 1 % slower. At D 256 shared memory bandwidth
is the limit, and a quarter of q in registers is 2 to 3 % faster; half of q is slower. Windows and packed sequences leave no
registers for q at D 256. The host decides (launch_forward.q_columns_in_registers).

**Masking.** If the host knows that an edge crosses only a warpgroup's first block, the loop has no mask and no branch, and
ptxas keeps the exponentials before the wait for acc. The first tile of a sequence may start before row 0. Rows before row 0 are
zeros or belong to the previous sequence, so they are not written: this tile uses predicated stores for o, because TMA can't
clip at the start of a sequence. Columns after the last are masked; in packed sequences they belong to the next sequence, and
their v is set to 0.
"""

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from .forward_load import load
from .forward_scheduler import (
    INFO_STAGES,
    LOW,
    ROWS,
    Params,
    Pipelines,
    WorkTile,
    next_span,
    read_tile,
    takes_turns,
)
from .gluon_names import tma_store
from .pieces import (
    add_dot,
    dot_rows,
    load_first_piece,
    load_pieces,
    new_stages,
    pieces_of,
    scale_rows,
    store_pieces,
    store_tile,
    tile_of,
    wait_pieces,
    zeros,
)
from .pipeline import (
    K_EMPTY,
    Pipeline,
    consumer_wait,
    kv_threads,
    mbarriers,
    named_arrive,
    named_release,
    named_wait,
    read_word,
)
from .registers import from_log2, keep_between, max_of_rows, sum_of_rows, tanh_of_block, to_log2

LOWEST = gl.constexpr(-1e38)
HIGH_BITS = gl.constexpr(0x80808080 - 2**32)  # the high bit of each byte, as int32
START_BITS = gl.constexpr(0x00800080)  # the high bits of the bytes of starts

# `stages`: a buffer for a half of o per warpgroup; None: the stages of q are these buffers. `d_eighths`: D / 8 if D is padded.
Out = namedtuple("Out", "stages o_descs o lse o_b o_h o_t lse_b lse_h lse_t d_eighths")


@gluon.jit
def _scores(q, q_in_regs, kv_state, pipelines, S: gl.constexpr):
    """Issues q kᵀ with the k in the stage of kv_state."""
    STAGES: gl.constexpr = pipelines.k.full.shape[0]
    consumer_wait(pipelines.k, kv_state)
    k = tile_of(pipelines.k.stages, kv_state % STAGES)
    BLOCK_N: gl.constexpr = k[0].shape[0]
    return dot_rows(q, k, gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S), q_in_regs)


@gluon.jit
def _add_values(p, acc, kv_state, rows, pipelines, VARLEN: gl.constexpr):
    """Issues acc + p v with the v in the stage of kv_state. Rows of v from `rows` on belong to the next packed sequence. They
    are set to 0, because their p is 0, but 0 · NaN is NaN."""
    STAGES: gl.constexpr = pipelines.v.full.shape[0]
    consumer_wait(pipelines.v, kv_state)
    v = tile_of(pipelines.v.stages, kv_state % STAGES)
    if VARLEN and rows < v[0].shape[0]:
        for i in gl.static_range(len(v)):
            _clear_rows(v[i], rows)
        fence_async_shared()
    return add_dot(p, v, acc)


@gluon.jit
def _clear_rows(v, rows):
    """v[rows:] = 0. Every warpgroup does this, with the same result."""
    BLOCK_N: gl.constexpr = v.shape[0]
    BLOCK_D: gl.constexpr = v.shape[1]
    AT_ONCE: gl.constexpr = 2048 // BLOCK_D
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    j = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPY))[:, None]
    for start in gl.static_range(0, BLOCK_N, AT_ONCE):
        if rows < start + AT_ONCE:
            part = v.slice(start, AT_ONCE, dim=0)
            x = part.load(COPY)
            part.store(gl.where(j < rows - start, x, gl.zeros_like(x)))


@gluon.jit
def _mask_out(x, n, diagonal, tk, params, BLOCK_N: gl.constexpr):
    """x, and −inf where the band masks out a column of block `n`. `diagonal` is the column on the diagonal of row 0."""
    diagonal = diagonal + gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout))
    last = diagonal * 0 + (tk - 1)
    if params.right is not None:
        last = gl.minimum(last, diagonal + params.right)
    if params.left is not None:
        return keep_between(x, diagonal - params.left - n * BLOCK_N, last - n * BLOCK_N)
    else:
        return keep_between(x, None, last - n * BLOCK_N)


@gluon.jit
def _mask_out_intervals(x, n, start, tile, params, BLOCK_N: gl.constexpr):
    """x, and −inf where an interval of a column of block `n` has the row; row 0 of x is row `start`.

    The bytes of one word are the starts and ends of a column's intervals, counted from row `start` and limited to 0 … ROWS.
    If this word is subtracted from a word with 128 + i in each byte, the high bit remains in each byte whose start or end
    is ≤ i. So a thread needs one register for each of its columns."""
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    NUMBERS: gl.constexpr = 2 if params.second is None else 4  # numbers of a column
    j = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=COLUMNS)
    steps = (gl.cast(tile.high, gl.int64) << 32) + (gl.cast(tile.low, gl.int64) & LOW) + j * NUMBERS
    words = _two_bytes(params.intervals + steps, start, j < tile.tk)
    if params.second is not None:
        words += _two_bytes(params.intervals + steps + params.second, start, j < tile.tk) << 16
    words = gl.convert_layout(words, gl.SliceLayout(0, x.type.layout))
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, x.type.layout)) * 0x01010101 + HIGH_BITS
    reached = i[:, None] - words[None, :]
    inside = reached & ~(reached >> 8) & START_BITS
    return gl.where(inside == 0, x, float("-inf"))


@gluon.jit
def _two_bytes(interval, first, inside):
    """start + 2⁸ · end of an interval, counted from row `first` and limited to 0 … ROWS."""
    start = gl.load(interval, mask=inside, other=0) - first
    end = gl.load(interval + 1, mask=inside, other=0) - first
    return gl.minimum(gl.maximum(start, 0), ROWS) + (gl.minimum(gl.maximum(end, 0), ROWS) << 8)


@gluon.jit
def _softmax_step(
    s, row_max, row_sum, n, partial, iteration, span, pipelines, params, W: gl.constexpr, BLOCK_N: gl.constexpr,
    NEGATIVE: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """(p, row_max, row_sum, alpha) after the scores s of block `n` of columns; without EDGES no mask is applied. partial: an
    edge of an interval crosses the block."""
    x = s
    scale_log2 = params.scale_log2
    if params.softcap_log2 is not None:
        sign: gl.constexpr = -1.0 if NEGATIVE else 1.0
        x = x * (sign * params.scale_log2 / params.softcap_log2)
        # in windows, with intervals and with narrow blocks, a branch would spill more registers
        BRANCH: gl.constexpr = params.intervals is None and params.left is None and BLOCK_N >= 128
        x = params.softcap_log2 * tanh_of_block(x, BRANCH)
        scale_log2 = params.scale_log2 * 0.0 + 1.0
    elif NEGATIVE:
        x = -x
    if EDGES and params.intervals is None:  # noqa: SIM102 (constexpr)
        if (n < span.unmasked) | (n >= span.unmasked_end):
            x = _mask_out(x, n, span.diagonal, span.tk, params, BLOCK_N)
    if EDGES and params.intervals is not None:
        tile = read_tile(iteration, pipelines, params)
        start = tile.start + W * ROWS
        x = _mask_out(x, n, start + tile.tk - tile.tq, tile.tk, params, BLOCK_N)
        if partial:
            x = _mask_out_intervals(x, n, start, tile, params, BLOCK_N)
    new_max = gl.maximum(row_max, max_of_rows(x) * scale_log2)
    p = gl.exp2(x * scale_log2 - new_max[:, None])
    alpha = gl.exp2(row_max - new_max)
    return p, new_max, row_sum * alpha + sum_of_rows(p), alpha


@gluon.jit
def _start_rows(iteration, pipelines, params, S: gl.constexpr):
    """(row_max, row_sum) before the first column: (lowest, 0), or (sink, 1) with a sink."""
    row_max = gl.full((ROWS,), LOWEST, gl.float32, layout=gl.SliceLayout(1, S))
    row_sum = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, S))
    if params.sinks is not None:
        h = read_word(pipelines.tile_info.h, iteration % INFO_STAGES)
        sink = to_log2(gl.load(params.sinks + h * params.sinks_h).to(gl.float32), IEEE_FP32=False)
        row_max = gl.maximum(row_max, sink)
        row_sum = gl.exp2(sink - row_max)
    return row_max, row_sum


@gluon.jit
def _write(acc, row_max, row_sum, tile, start, stages, stage, out, VARLEN: gl.constexpr):
    nonzero = row_sum > 0.0
    row_sum = gl.where(nonzero, row_sum, 1.0)
    if out.lse is not None:
        rows = start + gl.arange(0, ROWS, layout=row_sum.type.layout)
        value = gl.where(nonzero, from_log2(row_max + gl.log2(row_sum), IEEE_FP32=False), float("-inf"))
        lse = out.lse + gl.cast(tile.b, gl.int64) * out.lse_b + gl.cast(tile.h, gl.int64) * out.lse_h
        gl.store(lse + (tile.start_q + rows).to(gl.int64) * out.lse_t, value, mask=rows >= 0)
    if out.o is not None:
        b = tile.b
        if VARLEN:
            b = tile.b * 0
        coordinates = (b, tile.h, tile.start_q + start)
        if out.stages is None:
            o = tile_of(stages, stage)
            store_pieces(scale_rows(acc, 1.0 / row_sum), o)
            fence_async_shared()
            if start < 0:
                for i in gl.static_range(len(o)):
                    _store_rows(o[i], tile, start, out, i * o[0].shape[1])
            else:
                store_tile(out.o_descs, coordinates, stages, stage)
        else:
            o = tile_of(out.stages, stage)[0]
            halves = acc[0].reshape([ROWS, 2, o.shape[1]]).permute((0, 2, 1)).split()
            for i in gl.static_range(2):
                tma.store_wait(0)
                store_pieces(scale_rows((halves[i],), 1.0 / row_sum), (o,))
                fence_async_shared()
                if start < 0:
                    _store_rows(o, tile, start, out, i * o.shape[1])
                else:
                    tma_store(out.o_descs[0], coordinates + (i * o.shape[1],), out.stages[0].index(stage))  # noqa: RUF005


@gluon.jit
def _store_rows(o, tile, start, out, COLUMN: gl.constexpr):
    """Stores the rows of o from row 0 on to columns from COLUMN on, 16 bytes per thread."""
    BLOCK_D: gl.constexpr = o.shape[1]
    AT_ONCE: gl.constexpr = 2048 // BLOCK_D
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    d = COLUMN + gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))[None, :]
    head = out.o + gl.multiple_of(gl.cast(tile.b, gl.int64) * out.o_b, 8)
    head += gl.multiple_of(gl.cast(tile.h, gl.int64) * out.o_h, 8)
    for n in gl.static_range(0, ROWS, AT_ONCE):
        i = start + n + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPY))[:, None]
        rows = gl.multiple_of((tile.start_q + i).to(gl.int64) * out.o_t, [8, 8])
        inside = i >= 0
        if out.d_eighths is not None:
            inside = inside & (d < out.d_eighths * 8)
        gl.store(head + rows + d, o.slice(n, AT_ONCE, dim=0).load(COPY), mask=inside)


@gluon.jit
def _wait_for_turn(W: gl.constexpr, pipelines, TURNS: gl.constexpr):
    if TURNS:
        named_wait(K_EMPTY + pipelines.k.full.shape[0] + pipelines.v.full.shape[0] + W, 256)


@gluon.jit
def _pass_turn(W: gl.constexpr, WARPGROUPS: gl.constexpr, pipelines, TURNS: gl.constexpr):
    """Passes the turn to the warpgroup after W."""
    if TURNS:
        named_arrive(K_EMPTY + pipelines.k.full.shape[0] + pipelines.v.full.shape[0] + (W + 1) % WARPGROUPS, 256)


@gluon.jit
def _skip_blocks(blocks, kv_state, pipelines, W: gl.constexpr, WARPGROUPS: gl.constexpr, TURNS: gl.constexpr):
    """Releases `blocks` blocks to which no row of this warpgroup attends, each in its turn. Returns the next state."""
    for _ in range(blocks):
        _wait_for_turn(W, pipelines, TURNS)
        _pass_turn(W, WARPGROUPS, pipelines, TURNS)
        consumer_wait(pipelines.k, kv_state)
        named_release(pipelines.k, kv_state, K_EMPTY, kv_threads(WARPGROUPS))
        consumer_wait(pipelines.v, kv_state)
        named_release(pipelines.v, kv_state, K_EMPTY + pipelines.k.full.shape[0], kv_threads(WARPGROUPS))
        kv_state += 1
    return kv_state


@gluon.jit
def _block_of(kv_state, pipelines):
    """(index of the block in the stage of kv_state, whether an edge of an interval crosses the block); only with intervals."""
    word = read_word(pipelines.block_info, kv_state % pipelines.k.full.shape[0])
    return word >> 1, word & 1 != 0


@gluon.jit
def _next_block(
    p, acc, row_max, row_sum, n, kv_state, iteration, span, q, q_in_regs, pipelines, params, W: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, NEGATIVE: gl.constexpr, VARLEN: gl.constexpr, EDGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """One iteration of the loop: (p, acc, row_max, row_sum) after block `n`, whose k is in state kv_state + 1."""
    dtype: gl.constexpr = pipelines.q.stages[0].dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    PIECES: gl.constexpr = len(pipelines.q.stages)
    THREADS: gl.constexpr = kv_threads(WARPGROUPS)
    V_EMPTY: gl.constexpr = K_EMPTY + pipelines.k.full.shape[0]
    _wait_for_turn(W, pipelines, TURNS)
    s = _scores(q, q_in_regs, kv_state + 1, pipelines, S)
    acc = _add_values(p, acc, kv_state, span.tk - (n + 1) * BLOCK_N, pipelines, VARLEN)
    _pass_turn(W, WARPGROUPS, pipelines, TURNS)
    s = warpgroup_mma_wait(PIECES, deps=(s,))
    partial = False
    if EDGES and params.intervals is not None:
        n, partial = _block_of(kv_state + 1, pipelines)
    named_release(pipelines.k, kv_state + 1, K_EMPTY, THREADS)
    p_next, row_max, row_sum, alpha = _softmax_step(
        s, row_max, row_sum, n, partial, iteration, span, pipelines, params, W, BLOCK_N, NEGATIVE, EDGES
    )
    acc = wait_pieces(0, acc)
    named_release(pipelines.v, kv_state, V_EMPTY, THREADS)
    acc = scale_rows(acc, alpha)
    return gl.convert_layout(p_next.to(dtype), P), acc, row_max, row_sum


@gluon.jit
def _attend(
    W: gl.constexpr, pipelines, params, out, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    Q_IN_REGS: gl.constexpr, NEGATIVE: gl.constexpr, VARLEN: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """MMA warpgroup W of a CTA."""
    dtype: gl.constexpr = pipelines.q.stages[0].dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    TILE: gl.constexpr = ROWS * WARPGROUPS
    Q_STAGES: gl.constexpr = pipelines.q.full.shape[0] // WARPGROUPS
    THREADS: gl.constexpr = kv_threads(WARPGROUPS)
    V_EMPTY: gl.constexpr = K_EMPTY + pipelines.k.full.shape[0]
    TURNS: gl.constexpr = takes_turns(WARPGROUPS, BLOCK_D)
    if W == WARPGROUPS - 1:
        _pass_turn(W, WARPGROUPS, pipelines, TURNS)
    iteration = gl.to_tensor(0)
    kv_state = gl.to_tensor(0)
    span, more = next_span(W, iteration, pipelines, params, TILE, BLOCK_N)
    while more:
        q_stage = iteration % Q_STAGES * WARPGROUPS + W
        q = tile_of(pipelines.q.stages, q_stage)
        row_max, row_sum = _start_rows(iteration, pipelines, params, S)
        acc = zeros(ROWS, pipelines.v.stages)

        kv_state = _skip_blocks(span.before, kv_state, pipelines, W, WARPGROUPS, TURNS)
        mbarrier.wait(pipelines.q.full.index(q_stage), iteration // Q_STAGES & 1)
        q_in_regs = None
        if Q_IN_REGS == BLOCK_D:
            q = load_pieces(q, P)
        elif Q_IN_REGS > 0:
            q_in_regs = load_first_piece(q, Q_IN_REGS, S)
        s = warpgroup_mma_wait(0, deps=(_scores(q, q_in_regs, kv_state, pipelines, S),))
        if params.intervals is not None:
            n, partial = _block_of(kv_state, pipelines)
        named_release(pipelines.k, kv_state, K_EMPTY, THREADS)
        if Q_STAGES > 1:
            tma.store_wait(0)
            mbarrier.arrive(
                pipelines.q.empty.index((iteration + 1) % Q_STAGES * WARPGROUPS + W), count=1, pred=iteration > 0
            )
        if params.intervals is None:
            n = span.last - 1
            partial = False
        p, row_max, row_sum, _ = _softmax_step(
            s, row_max, row_sum, n, partial, iteration, span, pipelines, params, W, BLOCK_N, NEGATIVE, EDGES=True
        )
        p = gl.convert_layout(p.to(dtype), P)
        masked = span.first + 1
        if params.intervals is not None:
            for _ in range(1, span.masked):
                p, acc, row_max, row_sum = _next_block(
                    p, acc, row_max, row_sum, n, kv_state, iteration, span, q, q_in_regs, pipelines, params, W,
                    WARPGROUPS, BLOCK_N, NEGATIVE, VARLEN, params.intervals is not None, TURNS,
                )  # fmt: skip
                kv_state += 1
            masked = gl.maximum(span.masked, 1)
        for j in range(masked - span.first, span.last - span.first):
            p, acc, row_max, row_sum = _next_block(
                p, acc, row_max, row_sum, span.last - 1 - j, kv_state, iteration, span, q, q_in_regs, pipelines, params, W,
                WARPGROUPS, BLOCK_N, NEGATIVE, VARLEN, EDGES, TURNS,
            )  # fmt: skip
            kv_state += 1
        if Q_STAGES == 1:
            mbarrier.arrive(pipelines.q.empty.index(q_stage), count=1)
        acc = _add_values(p, acc, kv_state, span.tk - span.first * BLOCK_N, pipelines, VARLEN)
        acc = wait_pieces(0, acc)
        named_release(pipelines.v, kv_state, V_EMPTY, THREADS)
        tile = read_tile(iteration, pipelines, params)
        kv_state = _skip_blocks(span.first - tile.first, kv_state + 1, pipelines, W, WARPGROUPS, TURNS)
        span, more = next_span(W, iteration + 1, pipelines, params, TILE, BLOCK_N)

        start = tile.start + W * ROWS
        _write(acc, row_max, row_sum, tile, start, pipelines.q.stages, q_stage, out, VARLEN)
        iteration += 1
    if W == 0:
        _wait_for_turn(W, pipelines, TURNS)
    tma.store_wait(0)


# Addresses are not specialized, except the address of o, which TMA requires to be aligned.
TENSORS = ["cu_seqlens_q", "cu_seqlens_k", "sinks", "intervals", "edges", "runs", "lse", "tile_counter"]
STRIDES = ["o_b", "o_h", "o_t", "lse_b", "lse_h", "lse_t", "sinks_h"]
SIZES = ["batch", "heads", "group", "row_tiles", "heads_per_section", "tq", "tk", "left", "right", "d_eighths"]
SIZES += ["intervals_b", "intervals_h", "edges_b", "edges_h", "runs_b", "runs_h"]


@gluon.jit(do_not_specialize=[*TENSORS, *STRIDES, *SIZES])
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, q_desc2, k_desc2, v_desc2, o_desc2, cu_seqlens_q, cu_seqlens_k, sinks,
    intervals, edges, runs,
    o, lse, tile_counter,
    o_b: tl.int64, o_h: tl.int64, o_t: tl.int64, lse_b: tl.int64, lse_h: tl.int64, lse_t: tl.int64, sinks_h: tl.int64,
    intervals_b, intervals_h, edges_b, edges_h, runs_b, runs_h,
    batch, heads, group, row_tiles, heads_per_section, tq, tk, left, right, d_eighths, scale_log2,
    softcap_log2,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, Q_STAGES: gl.constexpr, Q_IN_REGS: gl.constexpr,
    NEGATIVE: gl.constexpr, EDGES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    VARLEN: gl.constexpr = cu_seqlens_q is not None
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_info = WorkTile(
        b=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        h=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        start=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        start_q=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        start_k=None,
        tq=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        tk=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        first=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        last=gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        masked=None if intervals is None else gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        low=None if intervals is None else gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
        high=None if intervals is None else gl.allocate_shared_memory(gl.int32, [INFO_STAGES, 1], word),
    )
    info_full = mbarriers(INFO_STAGES, 1)
    q_descs = pieces_of(q_desc, q_desc2)
    k_descs = pieces_of(k_desc, k_desc2)
    v_descs = pieces_of(v_desc, v_desc2)
    q_stages = new_stages(q_descs, Q_STAGES * WARPGROUPS)
    k_stages = new_stages(k_descs, K_STAGES)
    v_stages = new_stages(v_descs, V_STAGES)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WARPGROUPS, 1], barrier)
    k_full = mbarriers(K_STAGES, 1)
    v_full = mbarriers(V_STAGES, 1)
    for stage in gl.static_range(Q_STAGES * WARPGROUPS):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=1)
    pipelines = Pipelines(
        Pipeline(q_stages, q_full, q_empty),
        Pipeline(k_stages, k_full, None),
        Pipeline(v_stages, v_full, None),
        tile_info,
        info_full,
        None if intervals is None else gl.allocate_shared_memory(gl.int32, [K_STAGES, 1], word),
    )
    second = None
    if PAIRS == 2:
        second = 2
    params = Params(
        cu_seqlens_q, cu_seqlens_k, sinks, sinks_h, tile_counter, batch, heads, group, row_tiles, heads_per_section,
        tq, tk, left, right, scale_log2, softcap_log2,
        intervals, second, intervals_b, intervals_h, edges, edges_b, edges_h, runs, runs_b, runs_h,
    )  # fmt: skip
    o_stages = None
    if Q_STAGES == 1 and o is not None:
        o_stages = new_stages((o_desc,), WARPGROUPS)
    o_descs = None if o is None else pieces_of(o_desc, o_desc2)
    out = Out(o_stages, o_descs, o, lse, o_b, o_h, o_t, lse_b, lse_h, lse_t, d_eighths)
    MORE: gl.constexpr = BLOCK_D > 128  # ptxas spills a little without more registers per thread
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_attend, (0, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (load, (q_descs, k_descs, v_descs, pipelines, params, WARPGROUPS, BLOCK_N, BLOCK_D, VARLEN)),
        ], [1], [40])  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend, (0, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (_attend, (1, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (load, (q_descs, k_descs, v_descs, pipelines, params, WARPGROUPS, BLOCK_N, BLOCK_D, VARLEN)),
        ], [4, 1], [240 if MORE else 232, 32 if MORE else 40])  # fmt: skip
    elif WARPGROUPS == 3:
        gl.warp_specialize([
            (_attend, (0, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (_attend, (1, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (_attend, (2, pipelines, params, out, WARPGROUPS, BLOCK_N, BLOCK_D, Q_IN_REGS, NEGATIVE, VARLEN, EDGES)),
            (load, (q_descs, k_descs, v_descs, pipelines, params, WARPGROUPS, BLOCK_N, BLOCK_D, VARLEN)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
