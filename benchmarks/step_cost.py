"""FLOPs and bytes of the ops that a training step needs, by group."""

from __future__ import annotations

from typing import NamedTuple

from tilegrad.bench.cost import attention_bytes, attention_flops
from tilegrad.model.config import ModelConfig


class Demand(NamedTuple):
    """FLOPs and bytes of one op, or of several similar ops together."""

    flops: float
    bytes: float


def linears(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer of a block."""
    c, f, d = config.n_embd, config.ffn, config.head_dim
    up = [(c, f)] * (2 if config.activation == "swiglu" else 1)
    return [(c, (config.n_head + 2 * config.kv_heads) * d), (config.n_head * d, c), *up, (f, c)]


def step_flops(config: ModelConfig, batch_size: int, seq_len: int) -> int:
    """FLOPs of a training step for MFU: three times the forward FLOPs of the linear layers, the head and causal attention. The
    backward counts as two forwards, even if activations are recomputed. Norms, activations and AdamW are not counted."""
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
    """The least work of each op of a step, in the groups of breakdown.py.     N = B·T rows   e = element_bytes

    A linear layer reads or writes each of its three matrices once; weight gradients are float32. A residual addition and the
    next norm are one pass. The backward of a norm or of an activation writes the output of the forward again. The gradient of
    the logits overwrites the logits. AdamW reads w, g, m, v and writes w, m, v and the copy of w in the compute dtype; clipping
    reads g. Bias gradients are not counted.
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
    copy = 0 if e == 4 else e  # bytes of the copy of a parameter in the compute dtype
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
