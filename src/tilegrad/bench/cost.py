"""What an op must do and move: the only FLOP and byte formulas of the package.

A product of (M, K) and (K, N) is 2·M·N·K FLOPs. Attention counts the pairs (i, j) that see each other, so a causal call
has half of a full one's; the backward counts its five products (s, dp, dv, dq, dk) once each, whatever a kernel
recomputes. Bytes count each input read once and each output written once.
"""

from __future__ import annotations

from typing import NamedTuple

from ..model.config import ModelConfig


def visible_pairs(tq: int, tk: int, left: int | None = None, right: int | None = None) -> int:
    """Pairs with −right ≤ i + Tk − Tq − j ≤ left: those up to the right edge, less those before the left one."""
    seen = tq * tk if right is None else _pairs_up_to(tq, tk, right)
    return seen if left is None else max(0, seen - _pairs_up_to(tq, tk, -left - 1))


def _pairs_up_to(tq: int, tk: int, edge: int) -> int:
    """Pairs with j ≤ i + Tk − Tq + edge. Row i has clamp(first + i, 0, Tk) of them: none, then a ramp, then all."""
    first = tk - tq + edge + 1
    low = min(max(0, -first), tq)
    high = min(max(low, tk - first), tq)
    return (high - low) * (2 * first + low + high - 1) // 2 + (tq - high) * tk


def attention_flops(
    batch: int, heads: int, tq: int, tk: int, d: int, dv: int, *, left: int | None = None, right: int | None = None,
    backward: bool = False,
) -> int:  # fmt: skip
    """Forward: q kᵀ and p v. Backward: q kᵀ, do vᵀ, pᵀ do, ds k, dsᵀ q."""
    widths = 3 * d + 2 * dv if backward else d + dv
    return 2 * batch * heads * visible_pairs(tq, tk, left, right) * widths


def attention_bytes(
    batch: int, heads: int, kv_heads: int, tq: int, tk: int, d: int, dv: int, element_bytes: int, *, backward: bool = False
) -> int:  # fmt: skip
    """Forward: q, k, v → o, lse. Backward: q, k, v, o, do, lse → dq, dk, dv."""
    q, o = batch * heads * tq * d, batch * heads * tq * dv
    kv = batch * kv_heads * tk * (d + dv)
    lse_bytes = 4 * batch * heads * tq
    elements = 2 * (q + o + kv) if backward else q + kv + o
    return elements * element_bytes + lse_bytes


class Demand(NamedTuple):
    """Of one or more ops that are alike."""

    flops: float
    bytes: float


def linears(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of a block's linears."""
    c, f, d = config.n_embd, config.ffn, config.head_dim
    up = [(c, f)] * (2 if config.activation == "swiglu" else 1)
    return [(c, (config.n_head + 2 * config.kv_heads) * d), (config.n_head * d, c), *up, (f, c)]


def step_flops(config: ModelConfig, batch_size: int, seq_len: int) -> int:
    """Of a training step, as MFU counts them: three times the forward's linears, head and attention (causal pairs only). The
    backward counts twice the forward, whatever is recomputed; norms, activations and the optimizer count nothing."""
    n, c = batch_size * seq_len, config.n_embd
    products = config.n_layer * sum(i * o for i, o in linears(config)) + config.vocab_size * c
    left = None if config.window is None else config.window - 1
    attention = attention_flops(
        batch_size, config.n_head, seq_len, seq_len, config.head_dim, config.head_dim, left=left, right=0
    )
    return 3 * (2 * n * products + config.n_layer * attention)


def step_demands(
    config: ModelConfig, batch_size: int, seq_len: int, element_bytes: int, n_params: int
) -> dict[str, list[Demand]]:
    """What a step can't do without, op by op, in the groups of breakdown.py.     N = B·T rows   e = element_bytes

    A linear reads and writes each of its three matrices once; weight gradients are float32. A residual addition and the norm
    behind it are one pass; the norm's backward writes the norm's output again, the activation's backward the activation. The
    loss's gradient takes the logits' place. AdamW reads w, g, m, v and writes w, m, v and the compute copy; the clip reads g.
    Bias gradients ride along.
    """
    n, e, layers = batch_size * seq_len, element_bytes, config.n_layer
    c, f, v, d = config.n_embd, config.ffn, config.vocab_size, config.head_dim
    forward, weight = [], []
    for i, o in linears(config):
        forward.append(Demand(2 * n * i * o, e * (n * i + i * o + n * o)))
        weight.append(Demand(2 * n * i * o, e * (n * i + n * o) + 4 * i * o))
    head = Demand(2 * n * c * v, e * (n * c + c * v + n * v))
    head_weight = Demand(2 * n * c * v, e * (n * c + n * v) + 4 * c * v)

    def attention(*, backward: bool) -> Demand:
        sizes = (seq_len, seq_len, d, d)
        flops = attention_flops(batch_size, config.n_head, *sizes, right=0, backward=backward)
        return Demand(flops, attention_bytes(batch_size, config.n_head, config.kv_heads, *sizes, e, backward=backward))

    hidden = 2 if config.activation == "swiglu" else 1
    norms = 2 * layers + 1
    rope = 2 * e * n * (config.n_head + config.kv_heads) * d if config.position == "rope" else 0
    copy = 0 if e == 4 else e  # of the parameters, in the compute dtype
    return {
        "GEMM forward": forward * layers,
        "GEMM dgrad": forward * layers,
        "GEMM wgrad": weight * layers,
        "head forward": [head],
        "head dgrad": [head],
        "head wgrad": [head_weight],
        "attention forward": [attention(backward=False)] * layers,
        "attention backward": [attention(backward=True)] * layers,
        "rope": [Demand(0, rope)] * (2 * layers),
        "norms forward": [Demand(0, 2 * e * n * c)] + [Demand(0, 4 * e * n * c)] * (norms - 1),
        "norms backward": [Demand(0, 4 * e * n * c)] + [Demand(0, 5 * e * n * c)] * (norms - 1),
        "activation forward": [Demand(0, (hidden + 1) * e * n * f)] * layers,
        "activation backward": [Demand(0, 2 * (hidden + 1) * e * n * f)] * layers,
        "loss": [Demand(0, 2 * e * n * v)],
        "optimizer": [Demand(0, 4 * n_params), Demand(0, (28 + copy) * n_params)],
        "embeddings": [Demand(0, 2 * e * n * c), Demand(0, e * n * c + 8 * min(n, v) * c)],
    }
