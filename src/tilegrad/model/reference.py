"""The transformer in torch ops, as functions of its parameters by name.       tokens (…, T)   x (…, T, C)

    x = scale · wte[tokens] + wpe[start + position]        for each block: x += attention(norm(x)), x += feed_forward(norm(x))

With `lora`, adapters add to the outputs of linear layers (model/lora.py), without dropout. The caller passes the attention
function. Autograd can differentiate the function `causal`: with it the model is the reference for the hand-written backward
(tests, `tilegrad gradcheck --against autograd`), and is compared with the engine in benchmarks/training.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.rope.frequencies import rope_frequencies
from .config import ModelConfig
from .lora import LoraConfig, adapter_parts

Params = Mapping[str, Tensor]
# block, q (…, Hq, T, D), k, v (…, Hkv, T, D) → o (…, Hq, T, D)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def norm(p: Params, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    w, b = p[f"{name}.weight"], p.get(f"{name}.bias")
    if config.norm == "layernorm":
        return F.layer_norm(x, (x.shape[-1],), w, b, config.norm_eps)
    return F.rms_norm(x, (x.shape[-1],), w, config.norm_eps)


def linear(p: Params, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def per_head(p: Params, name: str, x: Tensor) -> Tensor:
    """A linear layer in which the D outputs of a head read only its own D inputs.       weight (H, D, D) = (head, out, in)"""
    w, b = p[f"{name}.weight"], p.get(f"{name}.bias")
    h, d, _ = w.shape
    y = torch.einsum("...hi,hoi->...ho", x.unflatten(-1, (h, d)), w)
    return (y if b is None else y + b).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiplies x by cos + i·sin, with the halves of D as real and imaginary parts.       x (…, T, D)   cos, sin (T, D/2)"""
    real, imag = x.chunk(2, dim=-1)
    return torch.cat([real * cos - imag * sin, imag * cos + real * sin], -1)


def low_rank(
    p: Params, i: int, name: str, x: Tensor, config: ModelConfig, lora: LoraConfig | None
) -> dict[str, Tensor]:
    """part → s (x A_i') B_i', for the adapter `name` of a block; {} if the block has no such adapter. Raises if `lora` does not
    describe the adapters in the parameters."""
    parts = () if lora is None else adapter_parts(config, lora)
    adapter = next((each for each in parts if each.name == name), None)
    shapes: dict[str, tuple[int, int]] = {}
    if adapter is not None and lora is not None:
        shapes = {adapter.b_name(i, part): (width, lora.rank) for part, width in adapter.widths.items()}
        shapes[adapter.a_name(i)] = (lora.rank * len(adapter.widths), adapter.inputs)
    a = f"blocks.{i}.{name}.lora_a"
    for key in {a, *shapes}:
        expected, shape = shapes.get(key), tuple(p[key].shape) if key in p else None
        if expected != shape:
            raise ValueError(
                f"lora: got {lora} with adapters in params that do not fit it ({key}: {shape}, not {expected}); accepted: the "
                "LoraConfig that they were trained with, or None without adapters"
            )
    if adapter is None or lora is None:
        return {}
    u = F.linear(x, p[a]).split(lora.rank, dim=-1)
    return {
        part: lora.scale * F.linear(u_part, p[adapter.b_name(i, part)])
        for part, u_part in zip(adapter.widths, u, strict=True)
    }


def attention(
    p: Params,
    i: int,
    x: Tensor,
    tokens: Tensor,
    config: ModelConfig,
    attend: Attend,
    lora: LoraConfig | None = None,
) -> Tensor:
    name, hq, hkv, d = f"blocks.{i}.attn", config.n_head, config.kv_heads, config.head_dim
    added = low_rank(p, i, "attn.in", x, config, lora)
    if config.projection == "dense" and config.qk_norm:
        q, k, v = (linear(p, f"{name}.{part}", x) for part in "qkv")
    elif config.projection == "dense":
        qkv = linear(p, f"{name}.qkv", x)
        q, k, v = (qkv + added["qkv"] if "qkv" in added else qkv).split([hq * d, hkv * d, hkv * d], dim=-1)
    else:
        q, k, v = (per_head(p, f"{name}.{part}", x) for part in "qkv")
    q, k, v = (y + added[part] if part in added else y for part, y in (("q", q), ("k", k), ("v", v)))
    if i in config.value_blocks:
        v = v + p[f"{name}.value_embedding.scalar"] * p[f"{name}.value_embedding.weight"][tokens]
    q, k, v = (part.unflatten(-1, (-1, d)) for part in (q, k, v))
    if config.qk_norm:
        q, k = (F.rms_norm(y, (d,), p[f"{name}.{n}_norm.weight"], config.norm_eps) for n, y in (("q", q), ("k", k)))
    q, k, v = (part.transpose(-3, -2) for part in (q, k, v))
    o = attend(i, q, k, v).transpose(-3, -2).flatten(-2)
    y, added = linear(p, f"{name}.proj", o), low_rank(p, i, "attn.proj", o, config, lora)
    return y + added["proj"] if added else y


