"""The table of attention's kernels. The first kernel that does not refuse a call runs it."""

from __future__ import annotations

import torch

from .. import gpu, triton_version
from ..cpu import library
from ..table import Kernel, Table
from .problem import FEW_ROWS, Problem, tma_refusal

MOST_HEADS = 65535  # programs on the second axis of a CUDA grid
HOPPER_ROWS = 128  # rows of a tile
HOPPER_WIDEST = 256  # largest head dimension
WIDEST_FLOAT32 = 256  # largest head dimension that triton takes in float32 on every GPU
FEW_TILES = 64  # with fewer row tiles some multiprocessors are idle; triton splits the columns among programs
# With more than MANY_SEQUENCES packed sequences of up to SHORT rows, hopper spends most of the time in its tile scheduler.
SHORT, MANY_SEQUENCES = 64, 256


def _triton_refuses(problem: Problem) -> str | None:
    if problem.k.shape[1] > MOST_HEADS:
        return f"takes up to {MOST_HEADS} kv heads (limit of an axis of a CUDA grid), not {problem.k.shape[1]}"
    return gpu.refusal(problem.q) or _too_wide_for_float32(problem)


def _too_wide_for_float32(problem: Problem) -> str | None:
    """Why the tiles of a float32 call do not fit in shared memory. The backward needs 128 KiB, or 192 KiB with products in
    float64."""
    q, widest = problem.q, max(problem.q.shape[-1], problem.v.shape[-1])
    if q.device.type != "cuda" or q.dtype != torch.float32 or widest <= WIDEST_FLOAT32:
        return None
    major, minor = torch.cuda.get_device_capability(q.device)
    if major in (9, 10):
        return None
    return (
        f"takes float32 head dimensions above {WIDEST_FLOAT32} only on compute capability 9.0 and 10.0, which have enough "
        f"shared memory, and {q.device} has {major}.{minor}"
    )


def _invariant_refusal(problem: Problem) -> str | None:
    """Why a kernel cannot run an invariant problem. On a CPU the engine requires the native kernels, which are invariant."""
    reason = "adds in another order than attention over a cache, and the problem is invariant"
    return reason if problem.invariant and problem.q.device.type != "cpu" else None


def _hopper_refuses(problem: Problem) -> str | None:
    q, k, v, mask = problem
    d, dv, dtype = q.shape[-1], v.shape[-1], str(q.dtype).removeprefix("torch.")
    if not gpu.has_triton():
        return "needs Triton, which is not installed (pip install triton)"
    if gpu.interpreting():
        return "is written in Gluon, which has no interpreter (unset TRITON_INTERPRET)"
    if q.device.type != "cuda":
        return f"needs a Hopper GPU, not {q.device.type}"
    if refusal := triton_version.gluon_refusal():
        return refusal
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0, and {q.device} has {major}.{minor}"
    if dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, not {dtype}"
    if d != dv or d % 8 or not 16 <= d <= HOPPER_WIDEST:
        return f"takes one head dimension of 16 to {HOPPER_WIDEST} in steps of 8, not {d} for q and {dv} for v"
    if any(problem.others[name].dtype != q.dtype for name in ("dk", "dv") if name in problem.others):
        return "writes dk and dv only in q's dtype, not in float32"
    for name in ("bias", "alibi_slopes"):
        if getattr(mask, name) is not None:
            return f"takes no {name}"
    if mask.dropout_p:
        return "takes no dropout"
    sizes = problem.sizes
    if sizes.tk == 0 or 0 in k.shape or 0 in q.shape:
        return "takes no empty tensors"
    row_tiles = -(-sizes.tq // HOPPER_ROWS) * sizes.hq * sizes.batch
    if sizes.tq <= FEW_ROWS or 4 * sizes.tq <= sizes.tk and row_tiles <= FEW_TILES:
        return "leaves few rows with many columns to triton, which splits the columns among programs"
    if sizes.varlen and sizes.tq <= SHORT and sizes.batch > MANY_SEQUENCES:
        return (
            f"leaves more than {MANY_SEQUENCES} packed sequences of up to {SHORT} rows to triton, which is faster there"
        )
    if refusal := _invariant_refusal(problem):
        return refusal
    tensors = {"q": q, "k": k, "v": v} | problem.others
    refusals = (tma_refusal(name, x, varlen=mask.varlen) for name, x in tensors.items())
    return next(filter(None, refusals), None)


def _native_refuses(problem: Problem) -> str | None:
    too_long = max(*problem.q.shape, *problem.k.shape) >= 2**31
    return library.refusal(problem.q.device) or ("takes fewer than 2³¹ rows and columns" if too_long else None)


ATTENTION = Table(
    "attention",
    (
        Kernel("hopper", "attention.hopper", _hopper_refuses),
        Kernel("triton", "attention.triton", _triton_refuses),
        Kernel("native", "attention.cpu", _native_refuses),
        Kernel("tiled", "attention.tiled", _invariant_refusal),
        Kernel(
            "reference",
            "attention.reference",
            _invariant_refusal,
            by_name_only="is the oracle, with whole T×T matrices: runs only by name",
        ),
    ),
)
