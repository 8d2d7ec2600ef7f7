"""A planned program's memory: one allocation per role, and every buffer a view of one.

`plan_memory` packs what a trace found. Buffers of a persistent role follow each other in the order of declaration, so
params, grads and each optimizer moment of one model have the same layout: `flat` is a handle over such a range of buffers,
and a slice of the arena is a bucket of gradients. Activations share addresses where their live ranges allow. `Arenas` then
allocates exactly `peak_bytes`.

To check a plan, `Arenas.poison` before a step and `poison_dead` during one overwrite every byte that holds no value. If that
changes the result of the step, a live range in the plan is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..types import ROLES, Role
from .plan import Plan, Request, plan
from .trace import Call, FlatHandle, Handle, Observe, Trace, handles, watch_streams

_POISON_FLOAT = 0xFF  # all ones is a NaN in every IEEE-like format
_POISON_INT = 0xCB  # out of range as an index, and rare as data


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte of a program before the first is allocated."""

    trace: Trace
    arenas: Mapping[Role, Plan]
    device: torch.device

    @property
    def peak_bytes(self) -> int:
        """What is allocated: the sum of all arenas, for as long as they exist."""
        return sum(arena.arena_bytes for arena in self.arenas.values())


def alignment(device: torch.device) -> int:
    """Every offset in an arena on this device is a multiple of so many bytes."""
    return 256 if device.type == "cuda" else 64


