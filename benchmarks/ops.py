"""`python -m benchmarks.ops`: bytes per second of each kernel of the ops that are bound by memory, compared with a copy.

The bytes are those that an op must read and write, each counted once, so a kernel with several passes reaches a lower rate. The
shapes are those of GPT-2: C = 768 for norms, F = 3072 for activations, N = B·T rows. Kernels of one op run interleaved.
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tilegrad.bench.timing import interleaved
from tilegrad.engine.machine import device_or_default
from tilegrad.kernels import activation, column_sum, norm
from tilegrad.kernels.scratch import Scratch, Shapes, new_scratch
from tilegrad.kernels.table import Problem, Table
from tilegrad.text.environment import environment, print_results
from tilegrad.text.table import table

ROWS = {"cuda": (16384, 65536), "cpu": (512,)}
C, F = 768, 3072
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}


@dataclass(frozen=True)
class Case:
    """A call of an op. `run(kernel, scratch)` runs a kernel, `workspace(kernel)` declares its scratch."""

    op: str
    columns: int
    moved_bytes: int
    kernels: Table
    problem: Any
    run: Callable[[str, Scratch], None]
    workspace: Callable[[str], Shapes] = lambda _kernel: {}


@dataclass(frozen=True)
class Row:
    op: str
    rows: int
    columns: int
    kernel: str
    ms: float
    bytes_per_s: float
    of_a_copy: float


def norms(n: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    x, dy, dx = (torch.randn(n, C, device=device).to(dtype) for _ in range(3))
    y, w, b = torch.empty_like(x), torch.ones(C, dtype=dtype, device=device), torch.zeros(C, dtype=dtype, device=device)
    mean, rstd = torch.zeros(n, device=device), torch.ones(n, device=device)
    (dw, db, dx_sum), row = (torch.zeros(C, device=device) for _ in range(3)), x.element_size() * C
    problem = Problem(x)
    for op, moved, backward, run in (
        ("layer norm forward", n * (2 * row + 8), False, lambda kernel, scratch: norm.layernorm_fwd(
            x, w, b, 1e-5, y=y, mean=mean, rstd=rstd, scratch=scratch, kernel=kernel)),
        ("residual, layer norm forward", n * (4 * row + 8), False, lambda kernel, scratch: norm.layernorm_fwd(
            x, w, b, 1e-5, dy, x1=dx, y=y, mean=mean, rstd=rstd, scratch=scratch, kernel=kernel)),
        ("layer norm backward, y, Σ dx", n * (5 * row + 8), True, lambda kernel, scratch: norm.layernorm_bwd(
            dy, x, w, mean, rstd, b, dx=dx, dw=dw, db=db, dx_sum=dx_sum, y=y, scratch=scratch, kernel=kernel)),
        ("layer norm backward", n * (4 * row + 8), True, lambda kernel, scratch: norm.layernorm_bwd(
            dy, x, w, mean, rstd, dx=dx, dw=dw, db=db, scratch=scratch, kernel=kernel)),
        ("RMS norm forward", n * (2 * row + 4), False, lambda kernel, scratch: norm.rmsnorm_fwd(
            x, w, 1e-5, y=y, rstd=rstd, scratch=scratch, kernel=kernel)),
        ("residual, RMS norm forward", n * (4 * row + 4), False, lambda kernel, scratch: norm.rmsnorm_fwd(
            x, w, 1e-5, dy, x1=dx, y=y, rstd=rstd, scratch=scratch, kernel=kernel)),
        ("RMS norm backward, y", n * (5 * row + 4), True, lambda kernel, scratch: norm.rmsnorm_bwd(
            dy, x, w, rstd, dx=dx, dw=dw, y=y, scratch=scratch, kernel=kernel)),
        ("RMS norm backward", n * (4 * row + 4), True, lambda kernel, scratch: norm.rmsnorm_bwd(
            dy, x, w, rstd, dx=dx, dw=dw, scratch=scratch, kernel=kernel)),
    ):  # fmt: skip

        def workspace(kernel: str, *, backward: bool = backward) -> Shapes:
            return norm.norm_workspace(x, backward=backward, kernel=kernel)

        yield Case(op, C, moved, norm.NORM, problem, run, workspace)


def column_sums(n: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    for c in (C, F):
        x, sums = torch.randn(n, c, device=device).to(dtype), torch.zeros(c, device=device)

        def run(kernel: str, scratch: Scratch, x: Tensor = x, sums: Tensor = sums) -> None:
            column_sum.column_sum_fwd(x, sums=sums, scratch=scratch, kernel=kernel)

        def workspace(kernel: str, x: Tensor = x) -> Shapes:
            return column_sum.column_sum_workspace(x, kernel=kernel)

        moved = x.numel() * x.element_size()
        yield Case("column sum", c, moved, column_sum.COLUMN_SUM, Problem(x), run, workspace)


def activations(n: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    up_gate, dup_gate, h, da, a, a2 = (torch.randn(n, f, device=device).to(dtype) for f in (2 * F, 2 * F, F, F, F, F))
    sums, h_bytes = torch.zeros(F, device=device), h.numel() * h.element_size()
    (up, gate), (dup, dgate) = up_gate.chunk(2, 1), dup_gate.chunk(2, 1)
    kernels, problem = activation.ACTIVATION, activation.Problem
    for kind in activation.KINDS:

        def forward(kernel: str, _scratch: Scratch, kind: str = kind) -> None:
            activation.activation_fwd(h, kind, a=a, kernel=kernel)

        def backward(kernel: str, _scratch: Scratch, kind: str = kind) -> None:
            activation.activation_bwd(da, h, kind, dh=a, kernel=kernel)

        def fused(kernel: str, scratch: Scratch, kind: str = kind) -> None:
            activation.activation_bwd(da, h, kind, dh=a, a=a2, dh_sum=sums, scratch=scratch, kernel=kernel)

        def workspace(kernel: str, kind: str = kind) -> Shapes:
            return activation.activation_workspace(h, kind, kernel=kernel)

        yield Case(f"{kind} forward", F, 2 * h_bytes, kernels, problem(h, kind, (a,)), forward)
        yield Case(f"{kind} backward", F, 3 * h_bytes, kernels, problem(h, kind, (da, a)), backward)
        yield Case(f"{kind} backward, a, Σ dh", F, 4 * h_bytes, kernels, problem(h, kind, (da, a)), fused, workspace)

    def swiglu_forward(kernel: str, _scratch: Scratch) -> None:
        activation.swiglu_fwd(up_gate, a=a, kernel=kernel)

    def swiglu_backward(kernel: str, scratch: Scratch) -> None:
        activation.swiglu_bwd(da, up_gate, dup_gate=dup_gate, scratch=scratch, kernel=kernel)

    def swiglu_fused(kernel: str, scratch: Scratch) -> None:
        activation.swiglu_bwd(da, up_gate, dup_gate=dup_gate, a=a2, scratch=scratch, kernel=kernel)

    def swiglu_workspace(kernel: str) -> Shapes:
        return activation.activation_workspace(h, "swiglu", sums=False, kernel=kernel)

    written = problem(gate, "swiglu", (da, up, dup, dgate))
    yield Case("swiglu forward", F, 3 * h_bytes, kernels, problem(gate, "swiglu", (up, a)), swiglu_forward)
    yield Case("swiglu backward", F, 5 * h_bytes, kernels, written, swiglu_backward, swiglu_workspace)
    yield Case("swiglu backward, a", F, 6 * h_bytes, kernels, written, swiglu_fused, swiglu_workspace)


FAMILIES = (norms, column_sums, activations)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes per second of a large copy. Bytes read and bytes written both count."""
    source, target = (torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    ms = interleaved({"copy": lambda: target.copy_(source)}, 10, device)["copy"]
    return 2e3 * source.numel() / median(ms)


def measure(case: Case, n: int, copy: float, repeats: int, device: torch.device) -> Iterator[Row]:
    """Yields a row for each kernel that accepts the call, except kernels that run only by name."""
    thunks: dict[str, Callable[[], object]] = {}
    for kernel in case.kernels.rows:
        if kernel.by_name_only is None and kernel.refuses(case.problem) is None:
            scratch = new_scratch(case.workspace(kernel.name), device)
            thunks[kernel.name] = lambda name=kernel.name, scratch=scratch: case.run(name, scratch)  # type: ignore[misc]
    for name, times in interleaved(thunks, repeats, device).items():
        ms = median(times)
        rate = 1e3 * case.moved_bytes / ms
        yield Row(case.op, n, case.columns, name, ms, rate, rate / copy)


def report(rows: Sequence[Row], copy: float) -> str:
    lines = []
    for row in rows:
        shape, rate = f"{row.rows} × {row.columns}", f"{row.bytes_per_s / 1e9:.0f}"
        lines.append((row.op, shape, row.kernel, f"{row.ms:.4f}", rate, f"{row.of_a_copy:.0%}"))
    rates = table(("op", "shape", "kernel", "ms", "GB/s", "of a copy"), lines)
    return f"a copy: {copy / 1e9:.0f} GB/s, read plus written\n\n{rates}"


def bench_ops(
    *, device: str | None = None, dtype: str = "bfloat16", repeats: int = 20, rows: Sequence[int] | None = None,
    json: bool = False,
) -> int:  # fmt: skip
    """Prints times and bytes per second of every kernel, or JSON lines. Returns the exit code 0."""
    where = torch.device(device_or_default(device))
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(dtype)
    if kind is None:
        raise ValueError(f"dtype: got {dtype!r}; accepted: 'bfloat16', 'float16' or 'float32'")
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 1")
    if any(not 1 <= n < 1 << 31 for n in rows or ()):
        raise ValueError(f"rows: got {', '.join(map(str, rows or ()))}; accepted: 1 … 2³¹ − 1")
    about, copy = environment(where, kind), copy_bytes_per_s(where)
    found: list[Row] = []
    for n in rows or ROWS[where.type]:
        for family in FAMILIES:
            for case in family(n, kind, where):
                found += measure(case, n, copy, repeats, where)
    lines = [json_format.dumps(asdict(row) | {"copy_bytes_per_s": copy} | about) for row in found]
    if not print_results(lines, about, json=json, out=None):
        print("\n" + report(found, copy))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="B·T (default: 16384 65536 on CUDA, 512 else)")
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    return bench_ops(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
