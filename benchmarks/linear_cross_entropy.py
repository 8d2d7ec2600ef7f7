"""tilegrad.linear_cross_entropy, compared with its peers: forward + backward of the mean loss, interleaved in one process.

    tilegrad         tilegrad.linear_cross_entropy, dw summed in float32
    liger            LigerFusedLinearCrossEntropyFunction of liger_kernel with its defaults (dw summed in the dtype of w)
    liger float32    `liger` with accum_dtype=float32
    torch.compile    F.linear and F.cross_entropy on all logits

A peer that is not installed or fails is left out, with the reason. In a round every contender runs once. Times are medians over
the rounds, with the smallest and the largest; a ratio is the median of the ratios of the rounds. Memory is torch's peak of one
forward + backward, including x and w, after the gradients were deleted; on a CPU it is not measured. The gradients of each
contender are checked on a smaller shape by the closeness rule, with the bounds of tilegrad's algorithm. The gradient of a
target's logit is (p − 1) / n, with the target's probability p and n targets. A peer that rounds it to bfloat16 breaks the rule
if 1 / n is not a bfloat16 number: the number is the same for all improbable targets, so its rounding error scales the whole
gradient.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import tilegrad
from tilegrad.bench.timing import Thunk, interleaved
from tilegrad.engine.machine import device_or_default
from tilegrad.kernels.closeness import complaints
from tilegrad.kernels.cross_entropy import reference
from tilegrad.text.environment import environment
from tilegrad.text.table import table

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = {"full": (16384, 2048, 151936), "tiny": (48, 16, 300)}  # N, C, V
SLICES = {"full": (512, 2048, 8192), "tiny": (24, 16, 100)}  # the shapes on which gradients are checked
FASTER, MEMORY = 1.2, 1.0  # goals against liger
ERRORS_OF_A_PEER = (ImportError, RuntimeError, TypeError, ValueError, NotImplementedError)


def plain(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), targets)


def liger(x: Tensor, w: Tensor, targets: Tensor, accum_dtype: torch.dtype | None = None) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options = {} if accum_dtype is None else {"accum_dtype": accum_dtype}
    found = liger_fused_linear_cross_entropy(x, w, targets, **options)
    loss: Tensor = found[0] if isinstance(found, tuple) else getattr(found, "loss", found)
    return loss


def contenders() -> dict[str, Loss]:
    return {
        "tilegrad": tilegrad.linear_cross_entropy,
        "liger": liger,
        "liger float32": functools.partial(liger, accum_dtype=torch.float32),
        "torch.compile": torch.compile(plain),
    }


def build(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf tensors x (N, C) and w (V, C), and targets (N,), of which a tenth is ignored."""
    n, c, v = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, c, generator=generator, device=device, dtype=dtype).requires_grad_()
    w = torch.randn(v, c, generator=generator, device=device, dtype=dtype).mul_(c**-0.5).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=generator, device=device)
    return x, w, targets.masked_fill(torch.arange(n, device=device) % 10 == 0, -100)


def step(loss: Loss, x: Tensor, w: Tensor, targets: Tensor) -> None:
    x.grad = w.grad = None
    loss(x, w, targets).backward()


def disagreement(loss: Loss, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> str:
    """The complaints of the closeness rule about dx and dw; "" if it holds."""
    x, w, targets = build(shape, device, dtype)
    step(loss, x, w, targets)
    assert x.grad is not None and w.grad is not None
    our_targets = targets.masked_fill(targets < 0, -1)
    given = (x.detach(), w.detach(), our_targets, 1.0 / int((our_targets >= 0).sum()))
    exact = reference.exact(*given)
    got = {"dx": x.grad, "dw": w.grad}
    return "; ".join(complaints(got, {name: exact[name] for name in got}, reference.bounds(*given)))


def peak_bytes(thunk: Thunk, leaves: Sequence[Tensor]) -> int:
    """The peak of the allocator during one call, with earlier allocations."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    thunk()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def bench_linear_cross_entropy(
    device: str | None = None, dtype: str = "bfloat16", repeats: int = 20, *, tiny: bool = False
) -> int:
    """Prints the table and whether the goals are reached. Returns the exit code, 1 if tilegrad's gradients break the closeness
    rule."""
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 1")
    where = torch.device(device_or_default(device))
    kind, number = "tiny" if tiny else "full", getattr(torch, dtype)
    x, w, targets = build(SHAPES[kind], where, number)
    thunks: dict[str, Thunk] = {}
    peaks: dict[str, int] = {}
    wrong: dict[str, str] = {}
    for name, loss in contenders().items():
        try:
            wrong[name] = disagreement(loss, SLICES[kind], where, number)
            thunk = functools.partial(step, loss, x, w, targets)
            thunk()
            if where.type == "cuda":
                peaks[name] = peak_bytes(thunk, (x, w))
            thunks[name] = thunk
        except ERRORS_OF_A_PEER as error:
            if name == "tilegrad":
                raise
            print(f"{name}: left out: {type(error).__name__}: {str(error).splitlines()[0]}")
    x.grad = w.grad = None
    ms = interleaved(thunks, repeats, where)
    n, c, v = SHAPES[kind]
    print(f"{n} × {c} × {v}, {dtype}, {environment(where, number)}")
    header = ["", "ms", "smallest", "largest", "times ours", "peak MiB", "closeness rule"]
    rows: list[list[str]] = []
    for name, times in ms.items():
        ratio = median(a / b for a, b in zip(times, ms["tilegrad"], strict=True))
        peak = f"{peaks[name] / 2**20:.0f}" if name in peaks else "–"
        rule = "yes" if not wrong[name] else f"no: {wrong[name]}"
        rows.append(
            [name, f"{median(times):.2f}", f"{min(times):.2f}", f"{max(times):.2f}", f"{ratio:.2f}", peak, rule]
        )
    print(table(header, rows))
    for name in ("liger", "liger float32"):
        if name in ms and peaks:
            ratio = median(a / b for a, b in zip(ms[name], ms["tilegrad"], strict=True))
            memory = peaks["tilegrad"] / peaks[name]
            reached = ratio >= FASTER and memory <= MEMORY
            print(
                f"against {name}: {ratio:.2f} × as fast in {memory:.2f} × its memory; goal {'reached' if reached else 'missed'}"
            )
    return 1 if wrong["tilegrad"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear_cross_entropy", description=(__doc__ or "").split("\n", 1)[0]
    )
    add = parser.add_argument
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--dtype", default="bfloat16", help="bfloat16 or float32 (default: %(default)s)")
    add("--repeats", type=int, default=20, metavar="N", help="interleaved rounds (default: %(default)s)")
    add("--tiny", action="store_true", help="a small shape, to test that everything runs")
    return bench_linear_cross_entropy(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
