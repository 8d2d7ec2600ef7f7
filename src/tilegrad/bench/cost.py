"""The FLOPs and bytes that attention needs.

A GEMM of (M, K) and (K, N) has 2·M·N·K FLOPs. Only pairs (i, j) that attend are counted, so a causal call has half the FLOPs of
a call without a mask. The five GEMMs of the backward (s, dp, dv, dq, dk) are counted once each, even if a kernel recomputes
some of them. For bytes, each input is read once and each output is written once.
"""

from __future__ import annotations


def visible_pairs(tq: int, tk: int, left: int | None = None, right: int | None = None) -> int:
    """The number of pairs with −right ≤ i + Tk − Tq − j ≤ left: pairs up to the right edge minus pairs before the left edge."""
    seen = tq * tk if right is None else _pairs_up_to(tq, tk, right)
    return seen if left is None else max(0, seen - _pairs_up_to(tq, tk, -left - 1))


def _pairs_up_to(tq: int, tk: int, edge: int) -> int:
    """The number of pairs with j ≤ i + Tk − Tq + edge. Row i has clamp(first + i, 0, Tk) of them: the first rows have none,
    then each row has one more than the row before it, and the last rows have Tk."""
    first = tk - tq + edge + 1
    low = min(max(0, -first), tq)
    high = min(max(low, tk - first), tq)
    return (high - low) * (2 * first + low + high - 1) // 2 + (tq - high) * tk


def attention_flops(
    batch: int,
    heads: int,
    tq: int,
    tk: int,
    d: int,
    dv: int,
    *,
    left: int | None = None,
    right: int | None = None,
    backward: bool = False,
) -> int:
    """FLOPs of the GEMMs. Forward: q kᵀ and p v. Backward: q kᵀ, do vᵀ, pᵀ do, ds k, dsᵀ q."""
    widths = 3 * d + 2 * dv if backward else d + dv
    return 2 * batch * heads * visible_pairs(tq, tk, left, right) * widths


def attention_bytes(
    batch: int, heads: int, kv_heads: int, tq: int, tk: int, d: int, dv: int, element_bytes: int, *, backward: bool = False
) -> int:  # fmt: skip
    """Bytes of the inputs and outputs. Forward: q, k, v → o, lse. Backward: q, k, v, o, do, lse → dq, dk, dv."""
    q, o = batch * heads * tq * d, batch * heads * tq * dv
    kv = batch * kv_heads * tk * (d + dv)
    lse_bytes = 4 * batch * heads * tq
    elements = 2 * (q + o + kv) if backward else q + kv + o
    return elements * element_bytes + lse_bytes
