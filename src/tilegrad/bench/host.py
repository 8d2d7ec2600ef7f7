"""The host time of attention: microseconds of a tiny call through autograd, of tilegrad and of SDPA, interleaved.

    forward    attend(q, k, v), with autograd                     no_grad    attend(q, k, v), without autograd
    backward   torch.autograd.grad of the output of a forward

Each time is the mean of CALLS consecutive calls. On CUDA the device is synchronized before and after the timed section, never
inside it. In a round every contender runs once, in an order that changes. `empty` is an autograd.Function in Python that
computes nothing: no such Function takes less time. An SDPA backend is chosen before the timer starts. torch has one thread, so
that no time is spent waiting for other threads.
"""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..engine.machine import device_or_default
from ..functional import attention
from ..text.environment import environment, print_results
from ..text.table import table
from .timing import Thunk

TINY = {"cuda": (1, 8, 128, 64), "cpu": (1, 2, 4, 16)}  # B, H, T, D
CALLS = 20
DIRECTIONS = ("forward", "no_grad", "backward")
BACKENDS = {"cuda": {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}, "cpu": {}}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: BackwardCFunction, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.saved_tensors  # noqa: B018  # this unpacks the saved tensors
        return do, do, do


Context = Callable[[], AbstractContextManager[object]]


def contenders(device: torch.device) -> dict[str, tuple[Attend, Context]]:
    """name → (call of attention, context in which it runs)"""
    peers: dict[str, Context] = {
        name: partial(sdpa_kernel, backend) for name, backend in BACKENDS[device.type].items()
    } or {"sdpa": nullcontext}
    return (
        {"tilegrad": (attention, nullcontext)}
        | {name: (F.scaled_dot_product_attention, context) for name, context in peers.items()}
        | {"empty": (_Empty.apply, nullcontext)}
    )


def _thunks(attend: Attend, leaves: Sequence[Tensor], do: Tensor) -> dict[str, Thunk]:
    q, k, v = leaves
    for _ in range(3):  # caches are warm from the second call on
        o = attend(q, k, v)
        torch.autograd.grad(o, leaves, do, retain_graph=True)

    def no_grad() -> None:
        with torch.no_grad():
            attend(q, k, v)

    return {
        "forward": lambda: attend(q, k, v),
        "no_grad": no_grad,
        "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
    }


def _microseconds(run: Thunk, device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else None
    if wait:
        wait()
    began = time.perf_counter_ns()
    for _ in range(CALLS):
        run()
    elapsed = time.perf_counter_ns() - began
    if wait:
        wait()
    return elapsed / CALLS / 1e3


def measure(
    device: torch.device, dtype: torch.dtype, repeats: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """(contender → direction → µs of each round, peer that was left out → the reason)"""
    b, h, t, d = TINY[device.type]
    leaves = [torch.randn(b, h, t, d, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    do = torch.randn_like(leaves[0])
    runs: dict[str, dict[str, Thunk]] = {}
    left_out: dict[str, str] = {}
    calls = contenders(device)
    for name, (attend, context) in calls.items():
        try:
            with context():
                runs[name] = _thunks(attend, leaves, do)
        except RuntimeError as error:  # the device or the build of torch does not have this backend
            if name == "tilegrad":
                raise
            left_out[name] = str(error).splitlines()[0]
    times: dict[str, dict[str, list[float]]] = {name: {direction: [] for direction in DIRECTIONS} for name in runs}
    names = list(runs)
    for round_ in range(-2, repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            with calls[name][1]():
                for direction, run in runs[name].items():
                    call_us = _microseconds(run, device)
                    if round_ >= 0:
                        times[name][direction].append(call_us)
    return times, left_out


def bench_host(
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    repeats: int = 200,
    json: bool = False,
    out: str | None = None,
) -> int:
    """Prints the median µs with the 20th and 80th percentile, and the median over the rounds of tilegrad's time divided by
    each peer's time."""
    where, kind = torch.device(device_or_default(device)), getattr(torch, dtype, None)
    if where.type not in TINY:
        raise ValueError(f"device: got {device!r}; accepted: 'cpu' or 'cuda'")
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}; accepted: a float dtype such as 'bfloat16', 'float16', 'float32'")
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times, left_out = measure(where, kind, repeats)
    finally:
        torch.set_num_threads(threads)
    about = environment(where, kind)
    lines, rows = [], []
    for direction in DIRECTIONS:
        for name, by_direction in times.items():
            us, ours = by_direction[direction], times["tilegrad"][direction]
            deciles = quantiles(us, n=10, method="inclusive")
            ratio = median([a / b for a, b in zip(ours, us, strict=True)])
            row = {"direction": direction, "contender": name, "us": round(deciles[4], 2)}
            row |= {"us_20": round(deciles[1], 2), "us_80": round(deciles[7], 2), "ours_over_it": round(ratio, 3)}
            lines.append(json_format.dumps(row | about))
            spread = f"{deciles[1]:.1f} – {deciles[7]:.1f}"
            rows.append((direction, name, f"{deciles[4]:.1f}", spread, "" if name == "tilegrad" else f"{ratio:.2f}×"))
    if print_results(lines, about, json=json, out=out):
        return 0
    b, h, t, d = TINY[where.type]
    print(f"\nmicroseconds of the host, B{b} H{h} T{t} D{d}, {repeats} rounds of {CALLS} calls\n")
    print(table(("", "", "median", "20 – 80 %", "ours / it"), rows))
    for name, reason in left_out.items():
        print(f"{name}: left out, {reason}")
    return 0
