"""Producer/consumer pipelines through shared memory, and the named barriers of the forward and the backward.

A pipeline is a circular buffer of stages, each with two mbarriers:

    full     the producer has written the stage      consumers wait for it
    empty    every consumer has read the stage       the producer waits for it

The state of a pipeline is one integer, the number of stages that a warp has used: stage = state % STAGES,
phase = state // STAGES & 1. A separate stage and phase would take a second register. Each warp has its own state. All stages
start empty, so the first wait for `empty` of each stage returns at once.

    producer    producer_acquire(pipeline, state)    issue TMA loads into the stage, or store, fence and producer_commit
    consumer    consumer_wait(pipeline, state)       read, then consumer_release

**Named barriers** replace an mbarrier where warpgroups signal in their main loop. One thread arrives at an mbarrier, so the
partition must synchronise first. At a named barrier every thread arrives and continues. A named barrier has a number, a thread
count and no phase: no thread may arrive again before all have arrived once, and some thread must wait for every arrival.
Triton itself uses the named barriers 0 … 2 in these kernels.

    forward     5 …      one per stage of k, then of v     MMA warpgroups → producer warp    the stage is empty
                then     one per warpgroup                 warpgroup → next warpgroup        its turn to issue MMAs
    backward    5, 6     Q_EMPTY, one per stage            MMA warpgroups → producer warp    the stage of q is empty
                7, 8     DO_EMPTY, one per stage           MMA warpgroups → producer warp    the stage of do is empty
                9, 10    DQ_FULL, one per warpgroup        warpgroup → its dQ store warp     its stage of dq is full
                11       DS_READY                          MMA warpgroup ↔ MMA warpgroup     dsᵀ is stored; D > 128: one way
                12       P_READY, D > 128                  MMA warpgroup → MMA warpgroup     pᵀ is stored
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

K_EMPTY = gl.constexpr(5)
Q_EMPTY = gl.constexpr(5)
DO_EMPTY = gl.constexpr(7)
DQ_FULL = gl.constexpr(9)
DS_READY = gl.constexpr(11)
P_READY = gl.constexpr(12)

# Threads that a barrier of the backward counts.
MMA_THREADS = gl.constexpr(256)  # both MMA warpgroups
INPUT_THREADS = gl.constexpr(256 + 32)  # and the producer warp
DQ_THREADS = gl.constexpr(128 + 32)  # one MMA warpgroup and its dQ store warp


@gluon.constexpr_function
def kv_threads(warpgroups):
    """Threads that a barrier of k or v in the forward counts: the MMA warpgroups and the producer warp."""
    return 128 * warpgroups + 32


# `full` or `empty` is None if a named barrier replaces it. `stages` of tiles are a tuple of pieces (pieces.py).
Pipeline = namedtuple("Pipeline", "stages full empty")


@gluon.jit
def mbarriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers that complete after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def stage_of(state, STAGES: gl.constexpr):
    """state % STAGES for addresses; STAGES is a power of two. A signed remainder would be a division, and the addresses that
    follow from a division in a loop take registers."""
    gl.static_assert(STAGES & (STAGES - 1) == 0)
    return state & (STAGES - 1)


@gluon.jit
def only_stage(state):
    """0. A compiler that knew this would keep the address of each MMA of the stage in registers."""
    return state >> 30


@gluon.jit
def _wait(bars, state, FLIP: gl.constexpr):
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(state % STAGES), ((state // STAGES) & 1) ^ FLIP)


@gluon.jit
def _arrive(bars, state):
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.arrive(bars.index(state % STAGES), count=1)


@gluon.jit
def producer_acquire(pipeline, state):
    """Waits until the consumers have released the stage."""
    _wait(pipeline.empty, state, 1)


@gluon.jit
def producer_commit(pipeline, state):
    """Signals that the stage is full; TMA does so itself."""
    _arrive(pipeline.full, state)


@gluon.jit
def consumer_wait(pipeline, state):
    """Waits until the stage is full."""
    _wait(pipeline.full, state, 0)


@gluon.jit
def consumer_release(pipeline, state):
    """Returns the stage to the producer."""
    _arrive(pipeline.empty, state)


@gluon.constexpr_function
def _barrier_code(instruction, threads):
    return f"{instruction} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _named_barrier(INSTRUCTION: gl.constexpr, barrier, THREADS: gl.constexpr):
    CODE: gl.constexpr = _barrier_code(INSTRUCTION, THREADS)
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(barrier, THREADS: gl.constexpr):
    """Every thread of the partition arrives and continues."""
    _named_barrier("bar.arrive", barrier, THREADS)


@gluon.jit
def named_wait(barrier, THREADS: gl.constexpr):
    """Every thread of the partition arrives and waits for all THREADS."""
    _named_barrier("bar.sync", barrier, THREADS)


@gluon.jit
def named_acquire(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """producer_acquire if consumers release stage n at the named barrier BARRIER + n."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    if state >= STAGES:
        named_wait(BARRIER + state % STAGES, THREADS)


@gluon.jit
def named_release(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """consumer_release by every thread, at a named barrier."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    named_arrive(BARRIER + state % STAGES, THREADS)


@gluon.jit
def named_drain(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """The producer's epilogue: waits for the release of the stages that it doesn't refill."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    for last in gl.static_range(STAGES):
        named_acquire(pipeline, state + last, BARRIER, THREADS)


@gluon.jit
def write_word(words, i, value):
    """words[i] = value, in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(i).store(gl.full([1], value, gl.int32, layout=L))


@gluon.jit
def read_word(words, i):
    """words[i] as a scalar: the maximum of a one-element tensor."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(i).load(L), 0)
