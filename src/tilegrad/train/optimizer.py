"""AdamW over a model's parameters: its buffers, its step, and the guard against what is not finite.

    params    w₀ ░ w₁ ░ … ░ b₀ ░ b₁ …        ░: a gap of alignment, always zero
    grads     as params, and so m and v: the four are one flat range (P,) each
    rounded   the copies that layers compute with, where these are shorter: in elements the same layout
    decay     the parameters of two and more dimensions lie first, so weight decay is a prefix of the range

    norm = ‖grads‖₂        clip to max_norm        AdamW                    (equations: kernels/adamw)

Declared on handles, the step is traced and planned with the model's; bound to tensors, it updates. Its scratch is dead
between steps and shares addresses with the activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..kernels.adamw import adamw_step, adamw_workspace
from ..kernels.global_norm import global_norm, global_norm_workspace
from ..kernels.guard import guard, guard_workspace
from ..kernels.scratch import Scratch, below, of
from ..memory.planned.arena import flat
from ..memory.planned.trace import Handle, handles
from ..memory.types import BufferType, Role
from ..model.layer import Buffer, Param

MAX_SKIPPED = 10
_COUNTERS = ("steps", "skipped", "skipped_in_a_row")


class NonFiniteError(RuntimeError):
    """Ten steps in a row had a loss or a gradient that was not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one step: the mean loss over its targets, and the norm of its gradients before clipping; a norm that is not
    finite says that the step was left out."""

    loss: float
    norm: float


def decayed_first(params: Iterable[Param]) -> list[Param]:
    """Parameters in the order of their arenas: those of two and more dimensions, then the rest."""
    return sorted(params, key=lambda p: len(p.master.shape) < 2)


@dataclass(slots=True)
class Optimizer:
    """Buffers are handles or tensors; the flat ranges are (P,). `steps` counts every `update`, also the skipped ones."""

    params: Buffer
    grads: Buffer
    m: Buffer
    v: Buffer
    adam_step: Buffer  # 0-d float32: the updates done
    norm: Buffer  # 0-d: of the gradients, before clipping; NaN where the guard leaves the step out
    loss: Buffer  # 0-d: of the step
    in_a_row: Buffer  # 0-d float32: steps left out since the last that was not
    rounded: Buffer | None
    moments: dict[str, Buffer]  # m.<parameter> and v.<parameter>, in the shape of the parameter
    scratch: Scratch
    decayed: int  # leading elements that decay
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @classmethod
    def declare(
        cls, params: Iterable[Param], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, max_norm: float = 1.0,
    ) -> Optimizer:  # fmt: skip
        ordered = decayed_first(params)
        masters = flat("params", list(handles([p.master for p in ordered])))

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Role = "optimizer") -> Handle:
            return Handle(name, shape, dtype, BufferType.TEMP, role, "optimizer", masters.device)

        m, v = (
            flat(moment, [buffer(f"{moment}.{p.name}", p.master.shape, masters.dtype) for p in ordered])
            for moment in ("m", "v")
        )
        first_undecayed = sum(len(p.master.shape) >= 2 for p in ordered)
        copied = ordered[0].value is not ordered[0].master
        scratch = (
            below("global_norm", global_norm_workspace(masters))
            | below("guard", guard_workspace())
            | below("adamw", adamw_workspace(masters))
        )
        return cls(
            params=cast(Buffer, masters),
            grads=cast(Buffer, flat("grads", list(handles([p.grad for p in ordered])))),
            m=cast(Buffer, m),
            v=cast(Buffer, v),
            adam_step=cast(Buffer, buffer("optimizer.step", (), torch.float32)),
            norm=cast(Buffer, buffer("optimizer.norm", (), masters.dtype)),
            loss=cast(Buffer, buffer("optimizer.loss", (), masters.dtype)),
            in_a_row=cast(Buffer, buffer("optimizer.in_a_row", (), torch.float32)),
            rounded=cast(Buffer, flat("rounded", list(handles([p.value for p in ordered])))) if copied else None,
            moments={handle.name: cast(Buffer, handle) for handle in (*m.buffers, *v.buffers)},
            scratch={
                name: cast(Buffer, buffer(f"scratch.optimizer.{name}", shape, dtype, "activations"))
                for name, (shape, dtype) in scratch.items()
            },
            decayed=(*masters.starts, masters.shape[0])[first_undecayed],
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_norm=max_norm,
        )

    def update(self, learning_rate: float | Tensor) -> None:
        """The program, which is traced: clip to a global norm of `max_norm`, then AdamW. A loss or a gradient that is not
        finite changes neither weights nor moments, and nothing does after ten of them in a row."""
        global_norm(self.grads, norm=self.norm, scratch=of("global_norm", self.scratch))
        guard(self.loss, MAX_SKIPPED, norm=self.norm, in_a_row=self.in_a_row, scratch=of("guard", self.scratch))
        adamw_step(
            self.norm, learning_rate, self.decayed, self.weight_decay, self.max_norm, self.betas, self.eps,
            params=self.params, grads=self.grads, m=self.m, v=self.v, step=self.adam_step, rounded=self.rounded,
            scratch=of("adamw", self.scratch),
        )  # fmt: skip

    def count(self, result: StepResult) -> None:
        """One `update` more, of which this came back. Ten skipped in a row raise."""
        self.steps += 1
        if math.isfinite(result.norm):
            self.skipped_in_a_row = 0
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteError(
                f"the loss or the gradient was not finite in {MAX_SKIPPED} steps in a row (loss {result.loss}, "
                f"norm {result.norm}): weights are as before the first of them; lower the learning rate or look at the data"
            )

    # ── state, for checkpoints ──

    def tensors(self) -> dict[str, Tensor]:
        return {**self.moments, "adam_step": self.adam_step}

    def state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _COUNTERS}

    def restore(self, state: dict[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        self.in_a_row.fill_(self.skipped_in_a_row)
