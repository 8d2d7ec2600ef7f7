"""The arguments and constexprs of a kernel, by parameter name, on the host.

Kernels take plain numbers, not NamedTuples: Triton 3.6 specialises the elements of a tuple on their values (1, multiples of 16)
whatever `do_not_specialize` says, and would recompile for every change of sizes and strides. So each launch combines the groups
below: the features of scores, sequence boundaries, strides, constexprs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...philox import threshold
from ...scratch import Scratch
from ..mask import Mask, four_dims
from ..problem import ALIGNED_BYTES, LEAST_FACTOR, LOG2E, Sizes, coarse, lse_strides, row_strides

Arguments = dict[str, Any]

TILE_ROWS = 256  # most rows of any tile


def ieee_fp32(dtype: torch.dtype) -> bool:
    """Whether the dtype is float32 and torch doesn't allow tf32."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"


def score_arguments(sizes: Sizes, mask: Mask, scratch: Scratch) -> Arguments:
    """For every kernel with scores: sizes, the band, and the features that turn q·k into scores."""
    bias, slopes, seed = mask.bias, mask.alibi_slopes, mask.seed
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
        | {
            "bias": bias,
            "slopes": slopes,
            "seed": seed if mask.dropout_p else None,
            "threshold": threshold(mask.dropout_p),
            "inv_keep": 1.0 / (1.0 - mask.dropout_p),
            "group": sizes.group,
            "tq": sizes.tq,
            "tk": sizes.tk,
            "left": sizes.left,
            "right": sizes.right,
            "factor": max(abs(mask.scale_for(sizes.d)), LEAST_FACTOR),
            "softcap": mask.softcap or None,
        }
    )


def interval_arguments(mask: Mask) -> Arguments:
    """Intervals and their strides. All are None in a call without intervals."""
    x = mask.intervals
    if x is None:
        return dict.fromkeys(("intervals", "intervals_b", "intervals_h"))
    return {"intervals": x, "intervals_b": _step(x, 0), "intervals_h": _step(x, 1)}


def list_arguments(mask: Mask, runs: Tensor | None, tiles: int) -> Arguments:
    """The lists of tiles that a kernel visits: `tiles` lists for each kv head with separate intervals. All None without
    lists."""
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
    """Factors of q·k in the forward: factor · log2(e) (IEEE float32: factor), and the next power of two."""
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


def sink_arguments(mask: Mask) -> Arguments:
    return {"sinks": mask.sinks, "sinks_h": 0 if mask.sinks is None else mask.sinks.stride(0)}


def alignment(*tensors: Tensor | None, varlen: bool) -> int:
    """The number of elements of which every row offset is a multiple: ALIGNED_BYTES in the first tensor's dtype, or else 1."""
    given = [x for x in tensors if x is not None]
    elements = ALIGNED_BYTES // given[0].element_size()
    steps = all(stride % elements == 0 for x in given for stride in row_strides(x, varlen=varlen))
    return elements if steps and all(x.data_ptr() % ALIGNED_BYTES == 0 for x in given) else 1


def addressing(*tensors: Tensor | None, varlen: bool) -> Arguments:
    """The constexprs of memory.py: ALIGN, and INT64_OFFSETS if an offset inside a tile needs more than 32 bits."""
    far = any(TILE_ROWS * row_strides(x, varlen=varlen)[2] >= 2**31 for x in tensors if x is not None)
    return {"ALIGN": alignment(*tensors, varlen=varlen), "INT64_OFFSETS": far}