def _room(buffer: Handle) -> int:
    """Bytes of a persistent buffer in its arena. On CUDA a multiple of 128 elements, so that a run of float32 and a run of
    its bfloat16 copies have the same layout, in elements, and one kernel writes both."""
    size = buffer.dtype.itemsize
    return -(-buffer.nbytes // (128 * size)) * 128 * size if buffer.device.type == "cuda" else buffer.nbytes


def flat(name: str, buffers: Sequence[Handle]) -> FlatHandle:
    """A handle over `buffers`, which a persistent arena holds in this order with nothing else between them."""
    first, size = buffers[0], buffers[0].dtype.itemsize
    for b in buffers:
        if b.role == "activations" or (b.dtype, b.role, b.device) != (first.dtype, first.role, first.device):
            raise ValueError(
                f"{name}: got {b.name!r}, {b.dtype} in {b.role} on {b.device}; "
                f"accepted: persistent buffers of one dtype, role and device, those of {first.name!r}"
            )
    layout = plan([Request(b.name, _room(b), ((0, 0),)) for b in buffers], align=alignment(first.device), share=False)
    return FlatHandle(
        name, (layout.arena_bytes // size,), first.dtype, first.type, first.role, first.layer, first.device,
        buffers=tuple(buffers), starts=tuple(layout.offsets[b.name] // size for b in buffers),
    )  # fmt: skip


def plan_memory(trace: Trace, *, align: int | None = None, share: bool = True) -> MemoryPlan:
    """One plan per role that the trace holds. `align` is 64 bytes, on CUDA 256, unless given."""
    devices = {handle.device for handle in trace.handles.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the traced program has buffers on {', '.join(sorted(map(str, devices)))}: an arena is on one device, "
            "trace one program for each"
        )
    device = devices.pop() if devices else torch.device("cpu")
    if align is None:
        align = alignment(device)
    arenas = {
        role: plan(requests, align=align, share=share and role == "activations")
        for role in ROLES
        if (requests := _requests(trace, role))
    }
    return MemoryPlan(trace, MappingProxyType(arenas), device)


def _requests(trace: Trace, role: Role) -> tuple[Request, ...]:
    requests = trace.requests(role)
    if role == "activations":
        return requests
    return tuple(replace(request, nbytes=_room(trace.handles[request.name])) for request in requests)


class Arenas:
    """The memory of a plan, zeroed. `view` is what `bind` needs to turn the traced handles into tensors."""

    def __init__(self, memory: MemoryPlan) -> None:
        self.plan = memory
        self.bytes: Mapping[Role, torch.Tensor] = MappingProxyType(
            {
                role: torch.zeros(arena.arena_bytes, dtype=torch.uint8, device=memory.device)
                for role, arena in memory.arenas.items()
            }
        )
        for role, allocation in self.bytes.items():
            align = memory.arenas[role].align
            if allocation.data_ptr() % align:
                raise ValueError(
                    f"align={align} is more than an allocation on {memory.device} has: plan with a smaller alignment"
                )

    @property
    def nbytes(self) -> int:
        return sum(allocation.untyped_storage().nbytes() for allocation in self.bytes.values())

    def view(self, handle: Handle) -> torch.Tensor | Handle:
        """The tensor of a planned buffer. A handle that the program never touched has no memory and stays a handle."""
        arena = self.plan.arenas.get(handle.role)
        if arena is None or any(buffer.name not in arena.offsets for buffer in handles(handle)):
            return handle
        return self._bytes(handle).view(handle.dtype).view(handle.shape)

    def poison(self, role: Role = "activations") -> None:
        """Fill an arena with NaN, in whatever float format it is read. Integers read as −1."""
        if role in self.bytes:
            self.bytes[role].fill_(_POISON_FLOAT)

    def poison_value(self, handle: Handle) -> None:
        """Overwrites one buffer: NaN, or 0xCB in each byte of integers and booleans."""
        is_float = handle.dtype.is_floating_point or handle.dtype.is_complex
        self._bytes(handle).fill_(_POISON_FLOAT if is_float else _POISON_INT)

    def _bytes(self, handle: Handle) -> torch.Tensor:
        if isinstance(handle, FlatHandle):
            return self._flat_bytes(handle)
        start = self.plan.arenas[handle.role].offsets[handle.name]
        planned = self.plan.trace.handles[handle.name].nbytes
        if handle.nbytes > planned:
            raise ValueError(f"{handle.name}: got {handle.nbytes} bytes; accepted: at most the {planned} of the plan")
        return self.bytes[handle.role][start : start + handle.nbytes]

    def _flat_bytes(self, handle: FlatHandle) -> torch.Tensor:
        offsets, planned = self.plan.arenas[handle.role].offsets, self.plan.trace.handles
        base = offsets[handle.buffers[0].name]
        for buffer, start in zip(handle.buffers, handle.starts, strict=True):
            at = offsets[buffer.name] - base, planned[buffer.name].nbytes
            if at != (start * handle.dtype.itemsize, buffer.nbytes):
                raise ValueError(
                    f"{handle.name}: got {buffer.name!r} of {buffer.nbytes} bytes at {start * handle.dtype.itemsize}; "
                    f"accepted: the {at[1]} bytes at {at[0]} of the plan"
                )
        base += handle.skipped * handle.dtype.itemsize
        return self.bytes[handle.role][base : base + handle.nbytes]


@contextmanager
def poison_dead(arenas: Arenas, observe: Observe) -> Iterator[None]:
    """Inside, after each op every value whose live range ends there is overwritten. Run the whole traced program, bound to
    `arenas`, inside: it raises if the ops differ from the trace."""
    trace = arenas.plan.trace
    ending: dict[int, list[Handle]] = {}
    for handle in trace.handles.values():
        if handle.role == "activations":
            for _, last in trace.live[handle.name]:
                ending.setdefault(last, []).append(handle)
    clock = 0

    def tick(op: str) -> None:
        nonlocal clock
        expected = trace.ops[clock] if clock < len(trace.ops) else "the end"
        if op != expected:
            raise RuntimeError(
                f"op number {clock} is {op!r}, in the trace {expected!r}: trace and plan this program again"
            )
        for handle in ending.get(clock, ()):
            arenas.poison_value(handle)
        clock += 1

    def run(call: Call) -> None:
        call.run()
        tick(call.name)

    def mark(event: str, stream: str) -> None:
        if event == "wait":
            tick(f"wait {stream}")

    with observe(run), watch_streams(mark):
        yield
    if clock != len(trace.ops):
        raise RuntimeError(f"the program ended after {clock} of {len(trace.ops)} traced ops: run all of it")
