"""Attention over a cache of keys and values, for generation: B sequences, each with room for `capacity` tokens.

    k_cache, v_cache (B, Hkv, capacity, D)       q, o (B, Hq·D)   k, v (B, Hkv·D)   positions (B,), slots (N,) int64

    prefill    cache_write_fwd        for each row n, s = slots[n]:  k_cache[s // capacity, :, s % capacity] = k[n], same for v
    one token  cache_attention_fwd    for each sequence b, p = positions[b], the number of tokens in its cache:
                                      k_cache[b, :, p] = k[b], same for v, then
                                      o[b] = attention of q[b] to columns 0 … p of k_cache[b] and v_cache[b]

The equations of attention/mask.py apply with Tq = 1 and Tk = p + 1: window, softcap, ALiBi slopes, sinks and scale are
taken from the mask. The mask must be causal, without dropout, bias, intervals or packed sequences.

A position outside 0 … capacity − 1 writes nothing and gives o[b] = 0, so −1 marks a row of the batch without a sequence. A slot
outside 0 … B · capacity − 1 writes nothing either. Columns after positions[b] are not used, so a cache needs no initial value.

The bits of a row depend on its own sequence alone, not on the batch or on the number of threads. Kernel `native` computes the
same bits as the kernel `native` of attention in a training forward, dense or packed. Kernel `triton` computes the same bits as
the kernel `triton` of attention with invariant=True.

`CACHE_ATTENTION` is the table of kernels. Each module offers `workspace`, `write` on k and v (N, Hkv, D), and `fwd` on q and o
(B, Hq, D), k and v (B, Hkv, D).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..attention.checks import DTYPES, check_options, check_tensors, require
from ..attention.mask import Mask
from ..attention.qkv import split
from ..checks import check_columns, check_tensor
from ..cpu import library
from ..op import op
from ..overlap import check_apart
from ..scratch import Form, Shapes, TensorLike
from ..table import Kernel, Table, Where, takes_all

LONGEST = 2**31 - 1  # largest capacity


class Problem(NamedTuple):
    """cache is k_cache or v_cache. rows is N in a prefill, and None for one token of each sequence."""

    cache: TensorLike
    n_head: int
    rows: int | None = None


class Caches(NamedTuple):
    """(B, Hkv, capacity, D) each."""

    k: Tensor
    v: Tensor


CACHE_ATTENTION = Table(
    "cache_attention",
    (
        Kernel("triton", "cache_attention.triton_ops", lambda problem: gpu.refusal(problem.cache)),
        Kernel("native", "cache_attention.cpu", lambda problem: library.refusal(problem.cache.device)),
        Kernel("torch", "cache_attention.torch_ops", takes_all),
    ),
)


def cache_write_workspace(
    n: int, b: int, n_kv_head: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device, *,
    kernel: str | None = None,
) -> Shapes:  # fmt: skip
    """Name → (shape, dtype) of the scratch for up to n rows."""
    cache = Form((b, n_kv_head, capacity, head_dim), dtype, device)
    return CACHE_ATTENTION.workspace(Problem(cache, n_kv_head, n), kernel=kernel)


def cache_attention_workspace(
    b: int, n_head: int, n_kv_head: int, head_dim: int, capacity: int, mask: Mask, dtype: torch.dtype, device: torch.device, *,
    kernel: str | None = None,
) -> Shapes:  # fmt: skip
    """Name → (shape, dtype) of the scratch for up to b sequences; raises for a mask that the op does not take."""
    check_mask(mask)
    cache = Form((b, n_kv_head, capacity, head_dim), dtype, device)
    return CACHE_ATTENTION.workspace(Problem(cache, n_head), kernel=kernel)


@op(adds=("k_cache", "v_cache"))
def cache_write_fwd(
    k: Tensor, v: Tensor | None, slots: Tensor, n_head: int | None = None, n_kv_head: int | None = None, *,
    k_cache: Tensor, v_cache: Tensor, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Writes the rows of k and v (N, Hkv·D) to slots of the cache. No two rows may have the same slot.

    v=None: k is the fused qkv (N, (Hq + 2·Hkv)·D), and n_head is needed."""
    _check_caches(k_cache, v_cache)
    _, hkv, _, d = k_cache.shape
    require(n_kv_head in (None, hkv), "n_kv_head", n_kv_head, f"None or {hkv}, the heads of k_cache")
    n = len(k)
    if v is None:
        require(
            n_head is not None, "n_head", n_head, "the number of query heads, because v is None and k is a fused qkv"
        )
        _, keys, values = split(_rows("k", k, n, (n_head or 0) + 2 * hkv, k_cache)[None], n_head or 0, hkv, packed=True)
    else:
        keys, values = (_rows(name, x, n, hkv, k_cache).view(n, hkv, d) for name, x in (("k", k), ("v", v)))
    _check_numbers("slots", slots, n, k_cache)
    check_apart({"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v, "slots": slots})
    problem = Problem(k_cache, hkv, n)
    CACHE_ATTENTION.run("write", problem, keys, values, slots, k_cache=k_cache, v_cache=v_cache, **where)


@op(adds=("k_cache", "v_cache"), one_kernel=True)
def cache_attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, positions: Tensor, mask: Mask, n_head: int, n_kv_head: int, *,
    o: Tensor, k_cache: Tensor, v_cache: Tensor, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Appends each sequence's new k and v to the cache, and writes o. k = v = None: q is the fused qkv (B, (Hq + 2·Hkv)·D)."""
    _check(q, k, v, positions, mask, n_head, n_kv_head, o, k_cache, v_cache)
    b, d = len(q), k_cache.shape[3]
    if k is None or v is None:
        q, k, v = split(q[None], n_head, n_kv_head, packed=True)
    else:
        q, k, v = q.view(b, n_head, d), k.view(b, n_kv_head, d), v.view(b, n_kv_head, d)
    problem = Problem(k_cache, n_head)
    o, caches = o.view(b, n_head, d), Caches(k_cache, v_cache)
    CACHE_ATTENTION.run("fwd", problem, q, k, v, positions, mask, o=o, caches=caches, **where)


def check_mask(mask: Mask) -> None:
    """Raises for options that attention over a cache does not support."""
    why = "because a new token attends to the tokens before it"
    require(mask.causal is True, "causal", mask.causal, f"True, {why}")
    require(not mask.dropout_p, "dropout_p", mask.dropout_p, "0, because generation has no dropout")
    require(mask.bias is None, "bias", mask.bias, "None, because the lengths of sequences differ", show=_shape)
    require(mask.intervals is None, "intervals", mask.intervals, f"None, {why}", show=_shape)
    for name, x in (("cu_seqlens_q", mask.cu_seqlens_q), ("cu_seqlens_k", mask.cu_seqlens_k)):
        require(x is None, name, x, "None, because each sequence has its own place in the cache", show=_shape)


def _check(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    positions: Tensor,
    mask: Mask,
    n_head: int,
    n_kv_head: int,
    o: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    check_mask(mask)
    _check_caches(k_cache, v_cache)
    b, hkv, _, d = k_cache.shape
    require(n_kv_head == hkv, "n_kv_head", n_kv_head, f"{hkv}, the heads of k_cache")
    require(
        (k is None) == (v is None), "v", v, "None if k is None, otherwise a tensor", show=lambda x: type(x).__name__
    )
    _rows("q", q, b, n_head + (0 if k is not None else 2 * hkv), k_cache)
    for name, x, heads in (("k", k, hkv), ("v", v, hkv), ("o", o, n_head)):
        if x is not None:
            _rows(name, x, b, heads, k_cache)
    _check_numbers("positions", positions, b, k_cache)
    q_heads = q[:, : n_head * d].unflatten(1, (n_head, d))[:, :, None]
    check_options(q_heads, k_cache, v_cache, mask)
    check_tensors(q_heads, k_cache, v_cache, mask)
    reads = {"q": q, "k": k, "v": v, "positions": positions, "alibi_slopes": mask.alibi_slopes, "sinks": mask.sinks}
    check_apart({"o": o, "k_cache": k_cache, "v_cache": v_cache}, reads)


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            x.ndim == 4 and x.shape[2] > 0, name, x, "(B, Hkv, capacity, D) with a capacity of at least 1", show=_shape
        )
        require(x.shape[2] <= LONGEST, name, x, f"a capacity of at most {LONGEST}", show=_shape)
        require(x.is_contiguous(), name, x.stride(), "the strides of a contiguous tensor (call .contiguous())")
    require(k_cache.dtype in DTYPES, "k_cache", k_cache.dtype, "float32, float16, bfloat16 or float64", TypeError)
    check_tensor("v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype, k_cache.device)


def _rows(name: str, x: Tensor, n: int, heads: int, cache: Tensor) -> Tensor:
    """Checks that x is (n, heads·D) in the cache's dtype, with contiguous columns, and returns x."""
    check_tensor(name, x, (n, heads * cache.shape[3]), cache.dtype, cache.device)
    check_columns(name, x)
    return x


def _check_numbers(name: str, x: Tensor, n: int, cache: Tensor) -> None:
    check_tensor(name, x, (n,), torch.int64, cache.device)
    require(x.is_contiguous(), name, x.stride(), "the strides of a contiguous tensor (call .contiguous())")


def _shape(x: Any) -> str:
    return f"shape {tuple(x.shape)}"
