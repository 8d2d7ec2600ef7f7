"""The tile scheduler of Hopper's forward: which rows a persistent CTA computes next, and which columns they attend to.

A work tile is the rows of all warpgroups of a CTA, in one head. The producer warp schedules: before it loads a work tile it
publishes the tile's info to the MMA warpgroups, in INFO_STAGES stages. The stages of q keep the producer at most two tiles
ahead of the slowest warpgroup, so four info stages need no empty barrier. A warpgroup must release every block of k and v
before it waits for the next tile's info; otherwise producer and consumer deadlock.

**Dense** tiles are assigned round by round, in alternating order: a CTA with a long tile in one round gets a short one in the
next. Long causal calls take tiles from a counter instead, longest first. `heads_per_section` heads are scheduled together so
that their k and v stay in L2.
**Packed** sequences are divided into slots of one tile each. The slots of sequence b start at cu_seqlens_q[b] / (rows of a
tile) + b, so no prefix sum is needed. CTAs take slots from a counter and skip empty ones.

Row tiles are counted from the end of a sequence: the ragged tile is the first, which has the least work under a causal mask.

**Intervals** leave several runs of blocks of columns, which two small kernels have listed before (../triton/intervals.py). The
producer warp loads the blocks in a work tile's list, masked blocks first. With every stage of k comes one word: the index of
the block, and whether an edge of an interval crosses the block. Every warpgroup computes every block of the list.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton import scores
from .pipeline import read_word, write_word

ROWS = gl.constexpr(64)  # per warpgroup
MOST_RUNS = scores.MOST_RUNS
SEQUENCES = gl.constexpr(128)  # compared at a time when searching the sequence that owns a slot
INFO_STAGES = gl.constexpr(4)
LOW = gl.constexpr(2**32 - 1)
END = gl.constexpr(-(2**30))  # `start` in the info after the last tile

band_tiles = gluon.jit(scores.band_tiles.fn)
own_list = gluon.jit(scores.own_list.fn)


@gluon.constexpr_function
def takes_turns(warpgroups, width):
    """Whether the warpgroups issue their MMAs in turn."""
    return warpgroups > 1 and width <= 128


# Arguments that all work tiles share; None where the call lacks the feature.
#   tile_counter        None: tiles are assigned round by round
#   group               query heads per kv head
#   heads_per_section   heads scheduled together, an L2 section
#   scale_log2          |scale| · log2(e)
#   softcap_log2        c · log2(e)
#   intervals           column 0 of the first kv head; strides in elements
#   second              offset in elements from the first interval of a column to the second; None if a column has one interval
#   edges, runs         the edges of blocks (../triton/intervals.py), and the lists (scores.own_list); strides between
#                       sequences and kv heads, in blocks or lists
Params = namedtuple(
    "Params",
    "cu_seqlens_q cu_seqlens_k sinks sinks_h tile_counter batch heads group row_tiles heads_per_section "
    "tq tk left right scale_log2 softcap_log2 "
    "intervals second intervals_b intervals_h edges edges_b edges_h runs runs_b runs_h",
)

# Filled by the producer warp. A stage of q holds the rows of one warpgroup (stage = iteration % Q_STAGES · WARPGROUPS +
# warpgroup), a stage of k or v holds one block of columns. tile_info is a WorkTile of words in shared memory. With intervals,
# block_info has the word of each stage of k: 2 · (index of the block) + (1 if an edge of an interval crosses it).
Pipelines = namedtuple("Pipelines", "q k v tile_info info_full block_info")

# The rows from `start` on of head h of sequence b, and the blocks of columns first … last that they attend to. The sequence has
# tq rows from row start_q on and tk columns from start_k on. Tile info is all fields except start_k. With intervals,
# first … last are entries of a list, those before `masked` need a mask, and the intervals of the kv head begin at element low +
# 2³² · high.
WorkTile = namedtuple("WorkTile", "b h start start_q start_k tq tk first last masked low high")

# The list of a work tile: the runs of its unmasked and of its masked blocks (scores.Runs), and how many there are of each.
Blocks = namedtuple("Blocks", "before shift masked_before masked_shift unmasked masked")

# The blocks of columns of one warpgroup: it skips `before` blocks, then computes first … last, of which unmasked … unmasked_end
# need no mask. `diagonal` is the column on the diagonal of its row 0, tk the number of columns. With intervals, first … last
# are entries of a list, and those before `masked` need a mask.
Span = namedtuple("Span", "before first unmasked unmasked_end last diagonal tk masked")


@gluon.jit
def next_index(iteration, params):
    """The index of this CTA's next work tile."""
    if params.tile_counter is not None:
        return gl.atomic_add(params.tile_counter, 1, sem="relaxed")
    else:
        program = gl.program_id(0)
        programs = gl.num_programs(0)
        return iteration * programs + gl.where(iteration % 2 == 0, program, programs - 1 - program)


