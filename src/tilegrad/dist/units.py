"""Everything sharded: parameters and gradients are whole only around the ops that need them.

A block is a unit, and so is all that is in no block. A rank keeps its part of each unit. The whole of a unit's values, and of
its gradients, is one flat COMM buffer each, with a live range like any activation's: so units share addresses, the plan says
what a rank needs, and poison finds a unit that is read after its end.

    before the unit used before it   gather it: one unit ahead
    before an op reads it            wait for that
    before an op forms its grads     zero them
    after the last such op           wait for the sum of the unit before, and add it to the part; sum this one

When this happens is read off the program's run on handles (`schedule.touches`), and the collectives are calls among the model's
own: the trace of all of them is the plan. Each micro-batch gathers and sums anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..memory.planned.arena import flat
from ..memory.planned.trace import Handle, Observe, start, wait
from ..memory.types import BufferType, Role
from .mesh import Mesh
from .schedule import Bucket, ObserveNames, Touch, Work, align_of, follow

ROOT = "root"  # the unit of what is in no block
Actions = dict[int, list[tuple[str, str]]]  # number of an op → (action, unit)


class Emitted(NamedTuple):
    """A call of the schedule's own, as a trace reads it."""

    name: str
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    accumulates: tuple[Any, ...]
    run: Callable[[], object]


