"""How every op of the package is called: which kernel runs, and how a call is watched.

**Selection** is the table `ATTENTION`: the first row that takes a call runs it. A row is refused with a reason, and
nothing falls back silently: a kernel asked for by name runs or raises. The names of the table are the public ones.

**Watching.** An op is a function in the style of the first law: positional tensors are read, keyword-only tensors are written.
`@op` marks it. While an observer is set, a call is handed to it as a `Call` instead of being run: the memory trace
reads live ranges off it, the poisoner runs it and then spoils what is dead. Without an observer a call is the function.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec

from . import native_library

P = ParamSpec("P")


class Problem(NamedTuple):
    """A call of attention as the table sees it; only shapes, dtypes, devices and options are read."""

    q: Any
    k: Any
    v: Any
    mask: Any
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row: `refuses` says why this kernel can't run a problem, or None; `by_name_only` why it is never chosen unasked.

    Its module offers `fwd`, `bwd` and `workspace` in the form of kernels/attention/contract.py.
    """

    name: str
    module: str
    refuses: Callable[[Problem], str | None]
    by_name_only: str | None = None

    def load(self) -> ModuleType:
        return importlib.import_module(f"{__package__}.attention.{self.module}")


def _takes_all(problem: Problem) -> None:
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


MOST_HEADS = 65535


def _triton_refuses(problem: Problem) -> str | None:
    device, dtype = problem.q.device, str(problem.q.dtype)
    if not _has_triton():
        return "needs Triton, which is not installed (pip install triton)"
    if dtype == "torch.float64":
        return "takes float16, bfloat16 and float32, not float64"
    if problem.k.shape[1] > MOST_HEADS:
        return f"takes up to {MOST_HEADS} kv heads, an axis of CUDA's grid, not {problem.k.shape[1]}"
    if device.type == "cpu":
        in_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
        return (
            None if in_interpreter else "needs a CUDA device; on the CPU only Triton's interpreter, TRITON_INTERPRET=1"
        )
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0 or newer, and {device} has {major}.{minor}"


FEW_ROWS, FEW_TILES = 16, 64  # up to here triton shares the columns of a row among programs
SHORT, MANY_SEQUENCES = 64, 256  # packed: of so many so short ones Hopper's programs spend their time looking for rows


