"""The memory of a planned program: one allocation (arena) per role. Every buffer is a view of an arena.

`plan_memory` computes the arenas of a trace; plan.py packs the buffers of an arena. Buffers of a persistent role follow
each other in the order of declaration, so params, grads and each optimizer moment of one model have the same layout. `flat`
is a handle over a range of such buffers, for example a bucket of gradients. Activations that are never alive together may
share addresses. There may be one flat range of activations, at the start of the arena; other activations may share the
address of one of its buffers while that buffer is not alive. `Arenas` allocates a plan: exactly its `peak_bytes`.

To check a plan, `Arenas.poison` before a step and `poison_dead` during the step overwrite every byte of the activations
that has no live value. If this changes the result of the step, a live range in the plan is wrong.
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
_POISON_INT = 0xCB  # an integer of these bytes is out of range as an index, and rare as a value


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size and layout of all arenas. Nothing is allocated."""

    trace: Trace
    arenas: Mapping[Role, Plan]
    device: torch.device

    @property
    def peak_bytes(self) -> int:
        """The sum of the sizes of all arenas, which `Arenas` allocates."""
        return sum(arena.arena_bytes for arena in self.arenas.values())


def alignment(device: torch.device) -> int:
    """The alignment of arenas on this device: every offset is a multiple of this many bytes."""
    return 256 if device.type == "cuda" else 64


def _room(buffer: Handle) -> int:
    """The padded bytes of a persistent buffer, or of a buffer in a flat range. On CUDA this is a multiple of 128 elements. Then
    float32 parameters and their bfloat16 copies have the same layout in elements, and one kernel writes the parameters and the
    copies. On a CPU, `multiple` gives parameters and copies the same layout."""
    step = (128 if buffer.device.type == "cuda" else buffer.multiple) * buffer.dtype.itemsize
    return -(-buffer.nbytes // step) * step


def flat(name: str, buffers: Sequence[Handle]) -> FlatHandle:
    """A handle over `buffers`, which are adjacent and in this order in their arena."""
    first, size = buffers[0], buffers[0].dtype.itemsize
    for b in buffers:
        if (b.dtype, b.role, b.device) != (first.dtype, first.role, first.device):
            raise ValueError(
                f"{name}: got {b.name!r}, {b.dtype} in {b.role} on {b.device}; "
                f"accepted: buffers with the dtype, role and device of {first.name!r}"
            )
    layout = plan([Request(b.name, _room(b), ((0, 0),)) for b in buffers], align=alignment(first.device), share=False)
    return FlatHandle(
        name,
        (layout.arena_bytes // size,),
        first.dtype,
        first.type,
        first.role,
        first.layer,
        first.device,
        buffers=tuple(buffers),
        starts=tuple(layout.offsets[b.name] // size for b in buffers),
    )


def plan_memory(trace: Trace, *, align: int | None = None, share: bool = True) -> MemoryPlan:
    """The plan of an arena for each role in the trace. `align` defaults to 64 bytes, on CUDA to 256."""
    devices = {handle.device for handle in trace.handles.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the traced program has buffers on {', '.join(sorted(map(str, devices)))}; accepted: buffers on "
            "one device; trace one program per device"
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
    return tuple(
        request
        if role == "activations" and request.name not in trace.places
        else replace(request, nbytes=_room(trace.handles[request.name]), offset=trace.places.get(request.name))
        for request in trace.requests(role)
    )


class Arenas:
    """The allocated memory of a plan, zeroed. Pass `view` to `bind` to turn the traced handles into tensors."""

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
                    f"align: got {align}, but the address that torch allocated on {memory.device} is not a multiple of it; "
                    "plan with a smaller align"
                )

    @property
    def nbytes(self) -> int:
        return sum(allocation.untyped_storage().nbytes() for allocation in self.bytes.values())

    def view(self, handle: Handle) -> torch.Tensor | Handle:
        """The tensor of a planned buffer. A handle that the program never used has no memory and is returned unchanged."""
        arena = self.plan.arenas.get(handle.role)
        if arena is None or any(buffer.name not in arena.offsets for buffer in handles(handle)):
            return handle
        elements = self._bytes(handle).view(handle.dtype)
        if handle.pitch is not None:
            return elements.view(-1, handle.pitch)[:, : handle.shape[1]]
        return elements.view(handle.shape)

    def poison(self, role: Role = "activations") -> None:
        """Fills an arena with bytes that are NaN in every IEEE-like float format and −1 as signed integers."""
        if role in self.bytes:
            self.bytes[role].fill_(_POISON_FLOAT)

    def poison_value(self, handle: Handle) -> None:
        """Overwrites one buffer with NaN, or with 0xCB in each byte of integers and booleans."""
        is_float = handle.dtype.is_floating_point or handle.dtype.is_complex
        self._bytes(handle).fill_(_POISON_FLOAT if is_float else _POISON_INT)

    def _bytes(self, handle: Handle) -> torch.Tensor:
        if isinstance(handle, FlatHandle):
            return self._flat_bytes(handle)
        start = self.plan.arenas[handle.role].offsets[handle.name]
        planned = self.plan.trace.handles[handle.name].nbytes
        if handle.nbytes > planned:
            raise ValueError(f"{handle.name}: got {handle.nbytes} bytes; accepted: at most {planned}, as planned")
        return self.bytes[handle.role][start : start + handle.nbytes]

    def _flat_bytes(self, handle: FlatHandle) -> torch.Tensor:
        offsets, planned = self.plan.arenas[handle.role].offsets, self.plan.trace.handles
        base = offsets[handle.buffers[0].name]
        for buffer, start in zip(handle.buffers, handle.starts, strict=True):
            expected = offsets[buffer.name] - base, planned[buffer.name].nbytes
            if expected != (start * handle.dtype.itemsize, buffer.nbytes):
                raise ValueError(
                    f"{handle.name}: got {buffer.name!r} of {buffer.nbytes} bytes at {start * handle.dtype.itemsize}; "
                    f"accepted: {expected[1]} bytes at {expected[0]}, as planned"
                )
        base += handle.skipped * handle.dtype.itemsize
        return self.bytes[handle.role][base : base + handle.nbytes]


@contextmanager
def poison_dead(arenas: Arenas, observe: Observe) -> Iterator[None]:
    """In this context, after each op, every value whose live range ends at this op is overwritten. Run the whole traced
    program, bound to `arenas`, in the context. Raises if the ops differ from the trace."""
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
                f"op number {clock} is {op!r}, but {expected!r} in the trace; trace and plan this program again"
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
        raise RuntimeError(f"the program ended after {clock} of {len(trace.ops)} traced ops; run all of it")
