"""The time of attention compared with other libraries (peers): forward and backward, on any device.

Every contender is called through its public function and autograd, on tensors in (B, T, H, D) memory, as the projections of a
model write them. A kernel of tilegrad is also timed on prepared buffers, as in an engine ("‹kernel› on buffers"); no ratio uses
these times. On CUDA the L2 cache is cold and the time of the host is hidden (timing.py).

Every kernel, of tilegrad or of a peer, is checked by the closeness rule at the shape that is timed; a kernel that fails gets no
time and no speed-up. Times are medians of `repeats` rounds, with the 20th and 80th percentile. In a round each kernel runs
once. The order changes from round to round, so a change in the speed of the machine affects all kernels. A speed-up is the
median of the ratios of the rounds, with quartiles. On a CPU the process keeps freed memory, so no call needs new pages. TFLOP/s
count the FLOPs of cost.py, without recomputation. If a kernel refuses a shape, the reason is printed instead of a time. Packed
sequences are compared with a dense shape that has about as many tokens and as many FLOPs.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from statistics import quantiles

import torch

from ..engine.machine import device_or_default
from ..kernels.attention.table import ATTENTION
from ..text.environment import environment
from .calls import ERRORS_OF_A_PEER, Contender, Inputs, check, kernels_on, peers_on, refusal
from .comparison import Row, plot_bars, report
from .shapes import PRESETS, Shape
from .timing import Thunk, freed_memory_kept, interleaved


def measure(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Sequence[str],
    peers: Sequence[str],
    repeats: int,
    *,
    deterministic: bool = False,
) -> list[Row]:
    inputs = Inputs(shape, dtype, device)
    forward: dict[str, Thunk] = {}
    backward: dict[str, Thunk] = {}
    notes: dict[str, str] = {}
    contenders: list[tuple[str, Contender]] = [(name, "public") for name in kernels]
    contenders += [(name, "peer") for name in peers] + [(name, "buffers") for name in kernels]
    for kernel, contender in contenders:
        is_peer, name = contender == "peer", f"{kernel} on buffers" if contender == "buffers" else kernel
        reason = None if is_peer else refusal(kernel, inputs)
        if reason:
            notes[kernel] = reason
            continue
        try:
            wrong = check(kernel, shape, dtype, device, contender, deterministic=deterministic)
            if wrong:
                notes[name] = f"WRONG: {wrong}"
                continue
            f, b, _ = inputs.calls(kernel, contender, deterministic=deterministic)
            f()
            b()
        except ERRORS_OF_A_PEER as error:
            if not is_peer:
                raise
            notes[name] = str(error).splitlines()[0][:60]
            continue
        forward[name] = f
        if not shape.tq:
            backward[name] = b
    rows = []
    for direction, thunks in (("forward", forward), ("backward", backward)):
        for name, ms in interleaved(thunks, repeats, device).items():
            deciles = quantiles(ms, n=10, method="inclusive")
            rows.append(Row(shape, direction, name, deciles[4], deciles[1], deciles[7], rounds_ms=tuple(ms)))
    rows += [Row(shape, "both", name, None, note=note) for name, note in notes.items()]
    return rows


def bench_attention(
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    kernels: Sequence[str] | None = None,
    preset: str | None = None,
    peers: Sequence[str] | None = None,
    repeats: int = 30,
    json: bool = False,
    out: str | None = None,
    plot: str | None = None,
    profile: bool = False,
    deterministic: bool = False,
    shapes: Sequence[str] | None = None,
) -> int:
    """Prints times and ratios (or JSON lines), and appends the JSON lines to the file `out`. peers=None: all peers that are
    installed. `shapes`, in the format of Shape.parse, replace the preset. Returns the exit code, 1 if a kernel is wrong."""
    where = torch.device(device_or_default(device))
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}; accepted: a float dtype such as 'bfloat16', 'float16', 'float32'")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}; accepted: one of {', '.join(map(repr, PRESETS))}")
    if shapes and preset:
        raise ValueError(f"shapes: got {list(shapes)} and the preset {preset!r}; accepted: one of the two")
    usual = "training" if where.type == "cuda" else "laptop"
    problems = tuple(map(_parsed, shapes or ())) or PRESETS[preset or usual]
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2")
    ours = tuple(kernels or kernels_on(where, torch_dtype))
    names = [row.name for row in ATTENTION.rows]
    if unknown := {*ours} - {*names}:
        raise ValueError(f"kernels: got {sorted(unknown)}; accepted: names among {', '.join(names)}")
    settings = environment(where, torch_dtype) | {"deterministic": deterministic, "calls": _calls_on(where)}
    theirs = peers_on(where) if peers is None else tuple(peers)
    if set(theirs) - set(peers_on(where)):
        raise ValueError(f"peers: got {list(theirs)}; accepted: names among {', '.join(peers_on(where))}")
    rows: list[Row] = []
    for shape in problems:
        with freed_memory_kept() if where.type == "cpu" else nullcontext():
            new = measure(shape, torch_dtype, where, ours, theirs, repeats, deterministic=deterministic)
        rows += new
        for row in new:
            line = json_format.dumps(asdict(row) | {"tflops": row.tflops} | settings)
            if json:
                print(line, flush=True)
            if out:
                with open(out, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
    if not json:
        print(", ".join(f"{name} {value}" for name, value in settings.items() if value is not None) + "\n")
        print(report(rows, ours, theirs))
    if profile:
        from .roofline import print_roofline

        print_roofline(problems, torch_dtype, where, ours)
    if plot:
        plot_bars(rows, settings, plot)
    checked = {*ours, *(f"{name} on buffers" for name in ours)}
    return 1 if any(row.kernel in checked and row.note.startswith("WRONG") for row in rows) else 0


def _calls_on(device: torch.device) -> str:
    """How contenders are called and timed, as a text for the output."""
    timed = "device time with the host hidden and the L2 cold" if device.type == "cuda" else "wall time"
    return f"public functions through autograd on (B T H D) memory: {timed}"


def _parsed(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        accepted = "B,H,T,D, then optionally causal, window=N, hkv=N, tq=N, such as 4,32,4096,64,causal"
        raise ValueError(f"shapes: got {text!r} ({error}); accepted: {accepted}") from None
