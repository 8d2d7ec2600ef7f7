"""Small models, batches for them, and how their tensors are compared."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilegrad import ModelConfig
from tilegrad.kernels.rope.frequencies import RopeScaling

CONFIG = ModelConfig(vocab_size=31, block_size=16, n_layer=3, n_head=4, n_embd=16)
LLAMA = replace(
    CONFIG, n_kv_head=2, activation="swiglu", norm="rmsnorm", position="rope", bias=False, tie_embeddings=False
)
QWEN3 = replace(
    LLAMA, n_layer=2, head_size=6, qk_norm=True, qkv_bias=True, window=5, window_layers=(1,),
    rope_scaling=RopeScaling("llama3", 8.0, original=8),
)  # fmt: skip


def batch(config: ModelConfig, b: int, t: int, seed: int = 0, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, config.vocab_size, (b, t), generator=g) for _ in range(2))
    targets[torch.rand(b, t, generator=g) < ignored] = -1
    targets[0, 0] = 1
    return tokens, targets


def assert_equal_gradients(got: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> None:
    """max|a − n| / max(max|a|, max|n|, 1e-5 · the model's largest gradient) for each tensor. A gradient that vanishes, as that
    of qk norms does where there is one key, is a sum of terms as large as others': within 4.5 roundings of the largest."""
    assert got.keys() == exact.keys()
    largest = max(float(g.abs().max()) for g in exact.values())
    for name, gradient in exact.items():
        assert got[name].shape == gradient.shape
        scale = max(float(gradient.abs().max()), float(got[name].abs().max()), 1e-5 * largest)
        error = float((got[name] - gradient).abs().max()) / scale
        assert error <= limit, f"{name}: relative error {error:.2e}"


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in tensors.items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
