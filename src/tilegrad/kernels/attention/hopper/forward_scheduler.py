"""The tile scheduler of Hopper's forward: which rows a persistent CTA takes next, and which columns they attend to.

A work tile is the rows of all warpgroups of a CTA, of one head. The producer warp decides: before it loads a work tile it
publishes the tile's info for the MMA warpgroups, in a pipeline of INFO_STAGES. It is never more than two tiles ahead of the
slowest warpgroup (the stages of q), so none of four stages is overwritten that is still read. A warpgroup has to release every
block of columns before it waits for the next tile's info, else producer and consumer wait for each other.

**Dense** tiles go out in rounds, forth and back, so that a CTA with long tiles (causal, or full of rows) in one round has short
ones in the next; or from a counter, the longest first, each to the CTA that is done. `heads_per_section` heads are scheduled
together, chosen so that their k and v stay in L2.
**Packed** sequences are cut into slots of a tile each, sequence b from slot cu_seqlens_q[b] / rows + b on, which needs no sums
over lengths; CTAs take slots from a counter and skip those without rows.

Tiles of rows are counted from the end of a sequence: the ragged one is the first, and has the least to do under a causal edge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..triton import scores
from .pipeline import read_word, write_word

ROWS = gl.constexpr(64)  # of a warpgroup
SEQUENCES = gl.constexpr(128)  # looked at together for the one that owns a slot
INFO_STAGES = gl.constexpr(4)  # work tiles whose info is kept
END = gl.constexpr(-(2**30))  # `start` of the info after the last tile

K_BARRIER = gl.constexpr(5)  # the first of the named barriers (pipeline.py): of stages of k, then of v, then of turns

band_tiles = gluon.jit(scores.band_tiles.fn)


@gluon.constexpr_function
def v_barrier(k_stages):
    return K_BARRIER + k_stages


@gluon.constexpr_function
def turn_barrier(kv_stages):
    return K_BARRIER + kv_stages


@gluon.constexpr_function
def takes_turns(warpgroups, width):
    """Whether the warpgroups issue their MMAs in turn."""
    return warpgroups > 1 and width <= 128


@gluon.constexpr_function
def kv_threads(warpgroups):
    """Of a barrier of k or v: the warpgroups' and the producer warp's."""
    return 128 * warpgroups + 32


class Params(NamedTuple):
    """What all work tiles of a call share; None where the call has no such feature."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    sinks: Any
    sinks_h: Any
    tile_counter: Any  # None: tiles go out in rounds
    batch: Any
    heads: Any
    group: Any  # query heads per kv head
    row_tiles: Any
    heads_per_section: Any  # heads scheduled together, an L2 section
    tq: Any
    tk: Any
    left: Any
    right: Any
    scale_log2: Any  # |scale| · log2(e)
    softcap_log2: Any  # c · log2(e)


class Pipelines(NamedTuple):
    """From the producer warp: rows of one warpgroup in a stage of q, a block of columns in a stage of k or v, and tile info."""

    q: Any  # stage: iteration % Q_STAGES · WARPGROUPS + warpgroup
    k: Any
    v: Any
    tile_info: Any  # a WorkTile of words in shared memory
    info_full: Any


class WorkTile(NamedTuple):
    """Rows start … of head h of sequence b, which has tq rows from start_q on and tk columns from start_k on, and the blocks of
    columns first … last that they attend to. Tile info is all of it but start_k."""

    b: Any
    h: Any
    start: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any
    first: Any
    last: Any


class Span(NamedTuple):
    """Blocks of columns of one warpgroup: how many it skips at first; those it takes, first … last, of which unmasked …
    unmasked_end have no edge of the band; the column on its row 0's diagonal; columns in all."""

    before: Any
    first: Any
    unmasked: Any
    unmasked_end: Any
    last: Any
    diagonal: Any
    tk: Any


@gluon.jit
def next_index(iteration, params):
    """The work tile of this CTA's iteration."""
    if params.tile_counter is not None:
        return gl.atomic_add(params.tile_counter, 1, sem="relaxed")
    else:
        here = gl.program_id(0)
        programs = gl.num_programs(0)
        return iteration * programs + gl.where(iteration % 2 == 0, here, programs - 1 - here)