def causal(config: ModelConfig, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which each token attends to itself and to earlier tokens, at most `window` in all. Positions begin at 0."""
    t, d, device = q.shape[-2], config.head_dim, q.device
    if config.position == "rope":
        frequencies, factor = rope_frequencies(config.rope_theta, d, config.rope_scaling)
        frequency = torch.tensor(frequencies, dtype=torch.float64, device=device)
        angle = torch.outer(torch.arange(t, device=device).double(), frequency)
        cos, sin = (x.mul(factor).to(q.dtype) for x in (angle.cos(), angle.sin()))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = config.n_head // config.kv_heads
    k, v = (part.repeat_interleave(group, dim=-3) if group > 1 else part for part in (k, v))
    window = config.window_of(block)
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gap = torch.arange(t, device=device)[:, None] - torch.arange(t, device=device)
    attended = (gap >= 0) & (gap < window)
    return (q @ k.mT / math.sqrt(d)).masked_fill(~attended, -torch.inf).softmax(-1) @ v


def feed_forward(p: Params, i: int, x: Tensor, config: ModelConfig, lora: LoraConfig | None = None) -> Tensor:
    name, added = f"blocks.{i}.ffn", low_rank(p, i, "ffn.in", x, config, lora)
    gated = config.activation == "swiglu"
    h = linear(p, f"{name}.{'up_gate' if gated else 'up'}", x)
    h, *gates = h.chunk(2, dim=-1) if gated else (h,)
    h = h + added["up"] if "up" in added else h
    if gated:
        (g,) = gates
        a = F.silu(g + added["gate"] if "gate" in added else g) * h
    elif config.activation == "gelu":
        a = F.gelu(h, approximate="tanh")
    elif config.activation == "tanh":
        a = torch.tanh(h)
    else:
        a = torch.relu(h) if config.activation == "relu" else torch.relu(h).square()
    y, added = linear(p, f"{name}.down", a), low_rank(p, i, "ffn.down", a, config, lora)
    return y + added["down"] if added else y


def residual(
    p: Params, tokens: Tensor, config: ModelConfig, attend: Attend, start: int = 0, lora: LoraConfig | None = None
) -> Tensor:
    """The residual stream after the last block. The positions of the tokens begin at `start`."""
    x = config.embedding_scale * p["wte.weight"][tokens]
    if config.position == "learned":
        x = x + p["wpe.weight"][start : start + tokens.shape[-1]]
    x0 = x
    for i in range(config.n_layer):
        if config.residual_scalars:
            x = p[f"blocks.{i}.scalars.x"] * x + p[f"blocks.{i}.scalars.x0"] * x0
        x = x + attention(p, i, norm(p, f"blocks.{i}.ln1", x, config), tokens, config, attend, lora)
        x = x + feed_forward(p, i, norm(p, f"blocks.{i}.ln2", x, config), config, lora)
    return x


def hidden_states(p: Params, tokens: Tensor, config: ModelConfig, lora: LoraConfig | None = None) -> Tensor:
    """The hidden states (…, T, C) that the head reads."""
    return norm(p, "ln_f", residual(p, tokens, config, partial(causal, config), lora=lora), config)


def head(p: Params, config: ModelConfig) -> Tensor:
    """The weight (V, C) of the head."""
    return p["wte.weight" if config.tie_embeddings else "lm_head.weight"]


def logits_of(p: Params, n: Tensor, config: ModelConfig) -> Tensor:
    """The logits of hidden states.       n (C,) or (T, C)   logits (V,) or (T, V)"""
    weight = head(p, config)
    if config.loss == "embedding_mse":  # the token with the nearest embedding is the likeliest
        rows = [-(row - weight).square().mean(-1) for row in n.view(-1, config.n_embd)]
        return torch.stack(rows).view(*n.shape[:-1], -1)
    return capped((weight @ n.transpose(0, -1)).transpose(0, -1), config)


def capped(logits: Tensor, config: ModelConfig) -> Tensor:
    """c tanh(l / c) of logits l, or l if the config has no softcap c."""
    c = config.softcap
    return c * torch.tanh(logits / c) if c else logits


def loss(p: Params, tokens: Tensor, targets: Tensor, config: ModelConfig, lora: LoraConfig | None = None) -> Tensor:
    """The mean loss over the targets; −1 marks a position without a target."""
    n = hidden_states(p, tokens, config, lora)
    has_target = targets >= 0
    if config.loss == "embedding_mse":
        error = n[has_target] - head(p, config)[targets[has_target]]
        return error.square().mean(-1).mean()
    logits = capped(F.linear(n, head(p, config)), config)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def gradients(
    p: Params, tokens: Tensor, targets: Tensor, config: ModelConfig, lora: LoraConfig | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in p.items()}
    value = loss(leaves, tokens, targets, config, lora)
    return value.detach(), dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
