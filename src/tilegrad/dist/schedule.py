"""When each parameter is read and when each gradient is final: read off a run of the step on handles.

    touches    op by op, which parameters are read and which gradients are written
    cut        the arena's parameters in buckets, runs of neighbours that are summed, and gathered, by one collective
    needed     the first op that reads a bucket's parameters: it waits for their gather
    final      the last op that writes a bucket's gradients: their sum may start
    follow     the same program on tensors, with work before and after its ops

An arena holds the parameters in the order of declaration, those of two and more dimensions first, and the backward finishes
it from the end to the front: so buckets are cut from the end. Of a rank's world equal slices of a bucket it owns one.

    params    │ wte ░░░ │ blocks 0, 1 ░░ │ blocks 2, 3 ░░ │ biases, norms ░ │     ░: a pad, to world · align elements
    grads       the same layout                                                 each a handle of type COMM, always zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from ..memory.planned.arena import alignment, flat
from ..memory.planned.trace import Handle, Observe

Work = Callable[[], None]
ObserveNames = Callable[[Callable[[str, Work], None]], AbstractContextManager[None]]


class Touch(NamedTuple):
    """One op: the parameters that it reads, and those whose gradients it writes."""

    op: str
    reads: frozenset[str]
    writes: frozenset[str]


class Bucket(NamedTuple):
    """Elements [start, stop) of the flat params and grads. The last `pad` of them belong to no parameter."""

    names: tuple[str, ...]
    start: int
    stop: int
    pad: int
    decayed: int  # leading elements that decay

    def part(self, rank: int, world: int) -> tuple[int, int]:
        """[start, stop) of the elements that a rank owns."""
        n = (self.stop - self.start) // world
        return self.start + rank * n, self.start + (rank + 1) * n


def touches(
    program: Callable[[], object], observe: Observe, values: Mapping[str, str], grads: Mapping[str, str]
) -> tuple[Touch, ...]:
    """Of a program on handles; nothing is computed. `values` and `grads`: names of handles → names of parameters."""
    seen: list[Touch] = []

    def see(call: Any) -> None:
        reads = frozenset(values[h.name] for h in call.reads if h.name in values)
        writes = frozenset(grads[h.name] for h in call.writes if h.name in grads)
        seen.append(Touch(call.name, reads, writes))

    with observe(see):
        program()
    return tuple(seen)


def needed(bucket: Bucket, steps: Sequence[Touch]) -> int:
    """The number of the first op that reads one of its parameters."""
    return next(i for i, step in enumerate(steps) if step.reads & set(bucket.names))


def final(bucket: Bucket, steps: Sequence[Touch]) -> int:
    """The number of the op after which all of its gradients are final."""
    return max(i for i, step in enumerate(steps) if step.writes & set(bucket.names))


def order(buckets: Sequence[Bucket], steps: Sequence[Touch]) -> tuple[int, ...]:
    """Numbers of buckets in the order in which every rank sums them, whatever it computes: another order is a hang."""
    return tuple(sorted(range(len(buckets)), key=lambda i: (final(buckets[i], steps), -i)))


def cut(params: Sequence[Handle], steps: Sequence[Touch], world: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of about `bucket_bytes`, front to back, of parameters (handles named by them, in the arena's order), that divide
    by `world`. Those of one dimension are apart, for they do not decay; what the backward's last op finishes (an embedding) is
    apart too, for nothing else shall wait for it."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}; accepted: at least 1")
    last: set[str] = set()
    for step in reversed(steps):
        if step.op != steps[-1].op:
            break
        last |= step.writes
    runs: list[list[Handle]] = []
    kind: tuple[bool, bool] | None = None
    held = 0
    for p in reversed(params):
        before, kind = kind, (len(p.shape) < 2, p.name in last)
        if kind != before or held >= bucket_bytes:
            runs.append([])
            held = 0
        runs[-1].insert(0, p)
        held += p.nbytes
    buckets, start = [], 0
    for run in reversed(runs):
        align = align_of(run[0])
        size = flat("bucket", run).shape[0]
        held = -(-size // align) * align
        ragged = align if held > size else 0  # an arena ends with its last buffer: let that be a pad
        whole = -(-(held + ragged) // (world * align)) * world * align if world > 1 else size
        decayed = whole if len(run[0].shape) >= 2 else 0
        buckets.append(Bucket(tuple(p.name for p in run), start, start + whole, max(whole - held, 0), decayed))
        start += max(whole, held)
    return tuple(buckets)


def align_of(p: Handle) -> int:
    """Elements of which every offset is a multiple: on CUDA the same for a parameter and its shorter copy."""
    return 128 if p.device.type == "cuda" else alignment(p.device) // p.dtype.itemsize


@contextmanager
def follow(
    steps: Sequence[Touch], before: Mapping[int, Sequence[Work]], after: Mapping[int, Sequence[Work]],
    observe_names: ObserveNames,
) -> Iterator[None]:  # fmt: skip
    """Inside, the program of these steps runs, with `before[i]` and `after[i]` around its op number i."""
    clock, nothing = 0, ()

    def run(name: str, op: Work) -> None:
        nonlocal clock
        if clock >= len(steps) or name != steps[clock].op:
            raise RuntimeError(f"op number {clock} is {name!r}: not the program of this schedule")
        for work in before.get(clock, nothing):
            work()
        op()
        for work in after.get(clock, nothing):
            work()
        clock += 1

    with observe_names(run):
        yield
    if clock != len(steps):
        raise RuntimeError(f"the program ended after {clock} of the schedule's {len(steps)} ops")