@gluon.jit
def work_tiles(params):
    """Work tiles of the whole call; of packed sequences the slots."""
    tiles = params.row_tiles * params.heads
    if params.cu_seqlens_q is None:
        tiles = tiles * params.batch
    return tiles


@gluon.jit
def sequence_of(slot, params, TILE: gl.constexpr):
    """The last b with cu_seqlens_q[b] / TILE + b ≤ slot."""
    SPREAD: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    found = slot * 0
    for begin in range(0, params.batch, SEQUENCES):
        b = begin + gl.arange(0, SEQUENCES, layout=SPREAD)
        ends = gl.load(params.cu_seqlens_q + b, mask=b < params.batch, other=2**30)
        found += gl.sum((ends // TILE + b <= slot).to(gl.int32), 0)
    return found - 1


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
        rest = index - begin * params.row_tiles
        m = rest // size
        h = (begin + rest % size) % params.heads
        b = (begin + rest % size) // params.heads
    start = tq - (m + 1) * TILE
    first, _, _, last = band_tiles(gl.maximum(start, 0), start + TILE, tk - tq, params.left, params.right, tk, BLOCK_N)
    return WorkTile(b, h, start, start_q, start_k, tq, tk, first, gl.maximum(last, first + 1))


@gluon.jit
def span_of(W: gl.constexpr, tile, params, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Blocks of columns that the rows of warpgroup W attend to, at least one; a warpgroup whose rows lie before row 0 takes
    just the last."""
    start = tile.start + W * ROWS
    first, unmasked, unmasked_end, last = band_tiles(
        gl.maximum(start, 0), start + ROWS, tile.tk - tile.tq, params.left, params.right, tile.tk, BLOCK_N
    )
    first = gl.minimum(first, tile.last - 1)
    last = gl.maximum(gl.minimum(last, tile.last), first + 1)
    if W * ROWS + ROWS < TILE:
        none = start + ROWS <= 0
        last = gl.where(none, tile.last, last)
        first = gl.where(none, tile.last - 1, first)
    return Span(tile.last - last, first, unmasked, unmasked_end, last, start + tile.tk - tile.tq, tile.tk)


@gluon.jit
def publish_tile(iteration, tile, start, pipelines):
    """The producer's: the info of an iteration's work tile."""
    stage = iteration % INFO_STAGES
    write_word(pipelines.tile_info.b, stage, tile.b)
    write_word(pipelines.tile_info.h, stage, tile.h)
    write_word(pipelines.tile_info.start, stage, start)
    write_word(pipelines.tile_info.start_q, stage, tile.start_q)
    write_word(pipelines.tile_info.tq, stage, tile.tq)
    write_word(pipelines.tile_info.tk, stage, tile.tk)
    write_word(pipelines.tile_info.first, stage, tile.first)
    write_word(pipelines.tile_info.last, stage, tile.last)
    mbarrier.arrive(pipelines.info_full.index(stage), count=1)


@gluon.jit
def read_tile(iteration, pipelines, params):
    """A consumer's: the info of an iteration's work tile, which must be there."""
    stage = iteration % INFO_STAGES
    info = pipelines.tile_info
    start_q = iteration * 0
    tq = params.tq
    tk = params.tk
    if params.cu_seqlens_q is not None:
        start_q = read_word(info.start_q, stage)
        tq = read_word(info.tq, stage)
        tk = read_word(info.tk, stage)
    return WorkTile(
        read_word(info.b, stage), read_word(info.h, stage), read_word(info.start, stage),
        start_q, iteration * 0, tq, tk, read_word(info.first, stage), read_word(info.last, stage),
    )  # fmt: skip


@gluon.jit
def next_span(W: gl.constexpr, iteration, pipelines, params, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """This warpgroup's blocks of columns in an iteration, and whether there is a work tile."""
    mbarrier.wait(pipelines.info_full.index(iteration % INFO_STAGES), iteration // INFO_STAGES & 1)
    tile = read_tile(iteration, pipelines, params)
    return span_of(W, tile, params, TILE, BLOCK_N), tile.start != END
