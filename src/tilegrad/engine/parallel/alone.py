"""The strategy of one rank, which sends nothing. The strategies of several ranks override its methods."""
# ruff: noqa: ARG002  # a no-op ignores its arguments

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from ...memory.planned.trace import Handle, bind
from ..batch import Batch, check_some
from ..dist.mesh import Mesh, Neighbours
from ..optimizer import AdamW
from ..spec import StepSpec
from .context import own_rows
from .declare import declare_optimizer

View = Callable[[Handle], Tensor | Handle]
Run = tuple[Tensor, int, int]  # a slice of a flattened tensor, its offset, the length of the whole tensor
Program = Literal["step", "forward", "backward"]  # a method of the model
_EMPTY = Batch(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -1))


class Alone:
    sharded = False  # whether this rank updates only a slice of the parameters
    has_params = True  # whether this rank has every parameter that the layers read

    def __init__(self, spec: StepSpec, mesh: Mesh, adamw: AdamW, view: View) -> None:
        self.spec, self.mesh, self._view = spec, mesh, view
        self.context: Neighbours | None = mesh.neighbours(spec.context) if spec.context > 1 else None
        optimizer, units = declare_optimizer(spec.declare(self.context), spec, adamw, mesh.rank)
        self.optimizer, self._units = bind(optimizer, view), bind(units, view)
        self.params: dict[str, Tensor] = {}  # the parameters of the bound model, set by the engine
        self.trained: dict[str, Tensor] = {}  # the parameters that are not frozen
        self.scales: dict[str, Tensor] = {}  # the states of float8, as checkpoints name them; the same on every rank
        self.stop = False  # whether this rank must stop; after a step, whether any rank must
        self.step = 0
        self.summed = False  # whether the gradients are summed over the ranks

    def view(self, handle: Handle) -> Tensor | Handle:
        """The tensor of a buffer of the model."""
        return self._view(handle)

    def number_of(self, micro_batch: int) -> int:
        """The number of this rank's micro-batch among the micro-batches of all ranks in this step."""
        context, rank, world = self.spec.context, self.mesh.rank, self.mesh.world
        return micro_batch * (world // context) + rank // context

    def count(self, targets: int, micro_batches: int) -> tuple[int, int]:
        """The sums over all ranks of `targets` and of `micro_batches`. Called before the gradients are overwritten."""
        self.mesh.at(f"step {self.step}: counting targets")
        total, taken = (int(x) // self.spec.context for x in self.mesh.sum(targets, micro_batches))
        check_some(taken)
        self.forget_sums()
        return total, taken

    def padded(self, batches: list[Batch]) -> list[Batch]:
        """Pad with empty batches, so that every rank runs the same number of collectives."""
        if self.context is None and self.has_params:  # a micro-batch then has no collectives
            return batches
        return batches + [_EMPTY] * (max(self.mesh.gather(len(batches))) - len(batches))

    def local(self, batch: Batch) -> Batch:
        """This rank's slice of each sequence."""
        return batch if self.context is None else own_rows(self.context, batch.tokens, batch.targets)

    def sum_loss(self, loss: Tensor) -> None:
        """loss = Σ over the ranks that share a sequence."""
        if self.context is not None:
            self.context.all_reduce(loss)

    @contextmanager
    def around(
        self, program: Program, *, training: bool = True, accumulate: bool = True, last: bool = False
    ) -> Iterator[None]:
        """Run `program` in this context, with collectives between its ops. `last`: in the last micro-batch of the step."""
        yield

    def sum_gradients(self) -> None:
        """Start to sum all gradients over the ranks."""

    def forget_sums(self) -> None:
        """Wait for the sums in flight, before the gradients are overwritten."""

    def keep_largest(self) -> None:
        """Store the largest magnitudes of float8 in this step so far, so that later empty micro-batches do not change them."""

    def agree_on_largest(self) -> None:
        """Replace the largest magnitudes of float8 by the maxima over ranks, so that all ranks have the same next scales."""

    def update(self, learning_rate: float, loss: float) -> float:
        """Sum the gradients that are not summed yet, clip, and update. `loss` is the loss of this rank; returns the loss over
        all ranks."""
        self.optimizer.update(learning_rate)
        return loss

    def settle(self) -> None:
        """Wait for parameters that other ranks are sending."""

    def whole_params(self) -> dict[str, Tensor]:
        """The parameters by name; FullySharded gathers them, so all ranks must call this together."""
        return self.params

    def write_param(self, name: str, value: Tensor) -> None:
        """Copy the values of a tensor to a parameter, on every rank."""
        self.params[name].copy_(value)

    def pieces(self, *, shared: bool) -> dict[str, Run]:
        """name → `Run` for the trained parameters, moments, states of float8 and adam_step that this rank owns. A rank owns a
        whole tensor if it is not sharded; with `shared`, 1/world of the tensor."""
        pieces: dict[str, Run] = {"adam_step": (self.optimizer.adam_step.view(1), 0, 1)}
        return pieces | self._shares({**self.trained, **self.optimizer.moments, **self.scales}, shared=shared)

    def _shares(self, tensors: dict[str, Tensor], *, shared: bool) -> dict[str, Run]:
        """The pieces of tensors that are not sharded."""
        rank, world, pieces = self.mesh.rank, self.mesh.world, {}
        for name, x in tensors.items():
            n = x.numel()
            start, stop = (n * rank // world, n * (rank + 1) // world) if shared else (0, n)
            if start < stop:
                pieces[name] = x.view(-1)[start:stop], start, n
        return pieces

    def spread(self) -> None:
        """Send the parameters that this rank owns to the others."""
