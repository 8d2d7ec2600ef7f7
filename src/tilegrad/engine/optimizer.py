"""AdamW over a model's parameters: its buffers, its step, and the guard against what is not finite.

    params    w₀ ░ w₁ ░ … ░ b₀ ░ b₁ …        ░: a gap of alignment, always zero
    grads     as params, and so m and v: the four are one flat range (P,) each
    rounded   the copies that layers compute with, where these are shorter: in elements the same layout
    decay     the parameters of two and more dimensions lie first, so weight decay is a prefix of the range

    norm = ‖grads‖₂        clip to max_norm        AdamW                    (equations: kernels/adamw)

Declared on handles, the step is traced and planned with the model's; bound to tensors, it updates. Its scratch is dead
between steps and shares addresses with the activations.

Sharded over ranks (dist/schedule.py), params and grads are cut into padded buckets, and of each a rank updates a slice. m and v
hold those slices alone, one after the other, and so do the masters where layers compute with copies of them:

    params    │ bucket 0: 0 1 2 3 │ bucket 1: 0 1 2 3 │ …       m, v of rank 2:  │ 2 │ 2 │ …
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..dist.schedule import Bucket
from ..dist.units import Units
from ..kernels.adamw import adamw_step, adamw_workspace
from ..kernels.global_norm import global_norm, global_norm_workspace
from ..kernels.guard import guard, guard_workspace
from ..kernels.scratch import Scratch, below, of
from ..memory.planned.arena import flat
from ..memory.planned.trace import FlatHandle, Handle, handles
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


def _padded(
    name: str, ordered: Sequence[Param], buckets: Sequence[Bucket], of_param: Callable[[Param], Buffer]
) -> FlatHandle:
    """The flat range of one buffer of each parameter, with the pads of the buckets."""
    every = list(handles([of_param(p) for p in ordered]))
    if not buckets:
        return flat(name, every)
    by_name, form = {p.name: h for p, h in zip(ordered, every, strict=True)}, every[0]
    padded: list[Handle] = []
    for i, bucket in enumerate(buckets):
        padded += [by_name[name] for name in bucket.names]
        if bucket.pad:
            pad = f"{'d ' if form.role == 'grads' else ''}pad.{i}"
            padded.append(Handle(pad, (bucket.pad,), form.dtype, BufferType.COMM, form.role, "pads", form.device))
    return flat(name, padded)


class Owned(NamedTuple):
    """Ranges that one rank updates, as long as each other; `decayed` of the leading elements decay."""

    params: Buffer
    grads: Buffer
    m: Buffer
    v: Buffer
    rounded: Buffer | None
    decayed: int


def _owned(
    masters: FlatHandle, grads: FlatHandle, m: FlatHandle, v: FlatHandle, rounded: FlatHandle | None,
    buckets: Sequence[Bucket], rank: int, world: int, units: Units | None,
) -> tuple[Owned, ...]:  # fmt: skip
    """A rank's slice of each bucket; of units it has nothing else."""
    found, at = [], 0
    for bucket in buckets:
        start, stop = bucket.part(rank, world)
        here = at, at + stop - start
        there = here if units is not None else (start, stop)
        params = masters.part(*(there if rounded is None else here))
        copies = None if rounded is None else rounded.part(*there)
        decayed = min(max(bucket.start + bucket.decayed - start, 0), stop - start)
        piece: Any = params, grads.part(*there), m.part(*here), v.part(*here), copies, decayed
        found.append(Owned(*piece))
        at = here[1]
    return tuple(found)


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
    moments: dict[str, Buffer]  # m.<parameter> and v.<parameter>, in the shape of the parameter; none where sharded
    owned: tuple[Owned, ...]  # what this rank updates: a piece of each bucket, or all in one
    agreed: Buffer | None  # (3,) float64, of several ranks: squared norm, loss, stop
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
        weight_decay: float = 0.1, max_norm: float = 1.0, rank: int = 0, world: int = 1, buckets: Sequence[Bucket] = (),
        units: Units | None = None,
    ) -> Optimizer:  # fmt: skip
        """Of one rank of `world`; with `buckets`, sharded over them; with `units`, of which it has a part each, over those."""
        if units is not None:
            buckets = tuple(units.buckets.values())
        ordered = decayed_first(params)
        copied = ordered[0].value is not ordered[0].master
        form = cast(Handle, ordered[0].master)

        def buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: Role = "optimizer") -> Handle:
            return Handle(name, shape, dtype, BufferType.TEMP, role, "optimizer", form.device)

        def moment(name: str) -> FlatHandle:
            return flat(name, [buffer(f"{name}.{p.name}", p.master.shape, form.dtype) for p in ordered])

        def share(name: str) -> FlatHandle:
            return flat(name, [buffer(f"optimizer.{name}", (buckets[-1].stop // world,), form.dtype)])

        grads = _padded("grads", ordered, buckets, lambda p: p.grad)
        values = _padded("rounded" if copied else "params", ordered, buckets, lambda p: p.value)
        if units is not None:
            grads = flat("grads", list(units.grad_parts.values()))
            values = flat("rounded" if copied else "params", list(units.value_parts.values()))
        masters = values
        if copied:
            masters = share("master") if buckets else _padded("params", ordered, (), lambda p: p.master)
        m, v = map(share, "mv") if buckets else map(moment, "mv")
        first_undecayed = sum(len(p.master.shape) >= 2 for p in ordered)
        decayed = (*masters.starts, masters.shape[0])[first_undecayed] if not buckets else 0
        rounded = values if copied else None
        whole: Any = masters, grads, m, v, rounded, decayed
        owned = _owned(masters, grads, m, v, rounded, buckets, rank, world, units) if buckets else (Owned(*whole),)
        scratch = (
            below("global_norm", global_norm_workspace(*(piece.grads for piece in owned)))
            | below("guard", guard_workspace())
            | below("adamw", adamw_workspace(masters))
        )
        return cls(
            params=cast(Buffer, masters),
            grads=cast(Buffer, grads),
            m=cast(Buffer, m),
            v=cast(Buffer, v),
            adam_step=cast(Buffer, buffer("optimizer.step", (), torch.float32)),
            norm=cast(Buffer, buffer("optimizer.norm", (), form.dtype)),
            loss=cast(Buffer, buffer("optimizer.loss", (), form.dtype)),
            in_a_row=cast(Buffer, buffer("optimizer.in_a_row", (), torch.float32)),
            rounded=cast(Buffer, values) if copied else None,
            moments={handle.name: cast(Buffer, handle) for handle in (*m.buffers, *v.buffers)} if not buckets else {},
            owned=owned,
            agreed=cast(Buffer, buffer("optimizer.agreed", (3,), torch.float64)) if world > 1 else None,
            scratch={
                name: cast(Buffer, buffer(f"scratch.optimizer.{name}", shape, dtype, "activations"))
                for name, (shape, dtype) in scratch.items()
            },
            decayed=decayed,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_norm=max_norm,
        )

    def update(self, learning_rate: float | Tensor) -> None:
        """The program, which is traced: clip to a global norm of `max_norm`, then AdamW. A loss or a gradient that is not
        finite changes neither weights nor moments, and nothing does after ten of them in a row."""
        self.measure()
        self.apply(learning_rate)

    def measure(self) -> None:
        """norm = ‖the gradients that this rank owns‖₂"""
        global_norm([x.grads for x in self.owned], norm=self.norm, scratch=of("global_norm", self.scratch))

    def apply(self, learning_rate: float | Tensor) -> None:
        """Guard, clip and AdamW by `norm`, which is that of all ranks' gradients."""
        owned, copied = self.owned, self.rounded is not None
        guard(self.loss, MAX_SKIPPED, norm=self.norm, in_a_row=self.in_a_row, scratch=of("guard", self.scratch))
        adamw_step(
            self.norm, learning_rate, [x.decayed for x in owned], self.weight_decay, self.max_norm, self.betas, self.eps,
            params=[x.params for x in owned], grads=[x.grads for x in owned], m=[x.m for x in owned],
            v=[x.v for x in owned], step=self.adam_step,
            rounded=[cast(Buffer, x.rounded) for x in owned] if copied else None, scratch=of("adamw", self.scratch),
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
