"""Attention against its peers: forward and backward, interleaved in one process, on any device.

Every kernel is checked against the float64 oracle before it is timed, on a small ragged problem of the same head
dimension and band; one that fails has no time and no speed-up. Times are medians with the 20th and 80th percentile of
`repeats` rounds; in a round each kernel runs once, so that a change of the machine's speed falls on all. TFLOP/s are by
cost.py: a kernel that recomputes is not credited for it. A kernel that refuses a shape is left out, with its reason. Packed
sequences stand beside a dense shape of as many tokens and as much work.
"""

from __future__ import annotations

import itertools
import json as json_format
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilegrad.bench import cost
from tilegrad.kernels.attention import Mask, reference
from tilegrad.kernels.attention.contract import lse_dtype, output_shapes
from tilegrad.kernels.dispatch import ATTENTION, Problem, select
from tilegrad.table import table

Thunk = Callable[[], object]
FLEX_LENGTHS = (4096, 16384, 65536)  # compiling FlexAttention takes longer than timing it
AHEAD_BYTES = 1 << 30
ERRORS_OF_A_PEER = (RuntimeError, NotImplementedError, ValueError)


@dataclass(frozen=True, slots=True)
class Shape:
    """A problem: T tokens in each of B sequences; window = keys seen to the left, with causal; lengths: packed."""

    b: int
    h: int
    t: int
    d: int
    causal: bool = False
    window: int | None = None
    hkv: int = 0  # 0: as many as h
    tq: int = 0  # 0: t
    lengths: tuple[int, ...] = ()

    def mask(self, device: torch.device) -> Mask:
        window = None if self.window is None else (self.window - 1, 0)
        if not self.lengths:
            return Mask(causal=self.causal, window=window)
        ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device)
        longest = max(self.lengths)
        return Mask(
            self.causal, window, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest
        )

    @property
    def band(self) -> tuple[int | None, int | None]:
        left = None if self.window is None else self.window - 1
        return left, 0 if self.causal or self.window is not None else None

    @property
    def rows(self) -> int:
        return self.tq or self.t

    def flops(self, backward: bool) -> int:
        left, right = self.band
        sequences = [(1, n, n) for n in self.lengths] or [(self.b, self.rows, self.t)]
        return sum(
            cost.attention_flops(b, self.h, tq, tk, self.d, self.d, left=left, right=right, backward=backward)
            for b, tq, tk in sequences
        )

    def bytes(self, element_bytes: int, backward: bool) -> int:
        b, tq, tk = (1, sum(self.lengths), sum(self.lengths)) if self.lengths else (self.b, self.rows, self.t)
        return cost.attention_bytes(
            b, self.h, self.hkv or self.h, tq, tk, self.d, self.d, element_bytes, backward=backward
        )

    def __str__(self) -> str:
        what = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        heads = f"{self.h}/{self.hkv}" if self.hkv else f"{self.h}"
        if self.lengths:
            return f"{len(self.lengths)} packed H{heads} T≤{max(self.lengths)} D{self.d} {what}"
        return f"B{self.b} H{heads} {f'{self.tq}×' if self.tq else 'T'}{self.t} D{self.d} {what}"


