"""The schedule of a program: which op reads which parameters, and which op completes which gradients. The schedule comes from a
run of the program on handles, and says when collectives may start.

    touches    the schedule: for each op, the parameters that it reads and those whose gradients it writes
    cut        splits the arena into buckets: adjacent parameters that one collective sums or gathers
    needed     the first op that reads parameters of a bucket: the bucket must be gathered before this op
    final      the last op that writes gradients of a bucket: the bucket may be summed after this op
    follow     runs the program on tensors, with collectives before and after its ops

An arena has parameters of two or more dimensions before vectors, each kind in the order of declaration. With Muon, the matrices
of the blocks come first. The backward completes gradients from the end of the arena to the beginning, so buckets are cut from
the end. A bucket has `world` equal slices, one for each rank.

    params    │ wte ░░░ │ blocks 0, 1 ░░ │ blocks 2, 3 ░░ │ biases, norms ░ │     ░: padding to world · align elements
    grads       the same layout                                                 each padding is a COMM handle, always zero

Muon updates whole matrices, so a slice must not cut a matrix. A bucket that Muon updates has the matrices of rank 0, then those
of rank 1, and so on. Each slice is padded to the length of the longest slice:

    params    │ up ░░ │ down ░ │ qkv, proj │     one bucket, with slices of three ranks
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from ...memory.planned.arena import alignment, flat
from ...memory.planned.trace import Call, Handle, Observe

Work = Callable[[], None]
ObserveNames = Callable[[Callable[[str, Work], None]], AbstractContextManager[None]]


class Touch(NamedTuple):
    """An op, the parameters that it reads, and the parameters whose gradients it writes."""

    op: str
    reads: frozenset[str]
    writes: frozenset[str]


class Bucket(NamedTuple):
    """Elements [start, stop) of the flat params and grads. A member is the name of a parameter, or the number of elements of a
    padding. In a `whole` bucket, every parameter is in the slice of one rank."""

    members: tuple[str | int, ...]
    start: int
    stop: int
    decayed: int  # number of elements with weight decay, which are at the beginning
    whole: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member for member in self.members if isinstance(member, str))

    def part(self, rank: int, world: int) -> tuple[int, int]:
        """[start, stop) of the elements that a rank owns."""
        n = (self.stop - self.start) // world
        return self.start + rank * n, self.start + (rank + 1) * n


def touches(
    program: Callable[[], object], observe: Observe, values: Mapping[str, str], grads: Mapping[str, str]
) -> tuple[Touch, ...]:
    """The schedule of a program, which runs on handles and computes nothing. `values` and `grads` map the names of handles to
    the names of parameters."""
    seen: list[Touch] = []

    def see(call: Call) -> None:
        reads = frozenset(values[h.name] for h in call.reads if isinstance(h, Handle) and h.name in values)
        writes = frozenset(grads[h.name] for h in call.writes if isinstance(h, Handle) and h.name in grads)
        seen.append(Touch(call.name, reads, writes))

    with observe(see):
        program()
    return tuple(seen)


def needed(bucket: Bucket, schedule: Sequence[Touch]) -> int:
    """The index of the first op that reads a parameter of the bucket."""
    return next(i for i, touch in enumerate(schedule) if touch.reads & set(bucket.names))


def final(bucket: Bucket, schedule: Sequence[Touch]) -> int:
    """The index of the op after which all gradients of the bucket are complete."""
    return max(i for i, touch in enumerate(schedule) if touch.writes & set(bucket.names))


def order(buckets: Sequence[Bucket], schedule: Sequence[Touch]) -> tuple[int, ...]:
    """Indices of buckets in the order in which every rank must sum them. Two ranks with different orders would wait for each
    other forever."""
    return tuple(sorted(range(len(buckets)), key=lambda i: (final(buckets[i], schedule), -i)))


def cut(
    params: Sequence[Handle],
    schedule: Sequence[Touch],
    world: int,
    bucket_bytes: int,
    whole: Container[str] = (),
) -> tuple[Bucket, ...]:
    """Buckets of about `bucket_bytes`, in the order of the arena, with sizes divisible by `world`. `params` are handles in the
    order of the arena. Three kinds of parameters have buckets of their own:

    vectors       because they have no weight decay
    embeddings    because the last ops of the backward complete their gradients, and no other gradient should wait for them
    `whole`       because each of these parameters belongs to one rank. Such a bucket grows until at most an eighth of the
                  bucket is padding, or no such parameters are left
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}; accepted: at least 1")
    last: set[str] = set()
    for touch in reversed(schedule):
        if touch.op != schedule[-1].op:
            break
        last |= touch.writes
    members: list[list[Handle]] = []
    kind: tuple[bool, bool, bool] | None = None
    nbytes = 0
    for p in reversed(params):
        before, kind = kind, (len(p.shape) < 2, p.name in last, p.name in whole)
        if kind != before or (nbytes >= bucket_bytes and not (p.name in whole and _uneven(members[-1], world))):
            members.append([])
            nbytes = 0
        members[-1].insert(0, p)
        nbytes += p.nbytes
    buckets, start, loads = [], 0, [0] * world
    for bucket_params in reversed(members):
        align, is_whole = align_of(bucket_params[0]), bucket_params[0].name in whole
        if is_whole and world > 1:
            slices, length = _assign(bucket_params, world, loads)
            names: list[str | int] = []
            for slice_params in slices:
                names += [p.name for p in slice_params]
                used = sum(map(_elements, slice_params))
                names += [length - used] if length > used else []
            buckets.append(Bucket(tuple(names), start, start + world * length, world * length, whole=True))
            start += world * length
            continue
        size = flat("bucket", bucket_params).shape[0]
        aligned = -(-size // align) * align
        ragged = align if aligned > size else 0  # an arena ends where its last buffer ends, so padding must end the bucket
        size_with_padding = -(-(aligned + ragged) // (world * align)) * world * align if world > 1 else size
        decayed = size_with_padding if len(bucket_params[0].shape) >= 2 else 0
        pad = (size_with_padding - aligned,) if size_with_padding > aligned else ()
        buckets.append(Bucket((*(p.name for p in bucket_params), *pad), start, start + size_with_padding, decayed, is_whole))
        start += max(size_with_padding, aligned)
    return tuple(buckets)


def _elements(p: Handle) -> int:
    """The number of elements of a parameter in the arena, with the alignment gap after it."""
    align = align_of(p)
    return -(-p.nbytes // p.dtype.itemsize // align) * align


def _assign(params: Sequence[Handle], world: int, loads: list[int]) -> tuple[list[list[Handle]], int]:
    """(parameters of each rank, length of a slice of the bucket). Parameters are assigned from the largest to the smallest, each
    to the slice with the fewest elements. The fullest slice goes to the rank that owns the fewest elements of earlier buckets
    (`loads`, updated in place). If a parameter needs an alignment gap, every slice ends with padding, because an arena ends
    where its last buffer ends."""
    slices: list[list[Handle]] = [[] for _ in range(world)]
    used = [0] * world
    for p in sorted(params, key=_elements, reverse=True):
        rank = used.index(min(used))
        slices[rank].append(p)
        used[rank] += _elements(p)
    ragged = any(_elements(p) * p.dtype.itemsize > p.nbytes for p in params)
    by_rank: list[list[Handle]] = [[] for _ in range(world)]
    fullest = sorted(range(world), key=lambda i: -used[i])
    for rank, i in zip(sorted(range(world), key=lambda rank: loads[rank]), fullest, strict=True):
        by_rank[rank] = slices[i]
        loads[rank] += used[i]
    return by_rank, max(used) + (align_of(params[0]) if ragged else 0)


def _uneven(params: Sequence[Handle], world: int) -> bool:
    """Whether more than an eighth of a bucket of whole parameters would be padding."""
    return 8 * sum(map(_elements, params)) < 7 * world * _assign(params, world, [0] * world)[1]


def align_of(p: Handle) -> int:
    """The alignment of offsets, in elements. On CUDA it is the same for a parameter and its bfloat16 copy."""
    return 128 if p.device.type == "cuda" else max(alignment(p.device) // p.dtype.itemsize, p.multiple)


@contextmanager
def follow(
    schedule: Sequence[Touch],
    before: Mapping[int, Sequence[Work]],
    after: Mapping[int, Sequence[Work]],
    observe_names: ObserveNames,
) -> Iterator[None]:
    """Run the program of `schedule` in this context. `before[i]` and `after[i]` run before and after op number i."""
    i, nothing = 0, ()

    def run(name: str, op: Work) -> None:
        nonlocal i
        if i >= len(schedule) or name != schedule[i].op:
            raise RuntimeError(f"op number {i} is {name!r}, which the schedule does not expect there")
        for work in before.get(i, nothing):
            work()
        op()
        for work in after.get(i, nothing):
            work()
        i += 1

    with observe_names(run):
        yield
    if i != len(schedule):
        raise RuntimeError(f"the program ended after {i} of {len(schedule)} scheduled ops; run the whole program")
