"""The same transformer in plain PyTorch ops, differentiated by autograd: what the explicit backward is held against, in
tests, in `tilegrad gradcheck --against autograd`, and as the peer of `tilegrad bench training`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .model.config import ModelConfig

Params = Mapping[str, Tensor]


def norm(p: Params, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    w, b = p[f"{name}.weight"], p.get(f"{name}.bias")
    if config.norm == "layernorm":
        return F.layer_norm(x, (x.shape[-1],), w, b, config.norm_eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * w


def linear(p: Params, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def per_head(p: Params, name: str, x: Tensor) -> Tensor:
    w, b = p[f"{name}.weight"], p.get(f"{name}.bias")
    h, d, _ = w.shape
    y = torch.einsum("bthi,hoi->btho", x.unflatten(-1, (h, d)), w)
    return (y if b is None else y + b).flatten(-2)


def rotate(x: Tensor, theta: float) -> Tensor:
    """x (B, H, T, D), as complex numbers: halves of D are real and imaginary parts."""
    t, d = x.shape[2:]
    angle = torch.outer(torch.arange(t).double(), theta ** (-torch.arange(0, d, 2).double() / d)).to(x.dtype)
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def attention(p: Params, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    b, t, c = x.shape
    hq, hkv, d = config.n_head, config.kv_heads, config.head_dim
    if config.projection == "dense":
        q, k, v = linear(p, f"{name}.qkv", x).split([hq * d, hkv * d, hkv * d], dim=-1)
    else:
        q, k, v = (per_head(p, f"{name}.{part}", x) for part in "qkv")
    q, k, v = (part.unflatten(-1, (h, d)).transpose(1, 2) for part, h in ((q, hq), (k, hkv), (v, hkv)))
    if config.position == "rope":
        q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    k, v = (part.repeat_interleave(hq // hkv, dim=1) if hq != hkv else part for part in (k, v))
    if config.window is None:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        gap = torch.arange(t)[:, None] - torch.arange(t)
        seen = (gap >= 0) & (gap < config.window)
        o = (q @ k.mT / math.sqrt(d)).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return linear(p, f"{name}.proj", o.transpose(1, 2).reshape(b, t, c))


def _gelu(h: Tensor) -> Tensor:
    return F.gelu(h, approximate="tanh")


def feed_forward(p: Params, name: str, x: Tensor, config: ModelConfig) -> Tensor:
    h = linear(p, f"{name}.up", x)
    if config.activation == "swiglu":
        a = F.silu(linear(p, f"{name}.gate", x)) * h
    else:
        a = _gelu(h) if config.activation == "gelu" else torch.tanh(h) if config.activation == "tanh" else torch.relu(h)
    return linear(p, f"{name}.down", a)


def stream(p: Params, tokens: Tensor, config: ModelConfig) -> Tensor:
    x = p["wte.weight"][tokens]
    if config.position == "learned":
        x = x + p["wpe.weight"][: tokens.shape[1]]
    for i in range(config.n_layer):
        x = x + attention(p, f"blocks.{i}.attn", norm(p, f"blocks.{i}.ln1", x, config), config)
        x = x + feed_forward(p, f"blocks.{i}.ffn", norm(p, f"blocks.{i}.ln2", x, config), config)
    return norm(p, "ln_f", x, config)


def loss(p: Params, tokens: Tensor, targets: Tensor, config: ModelConfig) -> Tensor:
    """The mean over targets; −1 has none."""
    x = stream(p, tokens, config)
    has_target = targets >= 0
    if config.loss == "embedding_mse":
        error = x[has_target] - p["wte.weight"][targets[has_target]]
        return error.square().mean(-1).mean()
    head = p["wte.weight"] if config.tie_embeddings else p["lm_head.weight"]
    return F.cross_entropy(F.linear(x, head).flatten(0, 1), targets.flatten(), ignore_index=-1)


def gradients(p: Params, tokens: Tensor, targets: Tensor, config: ModelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in p.items()}
    value = loss(leaves, tokens, targets, config)
    return value.detach(), dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
