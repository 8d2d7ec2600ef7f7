"""What an engine does with its ranks: data parallel, and with shard="optimizer" each rank owns 1/world of the moments.

    micro-batches    g of a step goes to rank g mod world, which drops by the seed of g: N ranks are one with all of them
    targets          counted over all ranks, so that gradients are summed, never averaged, and unequal ranks are exact
    bucket final  →  reduce-scatter (none: all-reduce) in place, behind the rest of the last micro-batch's backward
    one all-reduce   of ‖own slices of the gradients‖², the loss, and whether a rank was asked to stop
    own slices       clip and AdamW
    slices        →  all-gather in place, behind the next forward: an op waits for the buckets that it reads

Collectives run on slices of the arenas and take no memory. All ranks launch them in one order, that of one schedule, also a
rank without a micro-batch: another order is a hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from ..dist.mesh import Mesh
from ..dist.schedule import Bucket, Touch, Work, cut, final, follow, needed, order, touches
from ..dist.units import Units, gathered
from ..kernels.op import emitter, observe, observe_names
from ..memory.planned.trace import FlatHandle, Handle
from ..model.transformer import Transformer
from .optimizer import Optimizer, decayed_first

Shard = Literal["none", "optimizer", "all"]
BUCKET_BYTES = 64 << 20
Run = tuple[Tensor, int, int]  # of a flattened tensor: the run, its offset, the tensor's length


def check_ranks(gradient_accumulation: int, world: int, shard: str) -> None:
    """Of a run, before any memory is taken."""
    check_shard(shard, world, "plain")
    if gradient_accumulation < world:
        raise ValueError(
            f"gradient_accumulation: got {gradient_accumulation}; accepted: at least {world}, a micro-batch for each rank"
        )


def check_shard(shard: str, world: int, linear: str) -> None:
    if shard not in get_args(Shard):
        raise ValueError(f"shard: got {shard!r}; accepted: {', '.join(map(repr, get_args(Shard)))}")
    if world > 1 and linear != "plain":
        raise ValueError(f"linear: got {linear!r} with {world} ranks, whose scales would differ; accepted: 'plain'")


def schedule_of(model: Transformer, program: Callable[[], object] | None = None) -> tuple[Touch, ...]:
    """Of a program of the model's, by default its step, on handles."""
    values = {cast(Handle, p.value).name: p.name for p in model.params.values()}
    grads = {cast(Handle, p.grad).name: p.name for p in model.params.values()}
    return touches(program or model.step, observe, values, grads)


