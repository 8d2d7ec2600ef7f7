"""Runs a program on handles to find the live ranges of each buffer: the ops between which its value is needed.

The plan comes from a trace of the program, not from a second description of the program. `trace` runs the functions of
training with handles instead of tensors. The observe hook reports each op as a call with `name`, `reads`, `writes` and
`accumulates`. A live range [first, last] of op indices is the life of one value, by these rules:

    read          the value is needed until here; reading a buffer that was never written is an error
    overwrite     a new value begins here, and the old one ended at its last read
    accumulate    a read and a write: the value continues, as with an op that works in place
    persistent    params, frozen, grads, optimizer, cache and inputs keep their value for the whole program
    flat handle   counts as all buffers in its range
    side stream   buffers that its ops read or write stay alive until the program waits for the stream

A trace assumes that an op overwrites all of an output, unless the op declares it as accumulated. So an op that writes only a
part of an output must declare it as accumulated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch

from ..types import ROLES, BufferType, Role
from .plan import Request

Range = tuple[int, int]
T = TypeVar("T")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Handle:
    """A buffer before it is allocated. Handles with the same name are the same buffer, whatever their shapes. A row of a matrix
    with a `pitch` begins that many elements after the previous row, as with cuBLAS's leading dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    type: BufferType
    role: Role = "activations"
    layer: str = ""
    device: torch.device = _CPU
    pitch: int | None = None
    multiple: int = 1  # on a CPU, persistent buffers have room for a multiple of this many elements

    def __post_init__(self) -> None:
        if self.pitch is not None and (len(self.shape) != 2 or self.pitch < self.shape[1]):
            raise ValueError(
                f"handle {self.name!r} of shape {self.shape} has pitch={self.pitch}; accepted: for a matrix, at least its "
                "number of columns; otherwise None"
            )
        if any(size < 0 for size in self.shape):
            raise ValueError(f"handle {self.name!r} has shape={self.shape}; accepted: sizes ≥ 0")
        if self.role not in ROLES:
            raise ValueError(f"handle {self.name!r} has role={self.role!r}; accepted: {', '.join(ROLES)}")

    @property
    def nbytes(self) -> int:
        elements = math.prod(self.shape) if self.pitch is None else self.shape[0] * self.pitch
        return elements * self.dtype.itemsize

    def view(self, *shape: int) -> Handle:
        """The same buffer in another shape, by torch's rules for a contiguous tensor."""
        if self.pitch is not None:
            raise ValueError(f"handle {self.name!r} has pitch={self.pitch}, so it has no view as {shape}")
        try:
            view = torch.empty(self.shape, device="meta").view(*shape)
        except RuntimeError as error:
            raise ValueError(f"handle {self.name!r} of shape {self.shape} has no view as {shape}: {error}") from None
        return dataclasses.replace(self, shape=tuple(view.shape))


