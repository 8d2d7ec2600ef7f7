"""How every op is called, and how calls are observed.

An op is a function that never allocates: positional tensors are read, keyword-only tensors are written. `@op` marks it. While
an observer is set, a call is passed to it as a `Call` instead of being run. There are two observers. The memory trace derives
live ranges from calls. `poison_dead` (memory/planned/arena.py) runs each call, then fills every dead buffer with NaN to expose
wrong live ranges. A name observer gets only the op's name and a function that runs it, which costs a microsecond per call:
`follow` (dist/schedule.py) uses it to start collectives between ops. Without an observer the op runs directly.

`record` lists the calls of kernels that a program makes on fixed buffers, so that they can be repeated without checks and
selection. It does on a CPU what a CUDA graph does on a device. A kernel in C++ returns its call of the native library,
which is then repeated without the kernel's Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: the tensors (or handles) it reads, writes, and adds to. `run` executes it."""

    name: str
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    accumulates: tuple[Any, ...]  # tensors of `writes` whose old value is also read
    run: Callable[[], None]


Observer = Callable[[Call], None]
NameObserver = Callable[[str, Callable[[], None]], None]


class _ByName(NamedTuple):
    observer: NameObserver


Calls = list[Callable[[], object]]


class _Recorder(NamedTuple):
    calls: Calls


_observer: ContextVar[Observer | _ByName | _Recorder | None] = ContextVar("tilegrad_observer", default=None)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Passes every op called inside to `observer` instead of running it."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def observe_names(observer: NameObserver) -> Iterator[None]:
    """Passes the name of every op called inside, and a function that runs it, to `observer` instead of running it."""
    token = _observer.set(_ByName(observer))
    try:
        yield
    finally:
        _observer.reset(token)


@contextmanager
def record() -> Iterator[Calls]:
    """Runs every op called inside, and lists the calls. Calling these in order repeats the ops, as long as the tensors, the
    number of threads and TILEGRAD_ISA do not change. An op with `one_kernel` is listed as its kernel's call, any other as
    itself."""
    calls: Calls = []
    token = _observer.set(_Recorder(calls))
    try:
        yield calls
    finally:
        _observer.reset(token)


def run_and_list(call: Callable[[], Callable[[], None] | None]) -> None:
    """Runs the call of a kernel, and lists it inside `record`. If the call returns a function that repeats it, that is
    listed."""
    again = call()
    observer = _observer.get()
    if isinstance(observer, _Recorder):
        observer.calls.append(again or call)


def emitter() -> Observer | None:
    """The current observer, for code that adds its own calls to a traced program; None if calls run directly."""
    observer = _observer.get()
    return None if isinstance(observer, _ByName | _Recorder) else observer


def op(
    *, accumulates: tuple[str, ...] = (), adds: tuple[str, ...] = (), one_kernel: bool = False
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Marks a function as an op. Written arguments are overwritten, except those named in `accumulates` (parameter gradients:
    accumulated unless the call passes accumulate=False) and in `adds` (the residual stream: always accumulated).
    one_kernel: after its checks, the op only calls `Table.run` or `run_and_list`, once."""

    def mark(fn: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(fn)
        def call(*reads: P.args, **writes: P.kwargs) -> None:
            observer = _observer.get()
            if observer is None:
                fn(*reads, **writes)
                return
            if isinstance(observer, _Recorder) and one_kernel:
                fn(*reads, **writes)
                return
            token = _observer.set(None)  # ops called by an op are not reported
            if isinstance(observer, _Recorder):
                try:
                    fn(*reads, **writes)
                finally:
                    _observer.reset(token)
                observer.calls.append(functools.partial(fn, *reads, **writes))
                return
            if isinstance(observer, _ByName):
                try:
                    observer.observer(fn.__name__, functools.partial(fn, *reads, **writes))
                finally:
                    _observer.reset(token)
                return
            added = (*adds, *(accumulates if writes.get("accumulate", True) else ()))
            try:
                observer(
                    Call(
                        fn.__name__,
                        reads=tuple(_tensors(reads)),
                        writes=tuple(_tensors(writes.values())),
                        accumulates=tuple(_tensors(writes.get(name) for name in added)),
                        run=functools.partial(fn, *reads, **writes),
                    )
                )
            finally:
                _observer.reset(token)

        return call

    return mark


def _tensors(values: Any) -> Iterator[Any]:
    """Tensors and handles among arguments, including those in a mask, a list or a dict of scratch."""
    for value in values:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            yield value
        elif hasattr(value, "tensors"):
            yield from value.tensors
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list):
            yield from _tensors(value)