def buckets_of(model: Transformer, steps: Sequence[Touch], world: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    return cut([cast(Handle, p.master) for p in decayed_first(model.params.values())], steps, world, bucket_bytes)


def shards_of(
    model: Transformer, world: int, shard: Shard, bucket_bytes: int
) -> tuple[tuple[Bucket, ...], Units | None]:
    """The buckets that the optimizer is sharded over, none where it is whole on each rank; the units where all is sharded."""
    if world == 1 or shard == "none":
        return (), None
    if shard == "all":
        return (), Units.declare(list(model.params.values()), world)
    return buckets_of(model, schedule_of(model), world, bucket_bytes), None


def in_units(units: Units | None, model: Transformer, program: Callable[[], None]) -> Callable[[], None]:
    """The program on handles, with the collectives of its units."""
    if units is None:
        return program
    steps = schedule_of(model, program)

    def run() -> None:
        with units.around(steps, None, first=False, emit=emitter(), observe=observe, observe_names=observe_names):
            program()

    return run


class Parallel:
    """The ranks of an engine, several of them. `bind` turns handles into tensors."""

    def __init__(
        self, mesh: Mesh, optimizer: Optimizer, buckets: tuple[Bucket, ...], steps: Mapping[bool, tuple[Touch, ...]],
        bind: Callable[[Any], Any], *, sharded: bool, units: Units | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.buckets, self.sharded, self.steps, self.units = mesh, buckets, sharded, steps, units
        self.stop = False  # asked of this rank; after a step, of any
        self.step = 0
        self.summed = False  # the gradients are those of all ranks
        self._sums: list[Any] = []
        self._gathers: dict[int, Any] = {}
        self.order: tuple[int, ...] = ()
        if units is not None:
            self.buckets, self.starts = tuple(units.buckets.values()), units.starts
            return
        self.order = order(buckets, steps[False])
        self.needed = [needed(bucket, steps[False]) for bucket in buckets]
        values = cast(FlatHandle, optimizer.params if optimizer.rounded is None else optimizer.rounded)
        grads = cast(FlatHandle, optimizer.grads)
        self.starts = {h.name.removeprefix("d "): start for h, start in zip(grads.buffers, grads.starts, strict=True)}
        self.values: list[Tensor] = [bind(values.part(b.start, b.stop)) for b in buckets]
        self.grads: list[Tensor] = [bind(grads.part(b.start, b.stop)) for b in buckets]

    # ── gradients ──

    def count(self, targets: int, micro_batches: int) -> tuple[int, int]:
        """Both over all ranks. The gradients are about to change."""
        self.forget_sums()
        self.mesh.at(f"step {self.step}: counting targets")
        total, taken = self.mesh.sum(targets, micro_batches)
        return int(total), int(taken)

    def rounds(self, micro_batches: int) -> int:
        """Of units, which every micro-batch gathers, the most micro-batches that a rank has: all run as many."""
        return max(self.mesh.gather(micro_batches)) if self.units is not None else micro_batches

    @contextmanager
    def around_units(self, steps: tuple[Touch, ...], *, accumulate: bool) -> Iterator[None]:
        """Inside runs a program of these steps; what units it needs come and go."""
        assert self.units is not None
        self.mesh.at(f"step {self.step}: forward and backward")
        with self.units.around(
            steps, self.mesh, first=not accumulate, emit=emitter(), observe=observe, observe_names=observe_names
        ):
            yield

    @contextmanager
    def around(self, *, accumulate: bool, last: bool) -> Iterator[None]:
        """Inside runs one micro-batch's step: an op waits for the parameters that it reads, and in the last micro-batch
        buckets are summed as they become final."""
        steps = self.steps[accumulate]
        before: dict[int, list[Work]] = {}
        after: dict[int, list[Work]] = {}
        for i in self._gathers:
            before.setdefault(needed(self.buckets[i], steps), []).append(partial(self._wait_for, i))
        at = 0
        for i in self.order if last else ():
            at = max(at, final(self.buckets[i], steps))  # never before the one that goes before it
            after.setdefault(at, []).append(partial(self._sum, i))
        self.mesh.at(f"step {self.step}: forward and backward")
        if not before and not after:
            yield
            return
        with follow(steps, before, after, observe_names):
            yield

    def sum_all(self) -> None:
        """Of a rank whose gradients are final, or that has none."""
        for i in self.order:
            self._sum(i)

    def _sum(self, i: int) -> None:
        self.summed = True
        self.mesh.at(f"step {self.step}: summing bucket {i} of {len(self.buckets)}")
        grads = self.grads[i]
        if self.sharded:
            own = grads.view(self.mesh.world, -1)[self.mesh.rank]
            self._sums.append(self.mesh.reduce_scatter(grads, out=own, wait=False))
        else:
            self._sums.append(self.mesh.all_reduce(grads, wait=False))

    def forget_sums(self) -> None:
        """The gradients are overwritten."""
        self._finish_sums()
        self.summed = False

    def _finish_sums(self) -> None:
        while self._sums:
            self.mesh.wait(self._sums.pop(0))

    # ── the update ──

    def update(self, optimizer: Optimizer, learning_rate: float) -> float:
        """Sum what is not summed yet, agree, update own slices, start their gathers. Returns the loss over all ranks."""
        if not self.summed:
            self.sum_all()
        self.forget_sums()
        optimizer.measure()
        agreed = cast(Tensor, optimizer.agreed)
        agreed[0].copy_(optimizer.norm).square_().mul_(self.sharded)
        agreed[1].copy_(optimizer.loss)
        agreed[2].fill_(self.stop)
        self.mesh.at(f"step {self.step}: agreeing on the norm")
        self.mesh.all_reduce(agreed)
        if self.sharded:
            optimizer.norm.copy_(agreed[0].sqrt_())
        optimizer.loss.copy_(agreed[1])
        _, loss, stop = agreed.tolist()
        self.stop = stop > 0
        optimizer.apply(learning_rate)
        self.step += 1
        if self.sharded and self.units is None:
            self.gather()
        return float(loss)

    def gather(self) -> None:
        """Start the gathers of all parameters, in the order in which a forward reads them."""
        self.mesh.at(f"step {self.step}: gathering parameters")
        for i in sorted(range(len(self.buckets)), key=self.needed.__getitem__):
            whole = self.values[i]
            part = whole.view(self.mesh.world, -1)[self.mesh.rank]
            self._gathers[i] = self.mesh.all_gather(part, out=whole, wait=False)

    def _wait_for(self, i: int) -> None:
        self.mesh.wait(self._gathers.pop(i))

    def settle(self) -> None:
        """Wait for the parameters that are under way."""
        for i in list(self._gathers):
            self._wait_for(i)

    # ── checkpoints ──

    def pieces(
        self, optimizer: Optimizer, sizes: Mapping[str, int], whole: Mapping[str, Tensor], *, shared: bool
    ) -> dict[str, Run]:
        """Name → (run, offset in the flattened tensor, its length) of parameters (`sizes`) and moments."""
        rank, world, found = self.mesh.rank, self.mesh.world, {}
        if not self.sharded:
            for name, x in whole.items():
                flat, n = x.view(-1), x.numel()
                low, high = (n * rank // world, n * (rank + 1) // world) if shared else (0, n)
                if low < high:
                    found[name] = flat[low:high], low, n
            return found
        for bucket, own in zip(self.buckets, optimizer.owned, strict=True):
            for name in bucket.names:
                low, high, at = self._overlap(bucket, name, sizes[name])
                if low < high:
                    for kind, x in (("", own.params), ("m.", own.m), ("v.", own.v)):
                        found[kind + name] = x[at : at + high - low], low, sizes[name]
        return found

    def _overlap(self, bucket: Bucket, name: str, size: int) -> tuple[int, int, int]:
        """[low, high) of a flattened parameter that this rank owns, and where it begins in the rank's slice."""
        first = self.starts[name]
        start, stop = bucket.part(self.mesh.rank, self.mesh.world)
        low, high = max(start, first), min(stop, first + size)
        return low - first, high - first, low - start

    def spread(self, optimizer: Optimizer) -> None:
        """Every rank's parameters from the slices that each owns."""
        if self.sharded:
            for own in optimizer.owned:
                if own.rounded is not None:
                    own.rounded.copy_(own.params)
            if self.units is None:
                self.gather()
                self.settle()

    def gathered(self) -> dict[str, Tensor]:
        """Every parameter of the units, flat, whole: called on all ranks."""
        assert self.units is not None
        return gathered(self.units, self.mesh)

    # ── the start ──

    def place(self, name: str, whole: Tensor, optimizer: Optimizer) -> None:
        """A parameter's value, in float32 or better: this rank keeps its part of the master where layers compute with a
        copy of it. The copy is written elsewhere, whole."""
        if self.units is None and (optimizer.rounded is None or not self.sharded):
            return
        x = whole.reshape(-1)
        for bucket, own in zip(self.buckets, optimizer.owned, strict=True):
            low, high, at = self._overlap(bucket, name, x.numel())
            if name in bucket.names and low < high:
                own.params[at : at + high - low].copy_(x[low:high])
                if self.units is not None and own.rounded is not None:
                    own.rounded[at : at + high - low].copy_(x[low:high])


def check_agreed(mesh: Mesh, fields: Mapping[str, str]) -> None:
    """Refuse ranks that differ in what must be the same on all: the first field that does is named, with its rank."""
    mesh.at("comparing the ranks")
    told = mesh.gather(dict(fields))
    for name in fields:
        for rank, theirs in enumerate(told):
            if theirs.get(name) != told[0][name]:
                raise ValueError(f"{name}: got {theirs.get(name)} on rank {rank}; accepted: rank 0's, {told[0][name]}")


def digest(tensors: Sequence[Tensor]) -> str:
    """sha256 of their bytes."""
    found = hashlib.sha256()
    for x in tensors:
        for part in x.detach().reshape(-1).view(torch.uint8).split(1 << 26):
            found.update(part.cpu().numpy().data)
    return found.hexdigest()[:16]