@gluon.jit
def work_tiles(params):
    """The number of work tiles of the call; packed sequences include empty ones."""
    tiles = params.row_tiles * params.heads
    if params.cu_seqlens_q is None:
        tiles = tiles * params.batch
    return tiles


@gluon.jit
def sequence_of(slot, params, TILE: gl.constexpr):
    """The last b with cu_seqlens_q[b] / TILE + b ≤ slot."""
    SPREAD: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    count = slot * 0
    for begin in range(0, params.batch, SEQUENCES):
        b = begin + gl.arange(0, SEQUENCES, layout=SPREAD)
        ends = gl.load(params.cu_seqlens_q + b, mask=b < params.batch, other=2**30)
        count += gl.sum((ends // TILE + b <= slot).to(gl.int32), 0)
    return count - 1


@gluon.jit
def work_tile(index, params, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    start_q = index * 0
    start_k = index * 0
    tq = params.tq
    tk = params.tk
    if params.cu_seqlens_q is not None:
        h = index % params.heads
        slot = index // params.heads
        b = sequence_of(slot, params, TILE)
        start_q = gl.load(params.cu_seqlens_q + b)
        start_k = gl.load(params.cu_seqlens_k + b)
        tq = gl.load(params.cu_seqlens_q + b + 1) - start_q
        tk = gl.load(params.cu_seqlens_k + b + 1) - start_k
        m = slot - (start_q // TILE + b)
    else:
        begin = index // (params.row_tiles * params.heads_per_section) * params.heads_per_section
        size = gl.minimum(params.heads_per_section, params.heads * params.batch - begin)
        in_section = index - begin * params.row_tiles
        m = in_section // size
        h = (begin + in_section % size) % params.heads
        b = (begin + in_section % size) // params.heads
    start = tq - (m + 1) * TILE
    first, _, _, last = band_tiles(gl.maximum(start, 0), start + TILE, tk - tq, params.left, params.right, tk, BLOCK_N)
    return WorkTile(b, h, start, start_q, start_k, tq, tk, first, gl.maximum(last, first + 1), first, first, first)


@gluon.jit
def blocks_of(tile, params, TILE: gl.constexpr):
    """The list of a work tile."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    m = params.row_tiles - (tile.tq - tile.start) // TILE
    runs = own_list(params.runs, params.runs_b, params.runs_h, tile.b, tile.h // params.group, m)
    r = gl.arange(0, MOST_RUNS, layout=SPREAD)
    return Blocks(
        gl.load(runs + r), gl.load(runs + MOST_RUNS + r),
        gl.load(runs + 2 * MOST_RUNS + r), gl.load(runs + 3 * MOST_RUNS + r),
        gl.load(runs + 4 * MOST_RUNS), gl.load(runs + 4 * MOST_RUNS + 1),
    )  # fmt: skip


@gluon.jit
def listed(tile, blocks, params):
    """The work tile with entries of its list instead of blocks. A tile that attends to nothing has block 0, masked."""
    kv_head = gl.cast(tile.h // params.group, gl.int64)
    begin = gl.cast(tile.b, gl.int64) * params.intervals_b + kv_head * params.intervals_h
    count = blocks.unmasked + blocks.masked
    masked = gl.where(count == 0, 1, blocks.masked)
    return WorkTile(
        tile.b, tile.h, tile.start, tile.start_q, tile.start_k, tile.tq, tile.tk, count * 0, gl.maximum(count, 1), masked,
        gl.cast(begin & LOW, gl.int32), gl.cast(begin >> 32, gl.int32),
    )  # fmt: skip


@gluon.jit
def nth_block(n, blocks):
    """The index of entry n of a list; masked blocks come first."""
    if n < blocks.masked:
        shift = gl.max(gl.where(blocks.masked_before <= n, blocks.masked_shift, 0), 0)
    else:
        n -= blocks.masked
        shift = gl.max(gl.where(blocks.before <= n, blocks.shift, 0), 0)
    return n + shift


@gluon.jit
def span_of(W: gl.constexpr, tile, params, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """The blocks of columns that warpgroup W computes; the last block if all rows of the warpgroup are before row 0."""
    start = tile.start + W * ROWS
    first, unmasked, unmasked_end, last = band_tiles(
        gl.maximum(start, 0), start + ROWS, tile.tk - tile.tq, params.left, params.right, tile.tk, BLOCK_N
    )
    if params.intervals is None:
        first = gl.minimum(first, tile.last - 1)
        last = gl.maximum(gl.minimum(last, tile.last), first + 1)
        if W * ROWS + ROWS < TILE:
            none = start + ROWS <= 0
            last = gl.where(none, tile.last, last)
            first = gl.where(none, tile.last - 1, first)
    else:
        first = start * 0
        last = tile.last
    return Span(tile.last - last, first, unmasked, unmasked_end, last, start + tile.tk - tile.tq, tile.tk, tile.masked)


@gluon.jit
def publish_tile(iteration, tile, start, pipelines):
    """Called by the producer: writes the info of the iteration's work tile."""
    stage = iteration % INFO_STAGES
    write_word(pipelines.tile_info.b, stage, tile.b)
    write_word(pipelines.tile_info.h, stage, tile.h)
    write_word(pipelines.tile_info.start, stage, start)
    write_word(pipelines.tile_info.start_q, stage, tile.start_q)
    write_word(pipelines.tile_info.tq, stage, tile.tq)
    write_word(pipelines.tile_info.tk, stage, tile.tk)
    write_word(pipelines.tile_info.first, stage, tile.first)
    write_word(pipelines.tile_info.last, stage, tile.last)
    if pipelines.tile_info.masked is not None:
        write_word(pipelines.tile_info.masked, stage, tile.masked)
        write_word(pipelines.tile_info.low, stage, tile.low)
        write_word(pipelines.tile_info.high, stage, tile.high)
    mbarrier.arrive(pipelines.info_full.index(stage), count=1)


@gluon.jit
def read_tile(iteration, pipelines, params):
    """Called by a consumer: reads the info of the iteration's work tile, which must have been published."""
    stage = iteration % INFO_STAGES
    info = pipelines.tile_info
    start_q = iteration * 0
    tq = params.tq
    tk = params.tk
    masked = iteration * 0
    low = iteration * 0
    high = iteration * 0
    if info.masked is not None:
        masked = read_word(info.masked, stage)
        low = read_word(info.low, stage)
        high = read_word(info.high, stage)
    if params.cu_seqlens_q is not None:
        start_q = read_word(info.start_q, stage)
        tq = read_word(info.tq, stage)
        tk = read_word(info.tk, stage)
    return WorkTile(
        read_word(info.b, stage), read_word(info.h, stage), read_word(info.start, stage),
        start_q, iteration * 0, tq, tk, read_word(info.first, stage), read_word(info.last, stage), masked, low, high,
    )  # fmt: skip


@gluon.jit
def next_span(W: gl.constexpr, iteration, pipelines, params, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Waits for the iteration's work tile. Returns this warpgroup's blocks of columns and whether there is a tile."""
    mbarrier.wait(pipelines.info_full.index(iteration % INFO_STAGES), iteration // INFO_STAGES & 1)
    tile = read_tile(iteration, pipelines, params)
    return span_of(W, tile, params, TILE, BLOCK_N), tile.start != END