Emit = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model over `world` ranks. Buffers are handles or tensors, by unit."""

    world: int
    buckets: dict[str, Bucket]
    starts: dict[str, int]  # parameter → its first element in the flat range of all units
    owner: dict[str, tuple[str, str]]  # the handles of a parameter's value and gradient → its unit, and the parameter
    values: dict[str, Any]  # whole, while a program needs them
    grads: dict[str, Any]
    value_parts: dict[str, Any]  # this rank's, always
    grad_parts: dict[str, Any]

    @classmethod
    def declare(cls, params: Sequence[Any], world: int) -> Units:
        """Of parameters with `name`, `value`, `grad` and `master`."""
        groups: dict[str, list[Any]] = {}
        for p in params:
            groups.setdefault(p.master.layer if p.master.layer.startswith("blocks.") else ROOT, []).append(p)
        buckets: dict[str, Bucket] = {}
        starts: dict[str, int] = {}
        owner: dict[str, tuple[str, str]] = {}
        end = 0
        for unit, own in groups.items():
            ordered = sorted(own, key=lambda p: len(p.master.shape) < 2)
            layout, step = flat("unit", [p.master for p in ordered]), world * align_of(own[0].master)
            size = -(-layout.shape[0] // step) * step
            matrices = sum(len(p.master.shape) >= 2 for p in ordered)
            decayed = (*layout.starts, layout.shape[0])[matrices]
            names = tuple(p.name for p in ordered)
            buckets[unit] = Bucket(names, end, end + size, size - layout.shape[0], decayed)
            for p, at in zip(ordered, layout.starts, strict=True):
                starts[p.name] = end + at
                owner |= {p.value.name: (unit, p.name), p.grad.name: (unit, p.name)}
            end += size

        def buffers(kind: str, form: Handle, role: Role, share: int) -> dict[str, Any]:
            type = BufferType.COMM if role == "activations" else BufferType.TEMP
            return {
                unit: Handle(f"{kind} of {unit}", ((b.stop - b.start) // share,), form.dtype, type, role, unit, form.device)
                for unit, b in buckets.items()
            }

        value, grad = params[0].value, params[0].grad
        return cls(
            world, buckets, starts, owner, buffers("values", value, "activations", 1), buffers("grads", grad, "activations", 1),
            buffers("part", value, "params", world), buffers("d part", grad, "grads", world),
        )  # fmt: skip

    def view(self, handle: Handle) -> Any:
        """The tensor of a parameter's value or gradient in its unit's."""
        unit, name = self.owner[handle.name]
        whole = (self.grads if handle.role == "grads" else self.values)[unit]
        at, n = self.starts[name] - self.buckets[unit].start, handle.nbytes // handle.dtype.itemsize
        return whole[at : at + n].view(handle.shape)

    def schedule(self, steps: Sequence[Touch]) -> tuple[Actions, Actions]:
        """What to do before and after each op."""
        of = {name: unit for unit, bucket in self.buckets.items() for name in bucket.names}
        before: Actions = {}
        after: Actions = {}
        uses: list[tuple[int, str]] = []  # (op, unit) where a unit must be there that was not
        held: dict[bool, str] = {}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for i, step in enumerate(steps):
            for unit in sorted({of[name] for name in step.reads}):
                if held.get(unit == ROOT) != unit:
                    held[unit == ROOT] = unit
                    uses.append((i, unit))
            for unit in {of[name] for name in step.writes}:
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
        self, steps: Sequence[Touch], mesh: Mesh | None, *, first: bool, emit: Emit | None, observe: Observe,
        observe_names: ObserveNames,
    ) -> Iterator[None]:  # fmt: skip
        """Inside runs the program of these steps. `first`: sums overwrite the parts, else they add. `emit` is where an
        observer outside wants each call, a trace or poison; None: nobody does."""
        works: dict[str, Any] = {}
        before, after = self.schedule(steps)
        act = partial(self._act, mesh, works, first=first, emit=emit or _run)
        if emit is None:
            with follow(steps, _bound(before, act), _bound(after, act), observe_names):
                yield
            return
        clock = 0

        def see(call: Any) -> None:
            nonlocal clock
            for action, unit in before.get(clock, ()):
                act(action, unit)
            emit(self._by_unit(call))
            for action, unit in after.get(clock, ()):
                act(action, unit)
            clock += 1

        with observe(see):
            yield

    def _act(self, mesh: Any, works: dict[str, Any], action: str, unit: str, *, first: bool, emit: Emit) -> None:
        """On handles `mesh` is not looked at, for nothing runs."""
        values, grads = self.values[unit], self.grads[unit]
        part, total = self.value_parts[unit], self.grad_parts[unit]
        stream = f"{action.removeprefix('wait ')} {unit}"

        def gather() -> None:
            works[stream] = mesh.all_gather(part, out=values, wait=False)

        def reduce() -> None:
            works[stream] = mesh.reduce_scatter(grads, out=grads.view(self.world, -1)[mesh.rank], wait=False)

        def take() -> None:
            own = grads.view(self.world, -1)[mesh.rank]
            total.copy_(own) if first else total.add_(own)

        if action.startswith("wait"):
            if mesh is not None:
                mesh.wait(works.pop(stream, None))
            wait(stream)
            if action == "wait sum":
                emit(Emitted("take_sum", (grads,), (total,), (total,), take))
        elif action == "zero":
            emit(Emitted("zero", (), (grads,), (), lambda: grads.zero_()))
        else:
            with start(stream):
                if action == "gather":
                    emit(Emitted("all_gather", (part,), (values,), (), gather))
                else:
                    emit(Emitted("reduce_scatter", (grads,), (grads,), (grads,), reduce))

    def _by_unit(self, call: Any) -> Any:
        """On handles a parameter or gradient stands for its unit's buffer, of which an op writes a part."""
        if not any(isinstance(h, Handle) for h in (*call.reads, *call.writes)):
            return call

        def swap(h: Handle) -> Any:
            unit, _ = self.owner.get(h.name, (None, None))
            return h if unit is None else (self.grads if h.role == "grads" else self.values)[unit]

        writes = tuple(map(swap, call.writes))
        parts = tuple(w for w, h in zip(writes, call.writes, strict=True) if w is not h)
        return Emitted(call.name, tuple(map(swap, call.reads)), writes, (*map(swap, call.accumulates), *parts), call.run)


def _run(call: Any) -> None:
    call.run()


def _bound(actions: Mapping[int, Sequence[tuple[str, str]]], act: Callable[[str, str], None]) -> dict[int, list[Work]]:
    return {i: [partial(act, *what) for what in todo] for i, todo in actions.items()}


def gathered(units: Units, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Every parameter whole, flat, in memory of its own: a collective, called on all ranks."""
    found: dict[str, torch.Tensor] = {}
    for unit, bucket in units.buckets.items():
        part = units.value_parts[unit]
        whole = torch.empty(bucket.stop - bucket.start, dtype=part.dtype, device=part.device)
        mesh.all_gather(part, out=whole)
        found |= {name: whole[units.starts[name] - bucket.start :] for name in bucket.names}
    return found
