"""The functions of flash-attn with tilegrad's kernels, and with the same argument names and layouts.

Arguments are as in flash-attn 2. Tensors are (B, T, H, D), packed tensors (total, H, D); Hq is a multiple of Hkv. −1 in
window_size means no limit on that side, and causal is aligned at the bottom right. Devices and dtypes are as in
`tilegrad.attention`. window_size and max_seqlen may be any values that Python accepts as an index, such as NumPy or torch ints.
Paged caches, rotary embeddings, cache_batch_idx and cache_leftpad raise NotImplementedError. return_attn_probs=True returns
(o, lse, None), because probabilities are never stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..functional import attention, attention_varlen
from ..kernels.attention.checks import TENSOR, require

Sides = Iterable[SupportsIndex]  # (left, right)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) → o (B, Tq, Hq, Dv), or (o, lse (B, Hq, Tq), None).

    >>> import torch
    >>> from tilegrad.flash import flash_attn_func
    >>> flash_attn_func(*torch.randn(3, 2, 16, 4, 32), causal=True).shape
    torch.Size([2, 16, 4, 32])
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    _check_tensors(q=q, k=k, v=v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attention(q, k, v, dropout_p=dropout_p, return_lse=True, **options)
    return (o.transpose(1, 2), lse, None) if return_attn_probs else o.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` with q, k and v in one tensor, qkv (B, T, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, "(B, T, 3, H, D)")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` with k and v in one tensor: q (B, Tq, Hq, D), kv (B, Tk, 2, Hkv, D)."""
    k, v = _unpacked("kv", kv, "(B, Tk, 2, Hkv, D)")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: SupportsIndex,
    max_seqlen_k: SupportsIndex,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q (total_q, Hq, D), k and v (total_k, Hkv, D), packed → o (total_q, Hq, Dv), or (o, lse (Hq, total_q), None)."""
    _refuse(block_table=block_table)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    longest = _int("max_seqlen_q", max_seqlen_q), _int("max_seqlen_k", max_seqlen_k)
    ends = cu_seqlens_q, cu_seqlens_k, *longest
    o, lse = attention_varlen(q, k, v, *ends, dropout_p=dropout_p, return_lse=True, **options)
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: SupportsIndex, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sides = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` with q, k and v in one tensor, qkv (total, 3, H, D)."""
    q, k, v = _unpacked("qkv", qkv, "(total, 3, H, D)")
    longest = _int("max_seqlen", max_seqlen)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, *options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: SupportsIndex,
    max_seqlen_k: SupportsIndex, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sides = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` with k and v in one tensor: q (total_q, Hq, D), kv (total_k, 2, Hkv, D)."""
    k, v = _unpacked("kv", kv, "(total_k, 2, Hkv, D)")
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, return_attn_probs
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sides = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Decoding: q (B, Tq, Hq, D) over caches (B, Tmax, Hkv, D); sequence b has cache_seqlens[b] columns. No gradient.

    k and v (B, Tnew, Hkv, D) are first written into the caches, in place, after these columns; the caller updates
    cache_seqlens. cache_seqlens=None means a full cache or, with k, an empty cache. num_splits and rotary_interleaved have no
    effect.
    """
    del rotary_interleaved, num_splits
    _refuse(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
    )
    if (k is None) != (v is None):
        raise ValueError(f"k, v: got only {'v' if k is None else 'k'}; accepted: both, or neither")
    _check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **({} if k is None or v is None else {"k": k, "v": v}))
    batch, rows, longest = q.shape[0], q.shape[1], k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = longest if k is None else 0
    columns = torch.as_tensor(cache_seqlens, device=q.device, dtype=torch.int64).expand(batch)
    if k is not None and v is not None:
        at = torch.arange(batch, device=q.device)[:, None], columns[:, None] + torch.arange(k.shape[1], device=q.device)
        k_cache[at], v_cache[at] = k.to(k_cache.dtype), v.to(v_cache.dtype)
        columns = columns + k.shape[1]
    zeros = torch.zeros_like(columns)  # the unused columns of a cache become a packed sequence without rows
    ends_q, ends_k = ends_of(zeros + rows, zeros), ends_of(columns, longest - columns)
    if alibi_slopes is not None and alibi_slopes.ndim == 2:
        alibi_slopes = alibi_slopes.repeat_interleave(2, 0)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic=False)
    q, keys, values = (x.flatten(0, 1) for x in (q, k_cache, v_cache))
    o, lse = attention_varlen(q, keys, values, ends_q, ends_k, rows, longest, return_lse=True, **options)
    o = o.unflatten(0, (batch, rows))
    return (o, lse.unflatten(1, (batch, rows)).transpose(0, 1)) if return_softmax_lse else o


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sides,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """The options of `attention`."""
    sides = tuple(window_size) if isinstance(window_size, Iterable) else ()
    require(len(sides) == 2, "window_size", window_size, "a pair (left, right) of ints; −1: no limit on that side")
    left, right = (None if side < 0 else side for side in (_int("window_size", x) for x in sides))
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        "deterministic": deterministic or None,
    }


def ends_of(*lengths: Tensor) -> Tensor:
    """Cumulative lengths of the runs of B sequences, in order. Each of `lengths` (B,) has the length of one run of each."""
    return pad(torch.stack(lengths, 1).flatten().cumsum(0), (1, 0)).int()


def _int(name: str, x: SupportsIndex) -> int:
    try:
        return int(index(x))
    except TypeError:
        raise TypeError(f"{name}: got {x!r}; accepted: an int, also of NumPy or torch") from None


def _unpacked(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Views of q, k and v, or of k and v, in a tensor of this layout, such as "(B, T, 3, H, D)"."""
    _check_tensors(**{name: packed})
    sizes = layout.strip("()").split(", ")
    count = sizes[-3]
    fits = packed.ndim == len(sizes) and str(packed.shape[-3]) == count
    require(fits, name, f"shape {tuple(packed.shape)}", layout, show=str)
    return packed.unbind(-3)


def _check_tensors(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        require(isinstance(x, Tensor), name, type(x).__name__, TENSOR, TypeError, show=str)


def _refuse(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None:
            raise NotImplementedError(f"{name}: got a tensor; accepted: None")
