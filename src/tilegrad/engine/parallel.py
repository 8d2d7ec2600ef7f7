"""What an engine does with its ranks: data parallel, and with shard="optimizer" each rank owns 1/world of the moments.
Of one rank nothing is sent, and everything here is next to nothing.

    micro-batches    g of a step goes to rank g mod world, which drops by the seed of g: N ranks are one with all of them
    targets          counted over all ranks, so that gradients are summed, never averaged, and unequal ranks are exact
    bucket final  →  reduce-scatter (none: all-reduce) in place, behind the rest of the last micro-batch's backward
    one all-reduce   of ‖own slices of the gradients‖², the loss, and whether a rank was asked to stop
    own slices       clip and AdamW
    slices        →  all-gather in place, behind the next forward: an op waits for the buckets that it reads
    context=n        n neighbouring ranks share each micro-batch, of which g goes to group g mod (world / n): every rank is
                     given all of it and takes its rows (kernels/attention/context.py). Sums are over all ranks as ever

Collectives run on slices of the arenas and take no memory. All ranks launch them in one order, that of one schedule, also a
rank without a micro-batch: another order is a hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import __version__
from ..dist.mesh import Mesh, Neighbours
from ..dist.schedule import Bucket, Touch, Work, cut, final, follow, needed, order, touches
from ..dist.units import Units, gathered
from ..kernels.attention.context import positions_of
from ..kernels.cpu.library import library as native_library
from ..kernels.op import emitter, observe, observe_names
from ..memory.planned.trace import FlatHandle, Handle, bind
from ..model.config import ModelConfig
from ..model.transformer import Transformer
from ..native.build import digest as native_sources
from .batch import check_some
from .optimizer import Optimizer, decayed_first

Shard = Literal["none", "optimizer", "all"]
BUCKET_BYTES = 64 << 20
Run = tuple[Tensor, int, int]  # of a flattened tensor: the run, its offset, the tensor's length
Batch = tuple[Tensor, Tensor]  # tokens, targets
_EMPTY: Batch = (torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -1))  # of a rank that has none left


def check_ranks(config: ModelConfig, seq_len: int, linear: str, *, world: int, shard: str, context: int) -> None:
    """What these ranks cannot train, before any memory is taken."""
    if shard not in get_args(Shard):
        raise ValueError(f"shard: got {shard!r}; accepted: {', '.join(map(repr, get_args(Shard)))}")
    if world > 1 and linear != "plain":
        raise ValueError(f"linear: got {linear!r} with {world} ranks, whose scales would differ; accepted: 'plain'")
    if not isinstance(context, int) or isinstance(context, bool) or context < 1 or world % context:
        raise ValueError(f"context: got {context!r}; accepted: a divisor of {world}, the number of ranks")
    if context == 1:
        return
    if seq_len % (2 * context):
        raise ValueError(f"seq_len: got {seq_len} with context {context}; accepted: a multiple of {2 * context}")
    for name, accepted in (("dropout", 0.0), ("position", "rope"), ("projection", "dense")):
        got = getattr(config, name)
        if got != accepted:
            raise ValueError(f"{name}: got {got!r} with context {context}; accepted: {accepted!r}")


def check_accumulation(gradient_accumulation: int, world: int, context: int) -> None:
    if gradient_accumulation < world // context:
        each = "rank" if context == 1 else f"group of {context} ranks"
        raise ValueError(
            f"gradient_accumulation: got {gradient_accumulation}; accepted: at least {world // context}, a micro-batch for "
            f"each {each}"
        )


def schedule_of(model: Transformer, program: Callable[[], object] | None = None) -> tuple[Touch, ...]:
    """Of a program of the model's, by default its step, on handles."""
    values = {cast(Handle, p.value).name: p.name for p in model.params.values()}
    grads = {cast(Handle, p.grad).name: p.name for p in model.params.values()}
    return touches(program or model.step, observe, values, grads)


