"""The arguments and constexprs of the Triton kernels, by parameter name, on the host.

Kernels take plain numbers, not NamedTuples: Triton 3.6 specialises the elements of a tuple on their values (1, multiples of 16)
whatever `do_not_specialize` says, and would recompile for every change of sizes and strides. So each launch combines the groups
below: the features of scores, sequence boundaries, strides, constexprs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...checks import ALIGNED_BYTES
from ...philox import threshold
from ...scratch import Scratch
from ..mask import Mask, four_dims
from ..problem import LEAST_FACTOR, LOG2E, Sizes, coarse, lse_strides, row_strides

Arguments = dict[str, Any]

TILE_ROWS = 256  # most rows of any tile


def ieee_fp32(dtype: torch.dtype) -> bool:
    """Whether the dtype is float32 and torch doesn't allow tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"


def score_arguments(sizes: Sizes, mask: Mask, scratch: Scratch) -> Arguments:
    """For every kernel with scores: sizes, the band, and the features that turn q·k into scores."""
    bias, slopes, seed, scale = mask.bias, mask.alibi_slopes, mask.seed, mask.scale_for(sizes.d)
    strides = dict.fromkeys(("bias_b", "bias_h", "bias_i", "bias_j", "slopes_b", "slopes_h"), 0)
    if bias is not None:
        bias = four_dims(bias.view(torch.uint8) if bias.dtype == torch.bool else bias)
        for name, stride, n in zip(strides, bias.stride(), bias.shape, strict=False):
            strides[name] = stride if n > 1 else 0
    if slopes is not None:
        strides |= {"slopes_b": slopes.stride(0) if slopes.ndim == 2 else 0, "slopes_h": slopes.stride(-1)}
    if isinstance(seed, int) and mask.dropout_p:
        seed = scratch["seed"].fill_(seed - 2**64 if seed >= 2**63 else seed)
    return (
        strides
        | interval_arguments(mask)
        | band_arguments(sizes, mask)
        | {
            "bias": bias,
            "slopes": slopes,
            "seed": seed if mask.dropout_p else None,
            "threshold": threshold(mask.dropout_p),
            "inv_keep": 1.0 / (1.0 - mask.dropout_p),
            "group": sizes.group,
            "tq": sizes.tq,
            "tk": sizes.tk,
            "factor": math.copysign(max(abs(scale), LEAST_FACTOR), scale),
            "softcap": mask.softcap or None,
        }
    )


def is_plain(mask: Mask) -> bool:
    """Whether the scores are q·k times a factor: PLAIN in forward.py."""
    return mask.softcap == 0.0 and mask.bias is None and mask.alibi_slopes is None


def has_rare_features(mask: Mask) -> bool:
    """Whether the call has dropout or its scores are not PLAIN. There are many combinations of these features, so such calls
    share more of the compiled kernels."""
    return mask.dropout_p != 0.0 or not is_plain(mask)


def band_arguments(sizes: Sizes, mask: Mask) -> Arguments:
    """left and right, None if that side has no bound. A call with a window or with rare features has both."""
    left, right = sizes.left, sizes.right
    if left is not None or has_rare_features(mask):
        left, right = sizes.bounds
    return {"left": left, "right": right}


def interval_arguments(mask: Mask) -> Arguments:
    """Intervals and their strides. All are None in a call without intervals."""
    x = mask.intervals
    if x is None:
        return dict.fromkeys(("intervals", "intervals_b", "intervals_h"))
    return {"intervals": x, "intervals_b": _step(x, 0), "intervals_h": _step(x, 1)}


def list_arguments(mask: Mask, runs: Tensor | None, tiles: int) -> Arguments:
    """The lists of tiles that a kernel visits, `tiles` lists for each kv head with separate intervals; None without lists."""
    x = mask.intervals
    if x is None or runs is None:
        return dict.fromkeys(("runs", "runs_b", "runs_h"))
    heads = x.shape[1]
    return {"runs": runs, "runs_b": tiles * heads * (x.shape[0] > 1), "runs_h": tiles * (heads > 1)}


