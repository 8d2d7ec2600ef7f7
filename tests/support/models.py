"""Small models, batches for them, and comparisons of their tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilegrad import ModelConfig
from tilegrad.engine.batch import Batch
from tilegrad.engine.optimizer import Optimizer
from tilegrad.kernels.rope.frequencies import RopeScaling
from tilegrad.model import reference
from tilegrad.model.lora import LoraConfig
from tilegrad.model.transformer import Transformer
from tilegrad.training.config import DataConfig, RunConfig, TrainConfig

CONFIG = ModelConfig(vocab_size=31, block_size=16, n_layer=3, n_head=4, n_embd=16)
LLAMA = replace(
    CONFIG, n_kv_head=2, activation="swiglu", norm="rmsnorm", position="rope", bias=False, tie_embeddings=False
)
QWEN3 = replace(
    LLAMA, n_layer=2, head_size=6, qk_norm=True, qkv_bias=True, window=5, window_layers=(1,),
    rope_scaling=RopeScaling("llama3", 8.0, original=8),
)  # fmt: skip

SPEED_RUN = replace(
    CONFIG,
    n_layer=2,
    activation="relu2",
    logit_softcap=2.0,
    residual_scalars=True,
    value_embeddings=1,
    embedding_scale=3.0,
)


def kinds(n_embd: int) -> tuple[ModelConfig, ...]:
    """Configs of one-layer models that together have every kind of layer."""
    gpt = replace(CONFIG, n_layer=1, n_embd=n_embd)
    return (
        gpt,
        replace(LLAMA, n_layer=1, n_embd=n_embd),
        replace(gpt, dropout=0.2, projection="per_head", activation="relu"),
        replace(gpt, loss="embedding_mse", activation="tanh"),
        replace(SPEED_RUN, n_embd=n_embd),
    )


def small_run(**train: Any) -> RunConfig:
    """A run on text.txt that takes a second."""
    model = ModelConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16)
    config = TrainConfig(batch_size=2, seq_len=12, eval_batches=1, log_interval=1, **train)
    return RunConfig(model, config, DataConfig(files=("text.txt",)))


def batch(config: ModelConfig, b: int, t: int, seed: int = 0, ignored: float = 0.2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, config.vocab_size, (b, t), generator=g) for _ in range(2))
    targets[torch.rand(b, t, generator=g) < ignored] = -1
    targets[0, 0] = 1
    return tokens, targets


def set_batch(model: Transformer, tokens: Tensor, targets: Tensor) -> None:
    """The buffers of a step that an engine would fill."""
    model.tokens.copy_(tokens)
    model.head.targets.copy_(targets.view(-1))
    model.head.inv_total.fill_(0.1)
    for seed in model.seeds:
        seed.fill_(7)


def random_ends(b: int, t: int, documents: int, seed: int = 0) -> Tensor:
    """cu_seqlens of packed rows. Each row has 1 to `documents` documents of random lengths."""
    g, ends = torch.Generator().manual_seed(seed), [0]
    for row in range(b):
        most = min(documents, t)
        count = int(torch.randint(1, most + 1, (), generator=g))
        inner = torch.randperm(t - 1, generator=g)[: count - 1].sort().values + 1
        ends += [row * t + int(i) for i in inner] + [(row + 1) * t]
    return torch.tensor(ends, dtype=torch.int32)


def one_by_one(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Each document with a target as a batch of one; if there are no documents, each row."""
    if cu_seqlens is None:
        return [(tokens, targets)]
    spans = list(pairwise(cu_seqlens.tolist()))
    parts = [(tokens.flatten()[a:z][None], targets.flatten()[a:z][None]) for a, z in spans]
    return [(x, y) for x, y in parts if (y >= 0).any()]


def arguments(batches: list[Batch]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """tokens, targets and cu_seqlens of micro-batches, as the engine takes them."""
    return [x for x, *_ in batches], [y for _, y, _ in batches], [ends for *_, ends in batches]


def exact_gradients(
    config: ModelConfig, params: dict[str, Tensor], parts: list[tuple[Tensor, Tensor]], lora: LoraConfig | None = None
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) by autograd in float64: the mean over the targets of all parts."""
    leaves = {name: p.double().requires_grad_() for name, p in params.items()}
    counts = [int((y >= 0).sum()) for _, y in parts]
    sums = [reference.loss(leaves, x, y, config, lora) * n for (x, y), n in zip(parts, counts, strict=True)]
    loss = torch.stack(sums).sum() / sum(counts)
    return loss.item(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_equal_gradients(got: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> None:
    """max|a − n| / max(max|a|, max|n|, 1e-5 · the model's largest gradient) for each tensor. A gradient that vanishes, such as
    that of qk norms with one key, is a sum of terms that do not vanish: it is within 4.5 roundings of the largest."""
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


def run_as_traced(model: Transformer, optimizer: Optimizer) -> None:
    """Runs what `plan_model` traces: a step with its update, then a forward and backward, with an update if gradients share
    memory with activations."""
    model.step()
    optimizer.update(1e-2)
    model.forward()
    model.backward()
    if not model.head.w.adds:
        optimizer.update(1e-2)
