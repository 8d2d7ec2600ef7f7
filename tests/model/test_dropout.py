"""Dropout inside the model: gradients against an independent model that draws the same masks, and central differences.

The masks here follow the written definition (kernels/philox.py, kernels/dropout, Transformer.draw_seeds) word by word in
Python's integers. They use no code of the engine.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, assert_equal_gradients, batch, clones, exact_gradients, one_by_one
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine import gradcheck
from tilegrad.model import attention as attention_module
from tilegrad.model import reference, transformer
from tilegrad.model.attention import mask_of
from tilegrad.model.block import Dropout

P = 0.3
CONFIGS = {
    "gpt2": replace(CONFIG, dropout=P, n_layer=2),
    "llama": replace(LLAMA, dropout=P, n_layer=2, window=4),
    "per_head": replace(CONFIG, dropout=P, n_layer=2, projection="per_head", loss="embedding_mse"),
}


def first_word(seed: int, counter: tuple[int, int, int, int]) -> int:
    """Philox4×32-10."""
    k0, k1 = seed % 2**32, (seed >> 32) % 2**32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high % 2**32, low >> 32 ^ c3 ^ k1, low % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0


@functools.cache
def kept(seed: int, sequence: int | None, heads: tuple[int, ...], rows: int, columns: int) -> Tensor:
    """keep / (1 − p), (H, rows, columns). Without a sequence it is the mask of an op other than attention."""
    words = [
        first_word(seed, (j, i, h, 2**32 - 1 if sequence is None else sequence))
        for h in heads
        for i in range(rows)
        for j in range(columns)
    ]
    keep = torch.tensor(words).view(len(heads), rows, columns) >= math.floor(P * 2**32)
    return keep.double() / (1 - P)


def seed_of(seed: int, draw: int, block: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{draw}:{block}".encode()).digest()[:8], "little")


def loss_with_dropout(
    p: reference.Params, tokens: Tensor, targets: Tensor, config: ModelConfig, seed: int, draw: int, ends: list[int]
) -> Tensor:
    """`ends` has a 0, then the ends of the sequences (rows or documents). The mask of a sequence depends on its index."""
    b, t = tokens.shape

    def drop(x: Tensor, block: int, counter: int) -> Tensor:
        return x * kept(seed_of(seed, draw, block), None, (counter,), b * t, config.n_embd).view_as(x)

    def attend_one(block: int, n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        if config.position == "rope":
            frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
            angle = torch.outer(torch.arange(length).double(), frequency)
            q, k = (reference.rotate(x, angle.cos(), angle.sin()) for x in (q, k))
        k, v = (x.repeat_interleave(config.n_head // config.kv_heads, dim=0) for x in (k, v))
        gap = torch.arange(length)[:, None] - torch.arange(length)
        seen = (gap >= 0) & (gap < (config.window or length))
        weights = (q @ k.mT / math.sqrt(config.head_dim)).masked_fill(~seen, -torch.inf).softmax(-1)
        o: Tensor = weights * kept(seed_of(seed, draw, block), n, tuple(range(config.n_head)), length, length) @ v
        return o

    def attend(block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(0, 1).flatten(1, 2) for x in (q, k, v)]  # (H, N, D)
        parts = [attend_one(block, n, *(x[:, a:z] for x in rows)) for n, (a, z) in enumerate(pairwise(ends))]
        o: Tensor = torch.cat(parts, 1).unflatten(1, (b, t)).transpose(0, 1)
        return o

    x = p["wte.weight"][tokens]
    if config.position == "learned":
        x = x + p["wpe.weight"][torch.cat([torch.arange(z - a) for a, z in pairwise(ends)]).view(b, t)]
    x = drop(x, 0, 0)
    for i in range(config.n_layer):
        name = f"blocks.{i}"
        branch = reference.attention(p, i, reference.norm(p, f"{name}.ln1", x, config), tokens, config, attend)
        x = x + drop(branch, i, 2 * i + 1)
        branch = reference.feed_forward(p, i, reference.norm(p, f"{name}.ln2", x, config), config)
        x = x + drop(branch, i, 2 * i + 2)
    n, has_target = reference.norm(p, "ln_f", x, config), targets >= 0
    if config.loss == "embedding_mse":
        return (n[has_target] - reference.head(p, config)[targets[has_target]]).square().mean()
    logits = n @ reference.head(p, config).t()
    return torch.nn.functional.cross_entropy(logits[has_target], targets[has_target])


def away_from_the_initial_values(config: ModelConfig, documents: int = 0) -> Engine:
    engine = Engine(config, 2, 9, dtype=torch.float64, seed=5, documents=documents)
    generator = torch.Generator().manual_seed(0)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=0.2)
    return engine


def check(config: ModelConfig, packed: tuple[int, ...] = ()) -> None:
    """Checks four draws, in one call and in two, then `evaluate`, which drops nothing. `packed` has the ends of documents."""
    engine, (tokens, targets) = away_from_the_initial_values(config, len(packed)), batch(config, 2, 9)
    ends = packed or (0, 9, 18)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32) if packed else None
    for draw in range(4):
        if draw % 2:
            loss = engine.gradients(tokens, targets, cu_seqlens=cu_seqlens)
        else:
            engine.zero_gradients()
            loss = engine.forward(tokens, targets, cu_seqlens=cu_seqlens)
            engine.backward()
        leaves = {name: x.clone().requires_grad_() for name, x in engine.params.items()}
        expected = loss_with_dropout(leaves, tokens, targets, config, engine.seed, draw, list(ends))
        exact = dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True))
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        assert_equal_gradients(engine.grads, exact, 1e-10)
    want, _ = exact_gradients(config, engine.params, one_by_one(tokens, targets, cu_seqlens))
    assert engine.evaluate(tokens, targets, cu_seqlens=cu_seqlens) == pytest.approx(want, rel=1e-12)
    assert engine.draws == 4


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_those_of_a_model_that_draws_the_same_masks(name: str) -> None:
    check(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_packed_rows_equal_those_of_a_model_that_draws_the_same_masks(name: str) -> None:
    check(CONFIGS[name], packed=(0, 1, 6, 9, 16, 18))


def test_no_two_masks_of_a_step_are_equal_and_all_keep_their_share() -> None:
    config = CONFIGS["gpt2"]
    seeds = [seed_of(5, draw, block) for draw in range(2) for block in range(config.n_layer)]
    counters = range(2 * config.n_layer + 1)
    masks = [kept(seed, None, (counter,), 18, config.n_embd).flatten() for seed in seeds for counter in counters]
    stacked = (torch.stack(masks) > 0).double()
    assert stacked.mean().item() == pytest.approx(1 - P, abs=0.01)
    correlated = torch.corrcoef(stacked).fill_diagonal_(0.0).abs()
    assert correlated.max() <= 6 / math.sqrt(stacked.shape[1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_equal_central_differences(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(gradcheck, "SAMPLES", 4)  # so that some are not in a key's bias, whose gradient is 0
    config = replace(CONFIGS[name], n_layer=1)
    engine, (tokens, targets) = away_from_the_initial_values(config), batch(config, 2, 9)

    def loss() -> float:
        engine.draws = 3
        return engine.forward(tokens, targets)

    engine.draws = 3
    engine.gradients(tokens, targets)
    results = gradcheck.check_gradients(loss, engine.params, clones(engine.grads))
    assert all(result.passed for result in results), gradcheck.gradient_table(results)


def no_forward(_self: Dropout, _x: Tensor) -> None:
    return None


def no_backward(_self: Dropout, dy: Tensor) -> Tensor:
    return dy


def one_seed_for_all(right: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, seed, draw: right(self, seed, draw)[:1] * len(self.seeds)


def never_a_new_draw(right: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, seed, _draw: right(self, seed, 0)


def always_the_next_draw(right: Callable[..., list[int]]) -> Callable[..., list[int]]:
    return lambda self, seed, draw: right(self, seed, draw + 1)


def with_dropout(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *given, **more: right(self, *given, **(more | {"training": True}))


def one_counter(declare: Callable[..., Dropout]) -> Callable[..., Dropout]:
    return lambda _cls, at, seed, counter, dx: declare(at, seed, min(counter, 1), dx)


def broken(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "the forward drops nothing":
        monkeypatch.setattr(Dropout, "forward", no_forward)
    elif what == "the backward drops nothing":
        monkeypatch.setattr(Dropout, "backward", no_backward)
    elif what == "all blocks share a seed":
        monkeypatch.setattr(transformer.Transformer, "draw_seeds", one_seed_for_all(transformer.Transformer.draw_seeds))
    elif what == "every step has the same masks":
        monkeypatch.setattr(transformer.Transformer, "draw_seeds", never_a_new_draw(transformer.Transformer.draw_seeds))
    elif what == "another draw's masks":
        wrong = always_the_next_draw(transformer.Transformer.draw_seeds)
        monkeypatch.setattr(transformer.Transformer, "draw_seeds", wrong)
    elif what == "the layers of a block share a mask":
        monkeypatch.setattr(Dropout, "declare", classmethod(one_counter(Dropout.declare)))
    elif what == "attention drops nothing":
        monkeypatch.setattr(attention_module, "mask_of", lambda config, *at: mask_of(replace(config, dropout=0.0), *at))
    else:
        monkeypatch.setattr(Engine, "_model", with_dropout(Engine._model))


BROKEN = (
    "the forward drops nothing", "the backward drops nothing", "all blocks share a seed", "every step has the same masks",
    "another draw's masks", "the layers of a block share a mask", "attention drops nothing", "evaluate drops",
)  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_canary_broken_dropout_is_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken(monkeypatch, what)
    with pytest.raises(AssertionError):
        check(CONFIGS["gpt2"])
