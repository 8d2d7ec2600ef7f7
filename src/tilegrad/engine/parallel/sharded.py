"""A rank updates 1/world of each bucket and keeps the moments of that slice; shard="all" shards everything else too
(dist/units.py).

bucket   │ rank 0 │ rank 1 │ …        reduce-scatter of the gradients → update of the own slice → all-gather of the parameters
"""
# ruff: noqa: ARG002  # a strategy ignores arguments that only other strategies need

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor

from ...kernels.op import emitter, observe, observe_names
from ...memory.planned.trace import Handle
from ..dist.mesh import Pending
from ..dist.schedule import Bucket, needed
from ..dist.units import Units, gathered
from ..optimizer import Owned
from .alone import Program, Run
from .replicated import Replicated


class ShardedOptimizer(Replicated):
    sharded = True

    def _own(self, bucket: Tensor) -> Tensor:
        """This rank's slice of a bucket."""
        return bucket.view(self.mesh.world, -1)[self.mesh.rank]

    def _start_sum(self, grads: Tensor) -> Pending:
        return self.mesh.reduce_scatter(grads, out=self._own(grads), wait=False)

    def update(self, learning_rate: float, loss: float) -> float:
        loss = super().update(learning_rate, loss)
        self._gather()
        return loss

    @cached_property
    def _gather_order(self) -> list[int]:
        """Indices of the buckets, in the order in which a forward reads them."""
        steps = self._schedule("step", accumulate=False)
        return sorted(range(len(self.buckets)), key=lambda i: needed(self.buckets[i], steps))

    def _gather(self) -> None:
        """Start the gathers of all parameters."""
        self.mesh.at(f"step {self.step}: gathering parameters")
        optimizer = self.optimizer
        flat = optimizer.params if optimizer.rounded is None else optimizer.rounded
        for i in self._gather_order:
            bucket = flat[self.buckets[i].start : self.buckets[i].stop]
            self._gathers[i] = self.mesh.all_gather(self._own(bucket), out=bucket, wait=False)

    def settle(self) -> None:
        for i in list(self._gathers):
            self._wait_for(i)

    def _owned(self, names: Container[str]) -> Iterator[tuple[str, Owned, slice, int, int]]:
        """The slices of parameters that this rank updates, each as (name, buffers of the optimizer, slice of these buffers,
        low, high): the slice has the elements [low, high) of the flattened parameter."""
        for bucket, owned in zip(self.buckets, self.optimizer.owned, strict=True):
            start, stop = bucket.part(self.mesh.rank, self.mesh.world)
            for name in bucket.names:
                first = self.optimizer.starts[name]
                low, high = max(start, first), min(stop, first + self.params[name].numel())
                if name in names and low < high:
                    yield name, owned, slice(low - start, high - start), low - first, high - first

    def write_param(self, name: str, value: Tensor) -> None:
        if self.has_params:
            super().write_param(name, value)
        for _, owned, inside, low, high in self._owned([name]):
            for x in (owned.params, owned.rounded):
                if x is not None:
                    x[inside].copy_(value.reshape(-1)[low:high])

    def pieces(self, *, shared: bool) -> dict[str, Run]:
        pieces: dict[str, Run] = {"adam_step": (self.optimizer.adam_step.view(1), 0, 1)}
        pieces |= self._shares(self.scales, shared=shared)
        for name, owned, inside, low, _ in self._owned(self.trained):
            for kind, x in (("", owned.params), ("m.", owned.m), ("v.", owned.v), ("ema.", owned.ema)):
                if x is not None:  # Muon has no v
                    pieces[kind + name] = x[inside], low, self.params[name].numel()
        return pieces

    def spread(self) -> None:
        for owned in self.optimizer.owned:
            if owned.rounded is not None:
                owned.rounded.copy_(owned.params)
        self._gather()
        self.settle()


class FullySharded(ShardedOptimizer):
    """A rank has 1/world of the parameters and gradients too, and gathers a block when it is used (dist/units.py)."""

    has_params = False

    @property
    def units(self) -> Units:
        assert self._units is not None
        return self._units

    def _cut(self) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
        return tuple(self.units.buckets.values()), ()

    def view(self, handle: Handle) -> Tensor | Handle:
        return self.units.view(handle) if handle.name in self.units.owner else self._view(handle)

    @contextmanager
    def around(
        self, program: Program, *, training: bool = True, accumulate: bool = True, last: bool = False
    ) -> Iterator[None]:
        """Gather units, and sum their gradients, around the ops of any program, in every micro-batch."""
        self.mesh.at(f"step {self.step}: forward and backward")
        steps = self._schedule(program, training=training, accumulate=accumulate)
        with self.units.around(
            steps, self.mesh, first=not accumulate, emit=emitter(), observe=observe, observe_names=observe_names
        ):
            yield

    def _gather(self) -> None:
        """Do nothing, because a program gathers the units that it uses."""

    def whole_params(self) -> dict[str, Tensor]:
        flat = gathered(self.units, self.mesh)
        return {name: flat[name][: p.numel()].view(p.shape) for name, p in self.params.items()}
