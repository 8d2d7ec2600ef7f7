"""flash-attn's functions by tilegrad's kernels, with its argument names and layouts.

Arguments are those of flash-attn 2. Tensors are (B, T, H, D), packed ones (total, H, D); Hq is a multiple of Hkv. A side of
window_size is open at −1, and causal is aligned at the bottom right. Devices and dtypes are those of `tilegrad.attention`.
What is not there raises: paged caches, and rotary embeddings inside of decoding. return_attn_probs gives (o, lse, None), for
probabilities never exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .functional import attention, attention_varlen


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q (B, Tq, Hq, D), k and v (B, Tk, Hkv, D) → o (B, Tq, Hq, Dv), or (o, lse (B, Hq, Tq), None).

    >>> import torch
    >>> from tilegrad.flash import flash_attn_func
    >>> flash_attn_func(*torch.randn(3, 2, 16, 4, 32), causal=True).shape
    torch.Size([2, 16, 4, 32])
    """
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attention(q, k, v, dropout_p=dropout_p, return_lse=True, **options)
    return (o.transpose(1, 2), lse, None) if return_attn_probs else o.transpose(1, 2)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of qkv (B, T, 3, H, D)."""
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv: got shape {tuple(qkv.shape)}; accepted: (B, T, 3, H, D)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q (total_q, Hq, D), k and v (total_k, Hkv, D), sequences end to end → o (total_q, Hq, Dv), or with lse (Hq, total_q)."""
    _absent(block_table=block_table)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    o, lse = attention_varlen(q, k, v, *ends, dropout_p=dropout_p, return_lse=True, **options)
    return (o, lse, None) if return_attn_probs else o


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Decoding: q (B, Tq, Hq, D) over caches (B, Tmax, Hkv, D), of which row b has cache_seqlens[b] columns; no gradient.

    k and v (B, Tnew, Hkv, D) are first written into the caches behind those columns, in place; cache_seqlens is left to the
    caller. cache_seqlens=None is a full cache, or with k an empty one. num_splits and rotary_interleaved change nothing.
    """
    del rotary_interleaved, num_splits
    _absent(
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table,
    )  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError(f"k, v: got {'v' if k is None else 'k'} alone; accepted: both, or none")
    batch, rows, longest = q.shape[0], q.shape[1], k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = longest if k is None else 0
    columns = torch.as_tensor(cache_seqlens, device=q.device, dtype=torch.int64).expand(batch)
    if k is not None and v is not None:
        at = torch.arange(batch, device=q.device)[:, None], columns[:, None] + torch.arange(k.shape[1], device=q.device)
        k_cache[at], v_cache[at] = k.to(k_cache.dtype), v.to(v_cache.dtype)
        columns = columns + k.shape[1]
    none = torch.zeros_like(columns)  # a cache's unused columns are a sequence without rows
    ends_q, ends_k = (
        pad(torch.stack(lengths, 1).flatten().cumsum(0), (1, 0)).int()
        for lengths in ((none + rows, none), (columns, longest - columns))
    )
    if alibi_slopes is not None and alibi_slopes.ndim == 2:
        alibi_slopes = alibi_slopes.repeat_interleave(2, 0)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic=False)
    q, keys, values = (x.flatten(0, 1) for x in (q, k_cache, v_cache))
    o, lse = attention_varlen(q, keys, values, ends_q, ends_k, rows, longest, return_lse=True, **options)
    o = o.unflatten(0, (batch, rows))
    return (o, lse.unflatten(1, (batch, rows)).transpose(0, 1)) if return_softmax_lse else o


def _options(
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:  # fmt: skip
    """The options of `attention`."""
    left, right = (None if side < 0 else side for side in window_size)
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        "deterministic": deterministic or None,
    }


def _absent(**given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            raise NotImplementedError(f"{name}: got a tensor; accepted: None")
