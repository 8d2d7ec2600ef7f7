"""Fully sharded: whole parameters and gradients exist only around the ops that need them.

The parameters of each block are a unit, and the parameters outside the blocks are one more unit. Each of n ranks keeps 1/n of
each unit, its part. A whole unit has a flat COMM buffer for its values and one for its gradients. These buffers have live ranges
like activations, so units share addresses in the plan, and poison exposes a read after a live range. For each unit:

    before the previous unit is used   start the gather (prefetch by one unit)
    before an op reads the unit        wait for the gather
    before the first op that writes    zero the gradients of the unit
    its gradients
    after the last such op             wait for the sum that was started before, of another unit, and add this rank's slice of
                                       that sum to this rank's part; then start the sum (a reduce-scatter) of this unit

The schedule comes from a run of the program on handles (`schedule.touches`). Collectives are traced like the ops of the model,
so the plan includes them. Every micro-batch gathers and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...memory.planned.arena import flat
from ...memory.planned.trace import Call, Handle, Observe, start, wait
from ...memory.types import BufferType, Role
from .mesh import Mesh, Pending
from .schedule import Bucket, ObserveNames, Touch, Work, align_of, follow

ROOT = "root"  # the unit of the parameters outside the blocks
Actions = dict[int, list[tuple[str, str]]]  # index of an op → (action, unit)
Buffers = dict[str, Tensor]  # unit → buffer; a handle instead of a tensor while a program is traced
Emit = Callable[[Any], None]  # takes a Call of kernels/op.py or an Emitted


class Emitted(NamedTuple):
    """A call in the form that a trace reads: a call that the schedule adds, or a call of the model on buffers of units."""

    name: str
    reads: tuple[object, ...]
    writes: tuple[object, ...]
    accumulates: tuple[object, ...]
    run: Work


class UnitParam(NamedTuple):
    """The handles of a parameter."""

    name: str
    value: Handle
    grad: Handle
    master: Handle


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model over `world` ranks. Buffers are handles or tensors."""

    world: int
    buckets: dict[str, Bucket]
    starts: dict[str, int]  # parameter → its first element in the flat range of all units
    owner: dict[str, tuple[str, str]]  # name of the handle of a value or a gradient → (unit, parameter)
    values: Buffers  # whole units, which exist only while a program needs them
    grads: Buffers
    value_parts: Buffers  # the parts of this rank, which always exist
    grad_parts: Buffers

    @classmethod
    def declare(cls, params: Sequence[UnitParam], world: int, kept: torch.dtype | None = None) -> Units:
        """Units on handles. kept: the dtype of this rank's parts of the gradients; None: the dtype of the gradients."""
        by_unit: dict[str, list[UnitParam]] = {}
        for p in params:
            by_unit.setdefault(p.master.layer if p.master.layer.startswith("blocks.") else ROOT, []).append(p)
        buckets: dict[str, Bucket] = {}
        starts: dict[str, int] = {}
        owner: dict[str, tuple[str, str]] = {}
        end = 0
        for unit, unit_params in by_unit.items():
            ordered = sorted(unit_params, key=lambda p: len(p.master.shape) < 2)
            layout, step = flat("unit", [p.master for p in ordered]), world * align_of(unit_params[0].master)
            size = -(-layout.shape[0] // step) * step
            matrices = sum(len(p.master.shape) >= 2 for p in ordered)
            decayed = (*layout.starts, layout.shape[0])[matrices]
            names = tuple(p.name for p in ordered)
            buckets[unit] = Bucket(names, end, end + size, decayed)
            for p, at in zip(ordered, layout.starts, strict=True):
                starts[p.name] = end + at
                owner |= {p.value.name: (unit, p.name), p.grad.name: (unit, p.name)}
            end += size

        def buffers(kind: str, form: Handle, role: Role) -> Buffers:
            type, share = (BufferType.COMM, 1) if role == "activations" else (BufferType.TEMP, world)
            by_name = {
                unit: Handle(f"{kind} of {unit}", ((b.stop - b.start) // share,), form.dtype, type, role, unit, form.device)
                for unit, b in buckets.items()
            }
            return cast(Buffers, by_name)

        value, grad = params[0].value, params[0].grad
        return cls(
            world,
            buckets,
            starts,
            owner,
            values=buffers("values", value, "activations"),
            grads=buffers("grads", grad, "activations"),
            value_parts=buffers("part", value, "params"),
            grad_parts=buffers("d part", grad if kept is None else replace(grad, dtype=kept), "grads"),
        )

    def view(self, handle: Handle) -> Tensor:
        """The tensor of the value or the gradient of a parameter: a view of the buffer of its unit."""
        unit, name = self.owner[handle.name]
        buffer = (self.grads if handle.role == "grads" else self.values)[unit]
        begin, n = self.starts[name] - self.buckets[unit].start, handle.nbytes // handle.dtype.itemsize
        return buffer[begin : begin + n].view(handle.shape)

    def schedule(self, steps: Sequence[Touch]) -> tuple[Actions, Actions]:
        """(actions before each op, actions after each op)"""
        unit_of = {name: unit for unit, bucket in self.buckets.items() for name in bucket.names}
        before: Actions = {}
        after: Actions = {}
        uses: list[tuple[int, str]] = []  # (op, unit): a unit is needed and not gathered yet
        latest: dict[bool, str] = {}  # True → the root if it is gathered; False → the block gathered last
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i, step in enumerate(steps):
            for unit in sorted({unit_of[name] for name in step.reads}):
                if latest.get(unit == ROOT) != unit:
                    latest[unit == ROOT] = unit
                    uses.append((i, unit))
            for unit in {unit_of[name] for name in step.writes}:
                first.setdefault(unit, i)
                last[unit] = i
        for n, (i, unit) in enumerate(uses):
            before.setdefault(uses[n - 1][0] if n else i, []).append(("gather", unit))
            before.setdefault(i, []).append(("wait gather", unit))
        summed = sorted(last, key=lambda unit: last[unit])
        for n, unit in enumerate(summed):
            before.setdefault(first[unit], []).append(("zero", unit))
            then = after.setdefault(last[unit], [])
            then += [("wait sum", summed[n - 1]), ("sum", unit)] if n else [("sum", unit)]
        if summed:
            after.setdefault(len(steps) - 1, []).append(("wait sum", summed[-1]))
        return before, after

    @contextmanager
    def around(
        self, steps: Sequence[Touch], mesh: Mesh, *, first: bool, emit: Emit | None, observe: Observe,
        observe_names: ObserveNames,
    ) -> Iterator[None]:
        """Run the program of `steps` in this context. first=True: sums overwrite the parts; False: sums are added to them.
        `emit` is the outer observer (a trace or the poison check), which gets each call; None: there is no observer. While a
        program is traced, no collective runs."""
        works: dict[str, Pending] = {}
        before, after = self.schedule(steps)
        act = partial(self._act, mesh, works, first=first, emit=emit or _run)
        if emit is None:
            with follow(steps, _bound(before, act), _bound(after, act), observe_names):
                yield
            return
        clock = 0

        def see(call: Call) -> None:
            nonlocal clock
            for action, unit in before.get(clock, ()):
                act(action, unit)
            emit(self._by_unit(call))
            for action, unit in after.get(clock, ()):
                act(action, unit)
            clock += 1

        with observe(see):
            yield

    def _act(self, mesh: Mesh, works: dict[str, Pending], action: str, unit: str, *, first: bool, emit: Emit) -> None:
        values, grads = self.values[unit], self.grads[unit]
        part, total = self.value_parts[unit], self.grad_parts[unit]
        stream = f"{action.removeprefix('wait ')} {unit}"

        def gather() -> None:
            works[stream] = mesh.all_gather(part, out=values, wait=False)

        def reduce() -> None:
            works[stream] = mesh.reduce_scatter(grads, out=grads.view(self.world, -1)[mesh.rank], wait=False)

        def zero() -> None:
            grads.zero_()

        def take() -> None:
            summed = grads.view(self.world, -1)[mesh.rank]
            total.copy_(summed) if first else total.add_(summed)

        if action.startswith("wait"):
            mesh.wait(works.pop(stream, None))
            wait(stream)
            if action == "wait sum":
                emit(Emitted("take_sum", (grads,), (total,), (total,), take))
        elif action == "zero":
            emit(Emitted("zero", (), (grads,), (), zero))
        else:
            with start(stream):
                if action == "gather":
                    emit(Emitted("all_gather", (part,), (values,), (), gather))
                else:
                    emit(Emitted("reduce_scatter", (grads,), (grads,), (grads,), reduce))

    def _by_unit(self, call: Call) -> Call:
        """The call with the buffers of units instead of the handles of parameters and gradients. The op writes only a part of
        such a buffer, so the call declares the buffer as accumulated, and the rest of the buffer stays alive."""
        if not any(isinstance(h, Handle) for h in (*call.reads, *call.writes)):
            return call

        def swap(h: object) -> object:
            if not isinstance(h, Handle) or h.name not in self.owner:
                return h
            unit, _ = self.owner[h.name]
            return (self.grads if h.role == "grads" else self.values)[unit]

        writes = tuple(map(swap, call.writes))
        parts = tuple(w for w, h in zip(writes, call.writes, strict=True) if w is not h)
        return Emitted(call.name, tuple(map(swap, call.reads)), writes, (*map(swap, call.accumulates), *parts), call.run)


def _run(call: Call) -> None:
    call.run()


def _bound(actions: Mapping[int, Sequence[tuple[str, str]]], act: Callable[[str, str], None]) -> dict[int, list[Work]]:
    return {i: [partial(act, *action) for action in todo] for i, todo in actions.items()}


def gathered(units: Units, mesh: Mesh) -> dict[str, Tensor]:
    """parameter → a flat view of its gathered unit, in new memory, from the start of the parameter to the end of the unit. All
    ranks must call this, because it is a collective."""
    views: dict[str, Tensor] = {}
    for unit, bucket in units.buckets.items():
        part = units.value_parts[unit]
        whole = torch.empty(bucket.stop - bucket.start, dtype=part.dtype, device=part.device)
        mesh.all_gather(part, out=whole)
        views |= {name: whole[units.starts[name] - bucket.start :] for name in bucket.names}
    return views
