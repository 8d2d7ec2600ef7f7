"""shard="all": each rank keeps 1/world of every parameter, gradient and moment, and gathers a block when it is used
(dist/units.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...dist.schedule import Bucket
from ...dist.units import Units, gathered
from ...kernels.op import emitter, observe, observe_names
from ...memory.planned.trace import Handle
from .alone import Program
from .sharded import ShardedOptimizer


class FullySharded(ShardedOptimizer):
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
        self,
        program: Program,
        *,
        training: bool = True,
        accumulate: bool = True,
        last: bool = False,  # noqa: ARG002
    ) -> Iterator[None]:
        """Units are gathered, and their gradients summed, around the ops of any program, in every micro-batch."""
        self.mesh.at(f"step {self.step}: forward and backward")
        steps = self._schedule(program, training=training, accumulate=accumulate)
        with self.units.around(
            steps, self.mesh, first=not accumulate, emit=emitter(), observe=observe, observe_names=observe_names
        ):
            yield

    def _gather(self) -> None:
        """Nothing: a program gathers the units that it uses."""

    def whole_params(self) -> dict[str, Tensor]:
        found = gathered(self.units, self.mesh)
        return {name: found[name][: p.numel()].view(p.shape) for name, p in self.params.items()}