def _hopper_refuses(problem: Problem) -> str | None:
    q, k, v, mask, _ = problem
    d, dv, dtype = q.shape[-1], v.shape[-1], str(q.dtype).removeprefix("torch.")
    if not _has_triton():
        return "needs Triton, which is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "is Gluon, which has no interpreter (TRITON_INTERPRET=1)"
    if q.device.type != "cuda":
        return f"needs a Hopper GPU, not {q.device.type}"
    import torch
    import triton

    if not triton.__version__.startswith("3.6."):
        return f"calls the launcher of Triton 3.6, and {triton.__version__} is installed"

    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0, and {q.device} has {major}.{minor}"
    if dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {dtype}"
    if d != dv or d % 8 or d < 16:
        return f"takes one head dimension of 16 to 256 in steps of 8, not {d} for q and {dv} for v"
    for name in ("bias", "alibi_slopes"):
        if getattr(mask, name) is not None:
            return f"takes no {name}"
    if mask.dropout_p:
        return "takes no dropout"
    tq, tk = (mask.max_seqlen_q, mask.max_seqlen_k) if mask.varlen else (q.shape[2], k.shape[2])
    batch = mask.cu_seqlens_q.shape[0] - 1 if mask.varlen else q.shape[0]
    if tk == 0 or 0 in k.shape or 0 in q.shape:
        return "takes no empty tensors"
    if tq <= FEW_ROWS or 4 * tq <= tk and -(-tq // 128) * q.shape[1] * batch <= FEW_TILES:
        return "leaves few rows with many columns to triton, which shares the columns among programs"
    if mask.varlen and tq <= SHORT and batch > MANY_SEQUENCES:
        return (
            f"leaves more than {MANY_SEQUENCES} packed sequences of up to {SHORT} rows to triton, which is faster there"
        )
    from .attention.hopper_tma import refusal

    reasons = (refusal(name, x, mask.varlen) for name, x in (("q", q), ("k", k), ("v", v)))
    return next((reason for reason in reasons if reason), None)


def _native_refuses(problem: Problem) -> str | None:
    if problem.q.device.type != "cpu":
        return f"runs on the CPU, not on {problem.q.device.type}"
    if problem.mask.bias is not None:
        return "takes no bias"
    if problem.mask.dropout_p:
        return "takes no dropout"
    if max(*problem.q.shape, *problem.k.shape) >= 2**31:
        return "takes fewer than 2³¹ rows and columns"
    found = native_library.library()
    return found if isinstance(found, str) else None


ATTENTION: tuple[Kernel, ...] = (
    Kernel("hopper", "hopper_attention", _hopper_refuses),
    Kernel("triton", "triton_attention", _triton_refuses),
    Kernel("native", "native", _native_refuses),
    Kernel("tiled", "tiled", _takes_all),
    Kernel("reference", "reference", _takes_all, by_name_only="holds whole T×T matrices: the oracle, only by name"),
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which kernel would run, and for every kernel of the table the reason; printed, a table."""

    kernel: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(
            f"{'→' if name == self.kernel else ' '} {name:<{width}}  {reason}" for name, reason in self.reasons.items()
        )


def select(q: Any, k: Any, v: Any, mask: Any, *, kernel: str | None, deterministic: bool) -> Kernel:
    """The row that runs this call, or an error that says why none does and what would."""
    problem = Problem(q, k, v, mask, deterministic)
    for row in ATTENTION:
        wanted = row.by_name_only is None if kernel is None else row.name == kernel
        if wanted and row.refuses(problem) is None:
            return row
    refusals = {row.name: row.refuses(problem) for row in ATTENTION}
    if kernel is None:
        raise ValueError(f"attention: no kernel takes this call: {refusals}")
    if kernel not in refusals:
        raise ValueError(f"kernel: got {kernel!r}; accepted: None or one of {', '.join(map(repr, refusals))}")
    other = select(q, k, v, mask, kernel=None, deterministic=deterministic).name
    raise ValueError(f"kernel: got {kernel!r}, which can't run this call: {refusals[kernel]}; {other!r} would run it")


def explain(q: Any, k: Any, v: Any, mask: Any, *, kernel: str | None, deterministic: bool) -> Explanation:
    """What `select` chooses, with a reason for every row."""
    chosen = select(q, k, v, mask, kernel=kernel, deterministic=deterministic).name
    problem = Problem(q, k, v, mask, deterministic)
    reasons = {
        row.name: row.refuses(problem) or row.by_name_only or f"takes this call too; {chosen} goes before it"
        for row in ATTENTION
    }
    reasons[chosen] = (
        "runs: the first of the table that takes this call" if kernel is None else "runs: asked for by name"
    )
    return Explanation(chosen, reasons)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: the tensors (or handles) it reads, writes, and adds to. `run` executes it."""

    name: str
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    accumulates: tuple[Any, ...]  # a part of writes whose old value counts as read
    run: Callable[[], None]


Observer = Callable[[Call], None]
_observer: ContextVar[Observer | None] = ContextVar("tilegrad_observer", default=None)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Hand every op called inside to `observer` instead of running it."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def op(*, accumulates: tuple[str, ...] = ()) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Mark a function as an op; `accumulates` names the written arguments that are added to, not overwritten."""

    def mark(fn: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(fn)
        def call(*reads: P.args, **writes: P.kwargs) -> None:
            observer = _observer.get()
            if observer is None:
                fn(*reads, **writes)
                return
            token = _observer.set(None)  # an op that calls ops is one op
            try:
                observer(
                    Call(
                        fn.__name__,
                        reads=tuple(_tensors(reads)),
                        writes=tuple(_tensors(writes.values())),
                        accumulates=tuple(_tensors(writes.get(name) for name in accumulates)),
                        run=functools.partial(fn, *reads, **writes),
                    )
                )
            finally:
                _observer.reset(token)

        return call

    return mark


def _tensors(values: Any) -> Iterator[Any]:
    """Tensors and handles among arguments; a mask or a scratch dictionary stands for the tensors inside it."""
    for value in values:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            yield value
        elif hasattr(value, "tensors"):
            yield from value.tensors
        elif isinstance(value, dict):
            yield from _tensors(value.values())