def _tokens(lengths: Sequence[int], tokens: int, hidden: int, dims: Sequence[int] = (64, 128)) -> tuple[Shape, ...]:
    return tuple(
        Shape(tokens // t, hidden // d, t, d, causal) for d in dims for causal in (False, True) for t in lengths
    )


def _packed(tokens: int, hidden: int, dims: Sequence[int] = (64, 128)) -> tuple[Shape, ...]:
    """Log-normal lengths of median 1024 (σ = 0.8) that add up to `tokens`, each shape before a dense one of equal work."""
    g = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        drawn = round(1024 * math.exp(0.8 * float(torch.randn((), generator=g))))
        lengths.append(min(max(drawn, 16), tokens - sum(lengths)))
    b = round(tokens**2 / sum(n * n for n in lengths))
    shapes = []
    for d in dims:
        for causal in (False, True):
            shapes.append(Shape(0, hidden // d, 0, d, causal, lengths=tuple(lengths)))
            shapes.append(Shape(b, hidden // d, tokens // b, d, causal))
    return tuple(shapes)


PRESETS: dict[str, tuple[Shape, ...]] = {
    "training": _tokens((1024, 2048, 4096, 8192, 16384), 16384, 2048, (64, 128, 256)),
    "short": _tokens((4096, 16384), 16384, 2048),
    "window": (Shape(1, 16, 65536, 128, window=1024),),
    "wide": _tokens((2048, 16384), 16384, 2048, (256,)),
    "gqa": tuple(Shape(16384 // t, 32, t, 128, True, hkv=4) for t in (1024, 4096, 16384)),
    "varlen": _packed(32768, 2048),
    "decode": tuple(Shape(b, 32, t, 128, hkv=8, tq=1) for b, t in ((1, 65536), (16, 8192))),
    "laptop": _tokens((256, 1024), 1024, 512, (64,)),
    "cpu": tuple(
        Shape(b, h, t, d, causal)
        for b, h, t, d in ((1, 8, 1024, 64), (2, 12, 1024, 64), (1, 8, 4096, 64), (1, 8, 4096, 128))
        for causal in (False, True)
    ),
    "cpu-window": tuple(Shape(1, 2, t, 64, window=256) for t in (8192, 16384)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    shape: Shape
    direction: str
    kernel: str
    ms: float | None  # median; None where it did not run, and `note` says why
    p20_ms: float | None = None
    p80_ms: float | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return None if self.ms is None else self.shape.flops(self.direction == "backward") / self.ms / 1e9


class Inputs:
    """q, k, v and do of a shape, and what the contracts write."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)

        def new(h: int, t: int) -> Tensor:
            form = (sum(shape.lengths), h, shape.d) if shape.lengths else (shape.b, h, t, shape.d)
            return torch.randn(form, generator=g, device=device, dtype=torch.float32).to(dtype)

        kv = shape.hkv or shape.h
        self.shape, self.mask = shape, shape.mask(device)
        self.q, self.k, self.v, self.do = (
            new(h, t) for h, t in ((shape.h, shape.rows), (kv, shape.t), (kv, shape.t), (shape.h, shape.rows))
        )

    def ours(self, kernel: str, deterministic: bool = False) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        """Forward and backward of a kernel of the table, nothing allocated inside, and the tensors they write."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        module = select(q, k, v, mask, kernel=kernel, deterministic=deterministic).load()
        o_shape, lse_shape = output_shapes(q, v, mask)
        scratch = [
            {
                name: torch.empty(shape, dtype=dtype, device=q.device)
                for name, (shape, dtype) in module.workspace(
                    q, k, v, mask, backward=backward, deterministic=deterministic
                ).items()
            }
            for backward in (False, True)
        ]
        out = {"o": q.new_empty(o_shape), "lse": q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))}
        out |= {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}

        def forward() -> None:
            module.fwd(q, k, v, mask, o=out["o"], lse=out["lse"], scratch=scratch[0])

        def backward() -> None:
            module.bwd(
                q, k, v, out["o"], out["lse"], self.do, None, mask, dq=out["dq"], dk=out["dk"], dv=out["dv"],
                dbias=None, dsinks=None, scratch=scratch[1], deterministic=deterministic,
            )  # fmt: skip

        return forward, backward, out

    def peer(self, name: str) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        """The same of SDPA's backends and FlexAttention, through their own autograd call."""
        attend = _peer_function(name, self.shape, self.q.device)
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out: dict[str, Tensor] = {}
        o = attend(*leaves)
        out["o"] = o.detach()

        def forward() -> None:
            with torch.no_grad():
                attend(self.q, self.k, self.v)

        def backward() -> None:
            grads = torch.autograd.grad(o, leaves, self.do, retain_graph=True)
            out.update(zip(("dq", "dk", "dv"), grads, strict=True))

        return forward, backward, out


def _peer_function(name: str, shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    """Raises one of ERRORS_OF_A_PEER where there is none."""
    gqa = bool(shape.hkv)
    if shape.lengths:
        raise NotImplementedError("takes no packed sequences here")
    if name == "flex":
        if shape.t not in FLEX_LENGTHS or device.type != "cuda":
            raise NotImplementedError(f"compiled on CUDA only, at T in {FLEX_LENGTHS}")
        return _flex(shape, device)
    if shape.window is not None or (shape.tq and shape.causal):
        raise NotImplementedError("has no such band without a matrix")
    if name == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)

    return attend


def _flex(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # each shape is compiled anew, and there is a limit on how often
    torch._functorch.config.donated_buffer = False  # the backward runs more than once
    left, right = shape.band

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        gap = i + (shape.t - shape.rows) - j
        seen = gap >= 0 if right == 0 else gap == gap
        return seen if left is None else seen & (gap <= left)

    block_mask = None
    if shape.band != (None, None):
        block_mask = torch.compile(create_block_mask)(sees, None, None, shape.rows, shape.t, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=bool(shape.hkv))


def peers_on(device: torch.device) -> tuple[str, ...]:
    return ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex") if device.type == "cuda" else ("sdpa",)


def kernels_on(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Kernels of the table that take a plain call there unasked."""
    q = torch.empty(1, 1, 1024, 64, device=device, dtype=dtype)
    problem = Problem(q, q, q, Mask(), deterministic=True)
    names = tuple(row.name for row in ATTENTION if row.by_name_only is None and row.refuses(problem) is None)
    return tuple(name for name in names if name != "tiled") or names if device.type == "cuda" else names


def refusal(kernel: str, inputs: Inputs, deterministic: bool) -> str | None:
    """Why a kernel of the table does not take this problem, or None."""
    problem = Problem(inputs.q, inputs.k, inputs.v, inputs.mask, deterministic)
    return next(row for row in ATTENTION if row.name == kernel).refuses(problem)


def check(kernel: str, shape: Shape, dtype: torch.dtype, device: torch.device, deterministic: bool = False) -> str:
    """'' if the kernel is no worse than twice the whole-matrix formula in its dtype (tests/tolerance.py), else the reason."""
    t = min(shape.t, 500) + 13
    window = None if shape.window is None else min(shape.window, 100)
    kv = shape.hkv and 1
    lengths = (t, 77, 300) if shape.lengths else ()
    small = Inputs(Shape(1, 2, t, shape.d, shape.causal, window, kv, min(shape.tq, t), lengths), dtype, device)
    forward, backward, got = small.ours(kernel, deterministic)
    for x in got.values():
        x.fill_(float("nan"))
    forward()
    backward()

    def whole(dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v, do = (x.to(dtype) for x in (small.q, small.k, small.v, small.do))
        o, lse = reference.forward(q, k, v, small.mask)
        g = reference.backward(q, k, v, do, None, small.mask)
        return {"o": o, "lse": lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}

    exact, yardstick = whole(torch.float64), whole(dtype)
    for name, x in got.items():
        x64 = exact[name]
        error, of_yardstick = (float((y.double() - x64).abs().max()) for y in (x, yardstick[name]))
        allowed = 2 * of_yardstick + 4 * torch.finfo(dtype).eps * float(x64.abs().max())
        if not error <= allowed:
            return f"{name} is off by {error:.1e}, allowed {allowed:.1e}"
    return ""


def interleaved(thunks: dict[str, Thunk], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each thunk in each round, after two rounds to warm up.

    On CUDA a write of AHEAD_BYTES goes before each: it empties the caches, and while it runs the host gets ahead, so that
    the time is the device's, not Python's.
    """
    ahead = torch.empty(AHEAD_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    ms: dict[str, list[float]] = {name: [] for name in thunks}
    for round_ in range(-2, repeats):
        for name, run in thunks.items():
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                ahead.zero_()
                start.record()
                run()
                end.record()
                end.synchronize()
                took = start.elapsed_time(end)
            else:
                began = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - began)
            if round_ >= 0:
                ms[name].append(took)
    return ms


def measure(
    shape: Shape, dtype: torch.dtype, device: torch.device, kernels: Sequence[str], peers: Sequence[str], repeats: int,
    deterministic: bool = False,
) -> list[Row]:  # fmt: skip
    inputs = Inputs(shape, dtype, device)
    forward: dict[str, Thunk] = {}
    backward: dict[str, Thunk] = {}
    notes: dict[str, str] = {}
    for name in (*kernels, *peers):
        own = name in kernels
        refused = refusal(name, inputs, deterministic) if own else None
        if refused:
            notes[name] = refused
            continue
        wrong = check(name, shape, dtype, device, deterministic) if own else ""
        if wrong:
            notes[name] = f"WRONG: {wrong}"
            continue
        try:
            f, b, _ = inputs.ours(name, deterministic) if own else inputs.peer(name)
            f()
            b()
        except ERRORS_OF_A_PEER as error:
            if own:
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
            rows.append(Row(shape, direction, name, deciles[4], deciles[1], deciles[7]))
    rows += [Row(shape, "both", name, None, note=note) for name, note in notes.items()]
    return rows


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    import tilegrad

    commit = ""
    with suppress(OSError, subprocess.CalledProcessError):
        where = Path(__file__).parent
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=where, capture_output=True, text=True, check=True
        ).stdout.strip()
    triton_version = None
    with suppress(ImportError):
        import triton

        triton_version = triton.__version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name, "dtype": str(dtype).removeprefix("torch."), "tilegrad": tilegrad.__version__,
        "commit": commit or "unknown", "torch": torch.__version__, "triton": triton_version,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def speedups(rows: Sequence[Row], kernel: str, peer: str, direction: str) -> dict[Shape, float]:
    """How many times faster `kernel` is than `peer`, on each shape that has both."""
    times = {(row.shape, row.kernel): row.ms for row in rows if row.direction == direction and row.ms}
    return {
        shape: theirs / ours
        for (shape, name), ours in times.items()
        if name == kernel and (theirs := times.get((shape, peer))) is not None
    }


def packed_rates(rows: Sequence[Row], kernel: str, direction: str) -> list[float]:
    """TFLOP/s of packed sequences over those of the dense shape that follows, as `_packed` pairs them."""
    rates = {row.shape: row.tflops for row in rows if (row.kernel, row.direction) == (kernel, direction) and row.tflops}
    pairs = itertools.pairwise(rates)
    return [rates[a] / rates[b] for a, b in pairs if a.lengths and not b.lengths]


def _geometric_mean(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).log().mean().exp())


def report(rows: Sequence[Row], kernels: Sequence[str], peers: Sequence[str]) -> str:
    lines = [
        [
            str(row.shape),
            row.direction,
            row.kernel,
            f"{row.ms:.3f}",
            f"{row.p20_ms:.3f}",
            f"{row.p80_ms:.3f}",
            f"{row.tflops:.3g}",
        ]
        for row in rows
        if row.ms is not None
    ]
    text = [table(("shape", "pass", "kernel", "ms", "p20", "p80", "TFLOP/s"), lines)]
    directions = ("forward", "backward")
    shapes = list(dict.fromkeys(row.shape for row in rows))
    others = (*(k for k in kernels if len(kernels) > 1), *peers)
    found = {
        (kernel, peer, direction): ratios
        for kernel in kernels
        for peer in others
        for direction in directions
        if kernel != peer and (ratios := speedups(rows, kernel, peer, direction))
    }
    if found:
        compared = list(dict.fromkeys((kernel, peer) for kernel, peer, _ in found))
        cells = [
            [str(shape), direction]
            + [
                f"{found[kernel, peer, direction][shape]:.3f}×"
                if shape in found.get((kernel, peer, direction), {})
                else "–"
                for kernel, peer in compared
            ]
            for direction in directions
            for shape in shapes
            if any(shape in ratios for (_, _, way), ratios in found.items() if way == direction)
        ]
        text += ["", table(("shape", "pass", *(f"{kernel} / {peer}" for kernel, peer in compared)), cells)]
        means = [
            [kernel, peer, direction, f"{_geometric_mean([*r.values()]):.3f}×", f"{min(r.values()):.3f}×", str(len(r))]
            for (kernel, peer, direction), r in found.items()
        ]
        text += ["", table(("kernel", "faster than", "pass", "geometric mean", "least", "shapes"), means)]
    for kernel in kernels:
        for direction in directions:
            if rates := packed_rates(rows, kernel, direction):
                text += [
                    "",
                    f"{kernel}, {direction}: packed at {', '.join(f'{x:.2f}' for x in rates)} of the dense rate",
                ]
    notes = sorted({f"{row.kernel}: {row.note}" for row in rows if row.note})
    return "\n".join([*text, "", *notes])


def bench_attention(
    *, device: str | None = None, dtype: str = "bfloat16", kernels: Sequence[str] | None = None, preset: str | None = None,
    peers: Sequence[str] | None = None, repeats: int = 30, json: bool = False, out: str | None = None, plot: str | None = None,
    profile: bool = False, tune: bool = False, deterministic: bool = False,
) -> int:  # fmt: skip
    """Prints times and ratios (or JSON lines); `out` appends the JSON lines to a file. `peers`: None = all that are there.
    Exit code 1 if a kernel is wrong."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}; accepted: 'bfloat16', 'float16' or 'float32'")
    preset = preset or ("training" if where.type == "cuda" else "laptop")
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}; accepted: one of {', '.join(map(repr, PRESETS))}")
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2")
    ours = tuple(kernels or kernels_on(where, kind))
    unknown = set(ours) - {row.name for row in ATTENTION}
    if unknown:
        raise ValueError(
            f"kernels: got {sorted(unknown)}; accepted: names among {', '.join(row.name for row in ATTENTION)}"
        )
    about = environment(where, kind) | {"deterministic": deterministic}
    if tune:
        from tilegrad.bench.tune import tune_tiles

        return tune_tiles(where, kind)
    theirs = peers_on(where) if peers is None else tuple(peers)
    if set(theirs) - set(peers_on(where)):
        raise ValueError(f"peers: got {list(theirs)}; accepted: names among {', '.join(peers_on(where))}")
    rows: list[Row] = []
    for shape in PRESETS[preset]:
        new = measure(shape, kind, where, ours, theirs, repeats, deterministic)
        rows += new
        for line in _json_lines(new, about):
            if json:
                print(line, flush=True)
            if out:
                with open(out, "a") as file:
                    file.write(line + "\n")
    if not json:
        print(", ".join(f"{name} {value}" for name, value in about.items() if value is not None) + "\n")
        print(report(rows, ours, theirs))
    if profile:
        from tilegrad.bench.roofline import print_roofline

        print_roofline(PRESETS[preset], kind, where, ours)
    if plot:
        _plot(rows, about, plot)
    return 1 if any(row.note.startswith("WRONG") for row in rows) else 0


def _json_lines(rows: Sequence[Row], about: dict[str, Any]) -> Iterator[str]:
    for row in rows:
        yield json_format.dumps(asdict(row) | {"tflops": row.tflops} | about)


def _plot(rows: Sequence[Row], about: dict[str, Any], path: str) -> None:
    """Bars of TFLOP/s, one group for each shape, forward above backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.kernel for row in rows if row.ms is not None))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(8, 1.2 * len(shapes)), 8), sharex=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for n, name in enumerate(names):
            speed = {row.shape: row.tflops for row in rows if row.kernel == name and row.direction == direction}
            x = [i + (n - len(names) / 2) * 0.8 / len(names) for i in range(len(shapes))]
            axis.bar(x, [speed.get(shape) or 0.0 for shape in shapes], 0.8 / len(names), label=name, align="edge")
        axis.set_ylabel(f"{direction}, TFLOP/s")
        axis.legend(ncols=len(names), fontsize=8)
    axes[1].set_xticks(range(len(shapes)), [str(shape).replace(" ", "\n", 2) for shape in shapes], fontsize=7)
    axes[0].set_title(f"attention, {about['dtype']}, {about['device']}, torch {about['torch']}, {about['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