def _step(x: Tensor, axis: int) -> int:
    """The stride of an axis, 0 if it is broadcast."""
    return x.stride(axis) if x.shape[axis] > 1 else 0


def pairs_of(mask: Mask) -> int:
    """The number of intervals of a column."""
    return 0 if mask.intervals is None else mask.intervals.shape[3] // 2


def exponent_arguments(factor: float, dtype: torch.dtype) -> Arguments:
    """Factors of q·k in the forward: a positive factor · log2(e) (IEEE float32: factor), and the next power of two."""
    log2_factor = factor if ieee_fp32(dtype) else factor * LOG2E
    return {"log2_factor": log2_factor, "coarse_factor": coarse(log2_factor)}


def sequence_arguments(mask: Mask) -> Arguments:
    """The boundaries of packed sequences. They are None in a dense call."""
    return {"cu_seqlens_q": mask.cu_seqlens_q, "cu_seqlens_k": mask.cu_seqlens_k}


def stride_arguments(*, varlen: bool, **tensors: Tensor | None) -> Arguments:
    """x_b, x_h, x_t of tensors like q; 0 for None."""
    return _named({name: row_strides(x, varlen=varlen) for name, x in tensors.items()})


def lse_stride_arguments(*, varlen: bool, **tensors: Tensor | None) -> Arguments:
    """x_b, x_h, x_t of tensors like lse."""
    return _named({name: lse_strides(x, varlen=varlen) for name, x in tensors.items()})


def _named(strides: dict[str, tuple[int, ...]]) -> Arguments:
    return {f"{name}_{axis}": n for name, three in strides.items() for axis, n in zip("bht", three, strict=True)}


def column_arguments(align: int, **columns: tuple[int, int]) -> Arguments:
    """x_steps = columns / STEP for each x=(columns, padded columns), or None without padding. Because a kernel computes
    columns = x_steps · STEP, Triton knows that masks of padded columns are aligned."""
    step = align if all(n % align == 0 for n, _ in columns.values()) else 1
    return {f"{x}_steps": None if n == padded else n // step for x, (n, padded) in columns.items()} | {"STEP": step}


def sink_arguments(mask: Mask) -> Arguments:
    return {"sinks": mask.sinks, "sinks_h": 0 if mask.sinks is None else mask.sinks.stride(0)}


def forward_sink_arguments(mask: Mask, heads: int, lse: Tensor | None) -> Arguments:
    """With rare features, a call without sinks runs the same kernel as a call with sinks: it passes lse as `sinks`, and
    sink_heads = 0, so the kernel does not read lse there."""
    unread = {"sinks": lse} if mask.sinks is None and has_rare_features(mask) else {}
    return sink_arguments(mask) | {"sink_heads": 0 if mask.sinks is None else heads} | unread


def alignment(*tensors: Tensor | None, varlen: bool) -> int:
    """The elements in ALIGNED_BYTES if every row of every tensor starts at a multiple of ALIGNED_BYTES; otherwise 1."""
    present = [x for x in tensors if x is not None]
    elements = ALIGNED_BYTES // present[0].element_size()
    steps = all(stride % elements == 0 for x in present for stride in row_strides(x, varlen=varlen))
    return elements if steps and all(x.data_ptr() % ALIGNED_BYTES == 0 for x in present) else 1


def addressing(*tensors: Tensor | None, varlen: bool) -> Arguments:
    """The constexprs of memory.py: ALIGN, and INT64_OFFSETS if an offset inside a tile needs more than 32 bits."""
    far = any(TILE_ROWS * row_strides(x, varlen=varlen)[2] >= 2**31 for x in tensors if x is not None)
    return {"ALIGN": alignment(*tensors, varlen=varlen), "INT64_OFFSETS": far}
