"""The two cases of the FlashAttention-2 backward in the specification, printed in full.

    case 1    4 × 4     Q = K = I₄, V = dO = 0.1·(4i + j)    maximum difference < 1e-3
    case 2    128 × 64  all uniform in ±0.5                  maximum difference < 5e-3

Each case compares a kernel, by default the one that the table selects, with whole T×T matrices, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import attention, explain
from ..kernels.attention import reference
from ..kernels.attention.mask import Mask
from ..text.table import table


@dataclass(frozen=True, slots=True)
class FlashCase:
    title: str
    tolerance: float
    q: Tensor  # (1, 1, T, D); k, v and do have the same shape
    k: Tensor
    v: Tensor
    do: Tensor


def flash_cases(device: str = "cpu") -> tuple[FlashCase, FlashCase]:
    eye = torch.eye(4)[None, None]
    steps = 0.1 * torch.arange(16.0).view(1, 1, 4, 4)
    random = torch.rand(4, 1, 1, 128, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    return (
        FlashCase("case 1: simple, 4 × 4", 1e-3, *(x.to(device) for x in (eye, eye, steps, steps))),
        FlashCase("case 2: random, 128 × 64", 5e-3, *random.to(device)),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    tensor: str
    largest: float
    average: float
    above: int  # number of elements that differ by more than the tolerance
    size: int


def compare(case: FlashCase, kernel: str | None) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Difference]]:
    """(results of the kernel, results of whole matrices, their differences)"""
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    o = attention(*leaves, kernel=kernel)
    assert isinstance(o, Tensor)
    dq, dk, dv = torch.autograd.grad(o, leaves, case.do)
    got = {"O": o.detach(), "dQ": dq, "dK": dk, "dV": dv}
    o_naive, _ = reference.forward(case.q, case.k, case.v, Mask())
    g = reference.backward(case.q, case.k, case.v, case.do, None, Mask())
    naive = {"O": o_naive, "dQ": g.dq, "dK": g.dk, "dV": g.dv}
    differences = []
    for name, x in got.items():
        gap = (x - naive[name]).abs()
        above = int((gap > case.tolerance).sum())
        differences.append(Difference(name, gap.max().item(), gap.mean().item(), above, gap.numel()))
    return got, naive, differences


def check_flash(kernel: str | None = None, device: str = "cpu", *, matrices: bool = True) -> bool:
    """Prints both cases, and returns whether both pass. matrices=False prints only the comparison."""
    passed = True
    for case in flash_cases(device):
        got, naive, differences = compare(case, kernel)
        name = explain(case.q, case.k, case.v, kernel=kernel).kernel
        print(f"FlashAttention-2 backward, {case.title}, kernel {name}\n")
        if matrices:
            for label, x in (("Q", case.q), ("K", case.k), ("V", case.v), ("dO", case.do), ("O", got["O"])):
                print(_matrix(label, x))
            for gradient in ("dQ", "dK", "dV"):
                print(_matrix(f"{gradient} by whole matrices", naive[gradient]))
                print(_matrix(f"{gradient} by {name}", got[gradient]))
        rows = [(d.tensor, f"{d.largest:.2e}", f"{d.average:.2e}", f"{d.above} of {d.size}") for d in differences]
        print(table(("", "max difference", "average", f"above {case.tolerance:g}"), rows))
        # NaN compares false, so it fails
        ok = all(d.largest < case.tolerance for d in differences)
        print(f"\n{'PASS' if ok else 'FAIL'}: {case.title}, tolerance {case.tolerance:g}\n")
        passed = passed and ok
    return passed


def _matrix(label: str, x: Tensor, corner: int = 4) -> str:
    """A matrix as text. A large matrix is cut to its first rows and columns."""
    rows, cols = x.shape[-2:]
    is_small = rows <= corner and cols <= corner
    title = f"{label} ({rows} × {cols})" + ("" if is_small else f", its first {corner} × {corner}")
    lines = ("  ".join(f"{value:9.5f}" for value in row) for row in x[0, 0, :corner, :corner].tolist())
    return f"{title}\n" + "\n".join(lines) + "\n"
