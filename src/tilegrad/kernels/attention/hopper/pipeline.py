"""Pipelines through shared memory, from a producer warp to consumer warpgroups or back: the handshake of both directions.

A pipeline is a circular buffer of stages, each with two mbarriers:

    full     what the producer wrote is there         consumers wait for it
    empty    every consumer is done with the stage    the producer waits for it

The state of a pipeline is one integer, the number of stages gone through: stage = state % STAGES, phase = state // STAGES & 1.
Every warp counts it for itself. A wait for the phase before the first returns at once.

    producer    producer_acquire(pipeline, state)    TMA loads into the stage, or a store, a fence and producer_commit
    consumer    consumer_wait(pipeline, state)       reads, then consumer_release

**Named barriers** take the place of an mbarrier where warpgroups signal in their main loop. An mbarrier's arrival is one
thread's, so a barrier of its whole partition comes before it; at a named barrier every thread arrives and goes on. It has a
number, the threads that it counts, and no phase: nobody may arrive a second time before all have arrived once, and an arrival
for which nobody waits is an error. Barriers 0 … 2 are Triton's, which has more only for partitions of several warps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Pipeline(NamedTuple):
    """Stages with their two mbarriers; None where a named barrier takes its place. Stages of tiles are in pieces
    (pieces.py)."""

    stages: Any
    full: Any
    empty: Any


@gluon.jit
def mbarriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N of them, each for COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def stage_of(state, STAGES: gl.constexpr):
    """state % STAGES, a power of two, for addresses. Integers have a sign, so a remainder is a division, and addresses that the
    compiler derives from it in a loop take registers."""
    gl.static_assert(STAGES & (STAGES - 1) == 0)
    return state & (STAGES - 1)


@gluon.jit
def producer_acquire(pipeline, state):
    """Wait until the consumers have released the stage of a state."""
    STAGES: gl.constexpr = pipeline.empty.shape[0]
    mbarrier.wait(pipeline.empty.index(state % STAGES), ((state // STAGES) & 1) ^ 1)


@gluon.jit
def producer_commit(pipeline, state):
    """Tell that a stage is full; TMA tells it by itself."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    mbarrier.arrive(pipeline.full.index(state % STAGES), count=1)


@gluon.jit
def consumer_wait(pipeline, state):
    """Wait until the stage of a state is full."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    mbarrier.wait(pipeline.full.index(state % STAGES), (state // STAGES) & 1)


@gluon.jit
def consumer_release(pipeline, state):
    """Give a stage back to the producer."""
    STAGES: gl.constexpr = pipeline.empty.shape[0]
    mbarrier.arrive(pipeline.empty.index(state % STAGES), count=1)


@gluon.constexpr_function
def _barrier_code(instruction, threads):
    return f"{instruction} $1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_arrive(barrier, THREADS: gl.constexpr):
    """Every thread arrives and goes on."""
    CODE: gl.constexpr = _barrier_code("bar.arrive", THREADS)
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_wait(barrier, THREADS: gl.constexpr):
    """Every thread arrives and waits for all THREADS."""
    CODE: gl.constexpr = _barrier_code("bar.sync", THREADS)
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_acquire(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """producer_acquire where consumers release stage n at the named barrier BARRIER + n."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    if state >= STAGES:
        named_wait(BARRIER + state % STAGES, THREADS)


@gluon.jit
def named_release(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """consumer_release, by every thread."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    named_arrive(BARRIER + state % STAGES, THREADS)


@gluon.jit
def named_drain(pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """The producer's last: wait for releases of stages that it does not fill again."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    for last in gl.static_range(STAGES):
        named_acquire(pipeline, state + last, BARRIER, THREADS)


@gluon.jit
def only_stage(state):
    """0, but unknown to the compiler: else it keeps the address of each MMA of the stage in registers."""
    return state >> 30


@gluon.jit
def write_word(words, i, value):
    """words[i] = value, in shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.index(i).store(gl.full([1], value, gl.int32, layout=L))


@gluon.jit
def read_word(words, i):
    """words[i] as a scalar: the maximum of a tensor of one."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(words.index(i).load(L), 0)