def buckets_of(model: Transformer, steps: Sequence[Touch], world: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    return cut([cast(Handle, p.master) for p in decayed_first(model.params.values())], steps, world, bucket_bytes)


def optimizer_of(
    model: Transformer, *, world: int, shard: Shard, bucket_bytes: int, rank: int = 0, **options: Any
) -> tuple[Optimizer, Units | None]:
    """The optimizer of one rank on handles, and the units where all is sharded. `options` are Optimizer.declare's."""
    params, units = list(model.params.values()), None
    buckets: tuple[Bucket, ...] = ()
    if world > 1 and shard == "all":
        units = Units.declare(params, world)
    elif world > 1 and shard == "optimizer":
        buckets = buckets_of(model, schedule_of(model), world, bucket_bytes)
    return Optimizer.declare(params, rank=rank, world=world, buckets=buckets, units=units, **options), units


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
    """The ranks of an engine, and its optimizer. What is given is on handles, which `view` turns into tensors; the model is
    `declare(training=…, accumulate=…)`. `context`: those with whom this one shares its sequences."""

    def __init__(
        self, mesh: Mesh, declare: Callable[..., Transformer], optimizer: Optimizer, units: Units | None,
        view: Callable[[Handle], Any], context: Neighbours | None, *, shard: Shard, bucket_bytes: int,
    ) -> None:  # fmt: skip
        self.mesh, self.shard, self.context = mesh, shard, context
        self.group, self.groups = (x // (1 if context is None else context.world) for x in (mesh.rank, mesh.world))
        self.sharded = mesh.world > 1 and shard != "none"
        self.optimizer, self.units = bind(optimizer, view), bind(units, view)
        self.stop = False  # asked of this rank; after a step, of any
        self.step = 0
        self.summed = False  # the gradients are those of all ranks
        self.buckets: tuple[Bucket, ...] = ()
        self.order: tuple[int, ...] = ()
        self._declare, self._view = declare, view
        self._schedules: dict[tuple[str, bool, bool], tuple[Touch, ...]] = {}
        self._sums: list[Any] = []
        self._gathers: dict[int, Any] = {}
        if units is not None:
            self.buckets, self.starts = tuple(units.buckets.values()), units.starts
        elif mesh.world > 1:
            steps = self._schedule("step", accumulate=False)
            model = declare(training=True, accumulate=False)
            self.buckets = buckets = buckets_of(model, steps, mesh.world if self.sharded else 1, bucket_bytes)
            self.order = order(buckets, steps)
            self.needed = [needed(bucket, steps) for bucket in buckets]
            values = cast(FlatHandle, optimizer.params if optimizer.rounded is None else optimizer.rounded)
            grads = cast(FlatHandle, optimizer.grads)
            names = [h.name.removeprefix("d ") for h in grads.buffers]
            self.starts = dict(zip(names, grads.starts, strict=True))
            self.values: list[Tensor] = [view(values.part(b.start, b.stop)) for b in buckets]
            self.grads: list[Tensor] = [view(grads.part(b.start, b.stop)) for b in buckets]

    def view(self, handle: Handle) -> Any:
        """The tensor of a buffer of the model's."""
        if self.units is not None and handle.name in self.units.owner:
            return self.units.view(handle)
        return self._view(handle)

    def _schedule(self, program: str, *, training: bool = True, accumulate: bool) -> tuple[Touch, ...]:
        key = program, training, accumulate
        if key not in self._schedules:
            model = self._declare(training=training, accumulate=accumulate)
            self._schedules[key] = schedule_of(model, getattr(model, program))
        return self._schedules[key]

    # ── gradients ──

    def deal(self, micro_batch: int) -> int:
        """The number in the whole step of a micro-batch of this rank's."""
        return micro_batch * self.groups + self.group

    def count(self, targets: int, micro_batches: int) -> tuple[int, int]:
        """Both over all ranks, of which those of a group say the same. The gradients are about to change."""
        self.mesh.at(f"step {self.step}: counting targets")
        total, taken = self.mesh.sum(targets, micro_batches)
        check_some(int(taken))
        self.forget_sums()
        each = self.mesh.world // self.groups
        return int(total) // each, int(taken) // each

    def padded(self, batches: list[Batch]) -> list[Batch]:
        """As many as the rank with the most of them has, by batches without a target, where batches have collectives of
        their own, of which every rank enters as many; else the same."""
        alike = self.units is not None or self.context is not None
        rounds = max(self.mesh.gather(len(batches))) if alike else len(batches)
        return batches + [_EMPTY] * (rounds - len(batches))

    def rows(self, tokens: Tensor, targets: Tensor) -> Batch:
        """This rank's of a micro-batch. Where those of its group would not have equally many, sequences get tokens without a
        target behind their end, to which none of theirs attends."""
        if self.context is None:
            return tokens, targets
        n, t = self.context.world, tokens.shape[1]
        more = -t % (2 * n)
        first, last = positions_of(self.context.rank, n, (t + more) // n)
        wholes = (pad(x.long(), (0, more), value=value) for x, value in ((tokens, 0), (targets, -1)))
        own, of_them = (torch.cat([x[:, first], x[:, last]], 1) for x in wholes)
        return own, of_them

    def sum_rows(self, loss: Tensor) -> None:
        """loss = Σ over the group of its ranks' parts."""
        if self.context is not None:
            self.context.all_reduce(loss)

    @contextmanager
    def around(
        self, program: str, *, training: bool = True, accumulate: bool = True, last: bool = False
    ) -> Iterator[None]:
        """Inside runs the model's step, forward or backward, and units come and go around its ops. Without units a step alone
        needs others: an op waits for the parameters that it reads, and in the last micro-batch buckets are summed as they
        become final."""
        if self.units is None and program != "step":
            yield
            return
        self.mesh.at(f"step {self.step}: forward and backward")
        if self.units is not None:
            steps = self._schedule(program, training=training, accumulate=accumulate)
            hooks: Any = {"emit": emitter(), "observe": observe, "observe_names": observe_names}
            with self.units.around(steps, self.mesh, first=not accumulate, **hooks):
                yield
            return
        if not self._gathers and not (last and self.order):
            yield
            return
        steps = self._schedule(program, accumulate=accumulate)
        before: dict[int, list[Work]] = {}
        after: dict[int, list[Work]] = {}
        for i in self._gathers:
            before.setdefault(needed(self.buckets[i], steps), []).append(partial(self._wait_for, i))
        at = 0
        for i in self.order if last else ():
            at = max(at, final(self.buckets[i], steps))  # never before the one that goes before it
            after.setdefault(at, []).append(partial(self._sum, i))
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

    def update(self, learning_rate: float) -> float:
        """Sum what is not summed yet, agree, update own slices, start their gathers. Returns the loss over all ranks."""
        if not self.summed:
            self.sum_all()
        self.forget_sums()
        self.settle()  # of a rank without a micro-batch, which has read none
        optimizer = self.optimizer
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

    def pieces(self, params: Mapping[str, Tensor], *, shared: bool) -> dict[str, Run]:
        """Name → (run, offset in the flattened tensor, its length) of parameters, moments and the count of updates."""
        rank, world, optimizer = self.mesh.rank, self.mesh.world, self.optimizer
        found: dict[str, Run] = {"adam_step": (optimizer.adam_step.view(1), 0, 1)}
        if not self.sharded:
            for name, x in {**params, **optimizer.moments}.items():
                flat, n = x.view(-1), x.numel()
                low, high = (n * rank // world, n * (rank + 1) // world) if shared else (0, n)
                if low < high:
                    found[name] = flat[low:high], low, n
            return found
        for bucket, own in zip(self.buckets, optimizer.owned, strict=True):
            for name in bucket.names:
                n = params[name].numel()
                low, high, at = self._overlap(bucket, name, n)
                if low < high:
                    for kind, x in (("", own.params), ("m.", own.m), ("v.", own.v)):
                        found[kind + name] = x[at : at + high - low], low, n
        return found

    def _overlap(self, bucket: Bucket, name: str, size: int) -> tuple[int, int, int]:
        """[low, high) of a flattened parameter that this rank owns, and where it begins in the rank's slice."""
        first = self.starts[name]
        start, stop = bucket.part(self.mesh.rank, self.mesh.world)
        low, high = max(start, first), min(stop, first + size)
        return low - first, high - first, low - start

    def spread(self) -> None:
        """Every rank's parameters from the slices that each owns."""
        if self.sharded:
            for own in self.optimizer.owned:
                if own.rounded is not None:
                    own.rounded.copy_(own.params)
            if self.units is None:
                self.gather()
                self.settle()

    def whole(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The engine's parameters; those of units are gathered, which all ranks ask for together."""
        if self.units is None:
            return params
        found = gathered(self.units, self.mesh)
        return {name: found[name][: p.numel()].view(p.shape) for name, p in params.items()}

    # ── the start ──

    def place(self, name: str, whole: Tensor) -> None:
        """A parameter's value, in float32 or better: this rank keeps its part of the master where layers compute with a
        copy of it. The copy is written elsewhere, whole."""
        if self.units is None and (self.optimizer.rounded is None or not self.sharded):
            return
        x = whole.reshape(-1)
        for bucket, own in zip(self.buckets, self.optimizer.owned, strict=True):
            low, high, at = self._overlap(bucket, name, x.numel())
            if name in bucket.names and low < high:
                own.params[at : at + high - low].copy_(x[low:high])
                if self.units is not None and own.rounded is not None:
                    own.rounded[at : at + high - low].copy_(x[low:high])


def check_same(mesh: Mesh, fields: Mapping[str, object]) -> None:
    """Refuse ranks that would not compute the same thing, before any memory is taken. `fields` are the engine's."""
    native = native_library()
    check_agreed(mesh, {
        **fields, "tilegrad": __version__, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "native library": native if isinstance(native, str) else native_sources(),
    })  # fmt: skip


def check_agreed(mesh: Mesh, fields: Mapping[str, object]) -> None:
    """Refuse ranks that differ in what must be the same on all: the first key that does is named, with its rank; a key inside
    of a field as field.key. Every rank raises the same."""
    if mesh.world == 1:
        return
    mesh.at("comparing the ranks")
    told = mesh.gather(dict(_leaves(fields)))
    for name in {name: None for fields_of in told for name in fields_of}:
        for rank, theirs in enumerate(told):
            if theirs.get(name) != told[0].get(name):
                accepted = f"rank 0's, {told[0].get(name)}"
                raise ValueError(f"{name}: got {theirs.get(name)} on rank {rank}; accepted: {accepted}")


def _leaves(fields: Mapping[str, object], inside: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{inside}{name}.")
        else:
            yield f"{inside}{name}", str(value)


def digest(tensors: Iterable[Tensor]) -> str:
    """sha256 of their bytes."""
    found = hashlib.sha256()
    for x in tensors:
        for part in x.detach().reshape(-1).view(torch.uint8).split(1 << 26):
            found.update(part.cpu().numpy().data)
    return found.hexdigest()[:16]
