"""FLOPs and bytes of the ops that a training step needs, by group."""

from __future__ import annotations

from typing import NamedTuple

from tilegrad.bench.cost import attention_bytes, attention_flops
from tilegrad.model.config import ModelConfig
from tilegrad.model.lora import AdapterParts, LoraConfig, adapter_parts


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


def adapter_count(config: ModelConfig, lora: LoraConfig) -> int:
    """The number of trained parameters of a model with adapters."""
    of_block = sum(
        lora.rank * (len(each.widths) * each.inputs + sum(each.widths.values())) for each in adapter_parts(config, lora)
    )
    return config.n_layer * of_block


def adapter_demands(adapter: AdapterParts, rank: int, n: int, e: int) -> dict[str, Demand]:
    """The least work of the ops of one adapter.     N rows   e bytes of an element   R = P·rank columns of u   W = Σ widths

    u and dA read x, and one pass over dy computes du and dB. The terms that an adapter adds to y and to dx cost FLOPs and the
    bytes of their factors, but no pass over y or dx, because a product of joined matrices adds them: y = [x, u] [W, B]'.
    """
    i, w, r = adapter.inputs, sum(adapter.widths.values()), rank * len(adapter.widths)
    a, b = r * i, w * rank  # elements of A, and of all B
    return {
        "u = s x A'": Demand(2 * n * a, e * (n * i + a + n * r)),
        "y += u B'": Demand(2 * n * b, e * (n * r + b)),
        "du, dB": Demand(4 * n * b, e * (n * w + 2 * n * r + b) + 4 * b),
        "dx += du A": Demand(2 * n * a, e * (n * r + a)),
        "dA": Demand(2 * n * a, e * (n * i + n * r) + 4 * a),
    }


def step_demands(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    element_bytes: int,
    n_params: int,
    lora: LoraConfig | None = None,
) -> dict[str, list[Demand]]:
    """The least work of each op of a step, in the groups of breakdown.py.     N = B·T rows   e = element_bytes

    A linear layer reads or writes each of its three matrices once; weight gradients are float32. A residual addition and the
    next norm are one pass. The backward of a norm or of an activation writes the output of the forward again. The gradient of
    the logits overwrites the logits. AdamW reads w, g, m, v and writes w, m, v and the copy of w in the compute dtype; clipping
    reads g. Bias gradients are not counted.

    n_params is the number of trained parameters. With adapters (`lora`, on all layers and without dropout) no other parameter
    has a gradient, and nothing needs dx of the first projections of block 0, although our step computes it.
    """
    if lora is not None and (lora.layers != "all" or lora.dropout):
        raise ValueError(f"lora: got {lora}; accepted: adapters on all layers, without dropout")
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
    demands = {
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
    if lora is None:
        return demands
    of_block = [adapter_demands(each, lora.rank, n, e) for each in adapter_parts(config, lora)]
    forwards = [each[op] for each in of_block for op in ("u = s x A'", "y += u B'")] * layers
    backwards = [each[op] for each in of_block for op in ("du, dB", "dx += du A", "dA")] * layers
    backwards.remove(of_block[0]["dx += du A"])
    for without in ("GEMM wgrad", "head wgrad"):
        del demands[without]
    del demands["GEMM dgrad"][0], demands["norms backward"][-1], demands["embeddings"][-1]
    return demands | {"adapters forward": forwards, "adapters backward": backwards}
