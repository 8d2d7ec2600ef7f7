"""How every op is called, and how calls are observed.

An op is a function that never allocates: positional tensors are read, keyword-only tensors are written. `@op` marks it. While
an observer is set, a call is passed to the observer as a `Call` instead of being run. For example, the memory trace derives
live ranges from calls, and `poison_dead` (memory/planned/arena.py) runs each call, then fills every dead buffer with NaN to
expose wrong live ranges. An observer of names receives only the op's name and a function that runs the op, at a cost of a
microsecond per call. `follow` (engine/dist/schedule.py) uses such an observer to start collectives between ops. Without an
observer the op runs directly.

`record` lists the calls that a program makes on fixed buffers, so that they can be repeated. A repeated call of a kernel
skips the op's checks and the selection of the kernel. This is for a CPU what a CUDA graph is for a GPU. A kernel in C++ returns
its call of the native library, so that a repetition skips the kernel's Python code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    accumulates: tuple[Any, ...]  # the tensors of `writes` whose old values are also read
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
def _observing(observer: Observer | _ByName | _Recorder) -> Iterator[None]:
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observe(observer: Observer) -> AbstractContextManager[None]:
    """Passes every op called inside to `observer` instead of running it."""
    return _observing(observer)


def observe_names(observer: NameObserver) -> AbstractContextManager[None]:
    """Passes the name of every op called inside to `observer`, with a function that runs the op. The op runs only if `observer`
    calls this function."""
    return _observing(_ByName(observer))


@contextmanager
def record() -> Iterator[Calls]:
    """Runs every op called inside, and lists the calls. Running the listed calls in order repeats the ops, as long as the
    tensors, the number of threads and TILEGRAD_ISA do not change. An op with `one_kernel` is listed as the call of its kernel,
    any other op as the call of the op."""
    calls: Calls = []
    with _observing(_Recorder(calls)):
        yield calls


def run_and_list(call: Callable[[], Callable[[], None] | None]) -> None:
    """Runs the call of a kernel. Inside `record`, lists the function that the kernel returned, or else the call."""
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
    """Marks a function as an op. Written arguments are overwritten, with two exceptions. The op adds to those named in
    `accumulates` (parameter gradients), unless the call passes accumulate=False. It always adds to those named in
    `adds` (the residual stream). one_kernel: after its checks, the op calls `Table.run` or `run_and_list` once."""

    def mark(fn: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(fn)
        def call(*reads: P.args, **writes: P.kwargs) -> None:
            observer = _observer.get()
            if observer is None or (isinstance(observer, _Recorder) and one_kernel):
                fn(*reads, **writes)
                return
            run = functools.partial(fn, *reads, **writes)
            token = _observer.set(None)  # ops called by an op are not reported
            try:
                if isinstance(observer, _Recorder):
                    run()
                    observer.calls.append(run)
                elif isinstance(observer, _ByName):
                    observer.observer(fn.__name__, run)
                else:
                    added = (*adds, *(accumulates if writes.get("accumulate", True) else ()))
                    observer(
                        Call(
                            fn.__name__,
                            reads=tuple(_tensors(reads)),
                            writes=tuple(_tensors(writes.values())),
                            accumulates=tuple(_tensors(writes.get(name) for name in added)),
                            run=run,
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