@dataclass(frozen=True, slots=True)
class FlatHandle(Handle):
    """One flat range over adjacent buffers of one role and dtype, with alignment padding between them. `starts` are the
    positions of the first elements of the buffers. `arena.flat` makes a flat handle; `part` makes a slice of it, which begins
    `skipped` elements into the range."""

    buffers: tuple[Handle, ...] = ()
    starts: tuple[int, ...] = ()
    skipped: int = 0

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each alignment gap, in elements, for a range that is not a `part` of another."""
        ends = (start + b.nbytes // b.dtype.itemsize for b, start in zip(self.buffers, self.starts, strict=True))
        return tuple((a, b) for a, b in zip(ends, (*self.starts[1:], *self.shape), strict=True) if a < b)

    def part(self, start: int, stop: int) -> FlatHandle:
        """Elements [start, stop) of this range. A trace counts this as a use of all of its buffers."""
        return dataclasses.replace(self, shape=(stop - start,), skipped=self.skipped + start)


class Call(Protocol):
    """One call of an op, as the observe hook reports it."""

    @property
    def name(self) -> str: ...
    @property
    def reads(self) -> tuple[object, ...]: ...
    @property
    def writes(self) -> tuple[object, ...]: ...
    @property
    def accumulates(self) -> tuple[object, ...]: ...
    @property
    def run(self) -> Callable[[], None]: ...


Observe = Callable[[Callable[[Any], None]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Trace:
    """`ops` in the order in which they ran, the buffers by name in the order of their first use, and the live ranges of
    each buffer. `places`: buffer of the flat range of activations → its offset in bytes from the start of the range."""

    ops: tuple[str, ...]
    handles: Mapping[str, Handle]
    live: Mapping[str, tuple[Range, ...]]
    places: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def requests(self, role: Role) -> tuple[Request, ...]:
        return tuple(Request(h.name, h.nbytes, self.live[h.name]) for h in self.handles.values() if h.role == role)


def trace(program: Callable[[], object], observe: Observe, tree: object = ()) -> Trace:
    """Runs `program` on handles. Persistent handles in `tree` are included even if the program does not use them. They come
    first, in the order of `tree`, so that the arenas have parameters and gradients in the order of declaration."""
    recorder = _Recorder()
    for handle in handles(tree):
        if handle.role != "activations":
            recorder.declare(handle)
    with observe(recorder.call), watch_streams(recorder.mark):
        program()
    return recorder.finish()


def handles(tree: object) -> Iterator[Handle]:
    """The handle of every buffer in a tree of dataclasses, tuples, lists and dicts, in order."""
    if isinstance(tree, FlatHandle):
        yield from tree.buffers
    elif isinstance(tree, Handle):
        yield tree
    else:
        for child in _children(tree):
            yield from handles(child)


def bind(tree: T, view: Callable[[Handle], object]) -> T:
    """The same tree with `view(handle)` instead of each handle. Subtrees in which nothing changes are not copied, and an object
    that occurs several times is bound once, unless it is a handle."""
    bound: dict[int, Any] = {}  # by id

    def bind_subtree(tree: Any) -> Any:
        if isinstance(tree, Handle):
            return view(tree)
        if id(tree) not in bound:
            bound[id(tree)] = rebuilt(tree)
        return bound[id(tree)]

    def rebuilt(tree: Any) -> Any:
        old = _children(tree)
        new = [bind_subtree(child) for child in old]
        if all(map(operator.is_, old, new)):
            return tree
        if isinstance(tree, dict):
            return type(tree)(zip(tree, new, strict=True))
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*new)
        if isinstance(tree, list | tuple):
            return type(tree)(new)
        kind: type = type(tree)
        return dataclasses.replace(tree, **dict(zip(_init_fields(kind), new, strict=True)))

    return cast(T, bind_subtree(tree))


def _children(tree: object) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    if isinstance(tree, list | tuple):
        return list(tree)
    kind: type = type(tree)
    return [getattr(tree, name) for name in _init_fields(kind)]


@functools.cache
def _init_fields(kind: type) -> tuple[str, ...]:
    """The names of the arguments of a dataclass; () for any other type."""
    return (
        tuple(field.name for field in dataclasses.fields(kind) if field.init) if dataclasses.is_dataclass(kind) else ()
    )


_streams: ContextVar[Callable[[str, str], None] | None] = ContextVar("tilegrad_streams", default=None)


@contextmanager
def watch_streams(mark: Callable[[str, str], None]) -> Iterator[None]:
    """In this context, `start` and `wait` call `mark` with "start", "issued" or "wait" and the name of the side stream."""
    token = _streams.set(mark)
    try:
        yield
    finally:
        _streams.reset(token)


@contextmanager
def start(stream: str) -> Iterator[None]:
    """Ops in this context run on a side stream, after all ops called before. This only marks the trace. With real tensors it
    does nothing, because the op chooses its stream itself."""
    mark = _streams.get()
    if mark:
        mark("start", stream)
    yield
    if mark:
        mark("issued", stream)


def wait(stream: str) -> None:
    """Later ops run after all ops that were started on the side stream. Like `start`, this only marks the trace."""
    mark = _streams.get()
    if mark:
        mark("wait", stream)


def _without_shape(handle: Handle) -> tuple[object, ...]:
    return type(handle), handle.dtype, handle.type, handle.role, handle.layer, handle.device


class _Recorder:
    def __init__(self) -> None:
        self.ops: list[str] = []
        self.handles: dict[str, Handle] = {}
        self.live: dict[str, list[list[int]]] = {}
        self.places: dict[str, int] = {}
        self.stream: str | None = None
        # side stream → buffer that its ops read or write → whether they write the buffer
        self.in_flight: dict[str, dict[str, bool]] = {}

    def declare(self, handle: Handle) -> None:
        first = self.handles.setdefault(handle.name, handle)
        if first is not handle and (_without_shape(handle), handle.nbytes) != (_without_shape(first), first.nbytes):
            raise ValueError(f"two buffers are named {handle.name!r}: {first} and {handle}. Rename one")

    def call(self, call: Call) -> None:
        for handle in (*call.reads, *call.writes):
            if not isinstance(handle, Handle):
                raise TypeError(
                    f"op {call.name!r} was traced with a {type(handle).__name__}: a traced program runs on handles only"
                )
            if isinstance(handle, FlatHandle) and handle.role == "activations":
                self.place(handle)
        for handle in handles((call.reads, call.writes)):
            self.declare(handle)
        read = {handle.name for handle in handles((call.reads, call.accumulates))}
        written = {handle.name for handle in handles(call.writes)}
        self._check_streams(call.name, read, written)
        touched = self.in_flight[self.stream] if self.stream is not None else {}
        extended = read | (written & touched.keys())  # buffers that a side stream has touched are alive until the wait
        for name in sorted(extended):
            self._extend(name, call.name)
        for name in sorted(written - extended):
            if self.handles[name].role == "activations":
                self.live.setdefault(name, []).append([len(self.ops), len(self.ops)])
        for name in read | written:
            touched[name] = touched.get(name, False) or name in written
        self.ops.append(call.name)

    def place(self, flat: FlatHandle) -> None:
        places = {h.name: at * flat.dtype.itemsize for h, at in zip(flat.buffers, flat.starts, strict=True)}
        if self.places and self.places != places:
            raise ValueError(
                f"flat range {flat.name!r} of activations differs from an earlier one; accepted: one flat range"
            )
        self.places = places

    def _extend(self, name: str, op: str) -> None:
        if self.handles[name].role != "activations":
            return
        if name not in self.live:
            raise ValueError(
                f"op {op!r} (number {len(self.ops)}) reads {name!r}, which nothing has written: write it first, "
                "or give it the role of a persistent buffer"
            )
        self.live[name][-1][1] = len(self.ops)

    def _check_streams(self, op: str, read: set[str], written: set[str]) -> None:
        for stream, touched in self.in_flight.items():
            if stream == self.stream:
                continue
            for name, in_write in touched.items():
                if name in written or (in_write and name in read):
                    raise ValueError(
                        f"op {op!r} (number {len(self.ops)}) {'writes' if name in written else 'reads'} {name!r} while "
                        f"side stream {stream!r} still {'writes' if in_write else 'reads'} it: "
                        f"call wait({stream!r}) first"
                    )

    def mark(self, event: str, stream: str) -> None:
        if event == "start":
            if self.stream is not None:
                raise ValueError(f"start({stream!r}) inside start({self.stream!r}): leave one before entering another")
            self.in_flight.setdefault(stream, {})
            self.stream = stream
        elif event == "issued":
            self.stream = None
        else:
            if stream not in self.in_flight or self.stream == stream:
                raise ValueError(f"wait({stream!r}) has nothing to wait for: call it after `with start({stream!r})`")
            for name in self.in_flight.pop(stream):
                if name in self.live:
                    self.live[name][-1][1] = len(self.ops)
            self.ops.append(f"wait {stream}")

    def finish(self) -> Trace:
        if self.in_flight:
            raise ValueError(
                f"the program ends with side streams {sorted(self.in_flight)} in flight: wait() for each of them"
            )
        all_ops = ((0, max(len(self.ops) - 1, 0)),)
        live = {
            name: all_ops if handle.role != "activations" else tuple((first, last) for first, last in self.live[name])
            for name, handle in self.handles.items()
        }
        return Trace(
            tuple(self.ops), MappingProxyType(self.handles), MappingProxyType(live), MappingProxyType(self.places)
        )
