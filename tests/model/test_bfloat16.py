"""The engine in bfloat16 against a float64 model whose roundings are drawn at random.

Each number that the engine rounds to bfloat16, forward and backward, is exact here times 1 + u·r, with r uniform in −1 … 1
(tilegrad/kernels/closeness.py). The gradients of many draws show how far rounding may move each tensor g from the exact one.
With e = g − g64, over draws d and with σ² the variance of e:

    max     |e| ≤ 6 σ                          for each number; σ includes its own last rounding and those of the accumulator
    mean    rms(e) ≤ mean rms(e_d) + 6 sd rms(e_d)
    slope   |⟨e, g64⟩| ≤ |mean ⟨e_d, g64⟩| + 6 sd ⟨e_d, g64⟩

The weights are numbers of bfloat16, so it does not matter which of them an op rounds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, batch, clones, random_ends
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.kernels import linear as linear_op
from tilegrad.model import reference

U = torch.finfo(torch.bfloat16).eps / 2
DRAWS = 40
CONFIGS = {
    "gpt2": replace(CONFIG, n_layer=2, n_embd=32, vocab_size=63, block_size=32),
    "llama": replace(LLAMA, n_layer=2, n_embd=32, vocab_size=63, block_size=32),
}


class Roundings:
    """One draw of roundings, or none if `exact`. short: products of weights are rounded to bfloat16 too."""

    def __init__(self, seed: int, *, exact: bool, short: bool) -> None:
        self.generator, self.exact, self.short = torch.Generator().manual_seed(seed), exact, short

    def of(self, x: Tensor) -> Tensor:
        if self.exact:
            return x
        return x * (1 + U * (2 * torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 1))


class Rounded(torch.autograd.Function):
    """A buffer of bfloat16, and the buffer of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Roundings) -> Tensor:
        ctx.r = r
        return r.of(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, None]:
        return ctx.r.of(dy[0]), None


class Linear(torch.autograd.Function):
    """y = x wᵀ. The gradient of x is rounded; if `short`, y and the gradient of w are too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, r: Roundings) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.r = r
        return r.of(x @ w.t()) if r.short else x @ w.t()

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), r = ctx.saved_tensors, ctx.r
        dw = dy[0].flatten(0, -2).t() @ x.flatten(0, -2)
        return r.of(dy[0] @ w), r.of(dw) if r.short else dw, None


class Attention(torch.autograd.Function):
    """p and ds are rounded before their products, o before delta is computed from it. dq, dk, dv are buffers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, r: Roundings) -> Tensor:
        t, d = q.shape[-2:]
        place = torch.arange(t)
        first = (place - positions)[:, None]  # first row of each row's document
        unseen = (place > place[:, None]) | (place < first[..., None])
        p = (q @ k.mT / math.sqrt(d)).masked_fill(unseen, -torch.inf).softmax(-1)
        rounded = r.of(p)
        o = r.of(rounded @ v)
        ctx.save_for_backward(q, k, v, p, rounded, o)
        ctx.r = r
        return o

    @staticmethod
    def backward(ctx: Any, *do: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (q, k, v, p, rounded, o), r = ctx.saved_tensors, ctx.r
        delta = (do[0] * o).sum(-1, keepdim=True)
        ds = r.of(p * (do[0] @ v.mT - delta)) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, rounded.mT @ do[0], None, None


class Head(torch.autograd.Function):
    """Logits, d = p − onehot (in the buffer of the logits), d w and the x of dw are rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, targets: Tensor, r: Roundings) -> Tensor:
        kept = targets >= 0
        logits = r.of(x @ w.t())
        ctx.save_for_backward(x, w, logits, targets, kept)
        ctx.r = r
        return torch.nn.functional.cross_entropy(logits[kept], targets[kept])

    @staticmethod
    def backward(ctx: Any, *_dloss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, w, logits, targets, kept), r = ctx.saved_tensors, ctx.r
        onehot = torch.nn.functional.one_hot(targets.clamp(min=0), w.shape[0])
        d = r.of((logits.softmax(-1) - onehot) * kept[:, None])
        dw = d.t() @ r.of(x / kept.sum())
        return r.of(d @ w) / kept.sum(), r.of(dw) if r.short else dw, None, None


def loss_of(
    p: reference.Params, tokens: Tensor, targets: Tensor, ends: Tensor | None, config: ModelConfig, r: Roundings
) -> Tensor:
    """The model of model/transformer.py, with one line for each op and its buffers."""
    b, t = tokens.shape
    positions = torch.arange(t).expand(b, t)
    if ends is not None:
        positions = torch.cat([torch.arange(int(n)) for n in ends.diff()]).view(b, t)

    def rounded(x: Tensor) -> Tensor:
        y: Tensor = Rounded.apply(x, r)
        return y

    def linear(name: str, x: Tensor) -> Tensor:
        y, bias = Linear.apply(x, p[f"{name}.weight"], r), p.get(f"{name}.bias")
        return rounded(y if bias is None else y + bias)

    def attention(name: str, x: Tensor) -> Tensor:
        hq, hkv, d = config.n_head, config.kv_heads, config.head_dim
        q, k, v = linear(f"{name}.qkv", x).split([hq * d, hkv * d, hkv * d], dim=-1)
        q, k, v = (part.view(b, t, -1, d).transpose(1, 2) for part in (q, k, v))
        if config.position == "rope":
            frequency = config.rope_theta ** (-torch.arange(0, d, 2).double() / d)
            angle = (positions.double()[..., None] * frequency)[:, None]
            q, k = (rounded(reference.rotate(part, angle.cos(), angle.sin())) for part in (q, k))
        k, v = (part.repeat_interleave(hq // hkv, dim=1) for part in (k, v))
        o: Tensor = Attention.apply(q, k, v, positions, r)
        return linear(f"{name}.proj", o.transpose(1, 2).reshape(b, t, -1))

    def feed_forward(name: str, x: Tensor) -> Tensor:
        if config.activation == "swiglu":
            h, g = linear(f"{name}.up_gate", x).chunk(2, dim=-1)
            return linear(f"{name}.down", rounded(rounded(torch.nn.functional.silu(g)) * h))
        h = linear(f"{name}.up", x)
        return linear(f"{name}.down", rounded(torch.nn.functional.gelu(h, approximate="tanh")))

    x = p["wte.weight"][tokens]
    x = rounded(x + p["wpe.weight"][positions] if config.position == "learned" else x)
    for i in range(config.n_layer):
        name = f"blocks.{i}"
        x = rounded(x + attention(f"{name}.attn", rounded(reference.norm(p, f"{name}.ln1", x, config))))
        x = rounded(x + feed_forward(f"{name}.ffn", rounded(reference.norm(p, f"{name}.ln2", x, config))))
    n = rounded(reference.norm(p, "ln_f", x, config)).view(b * t, -1)
    loss: Tensor = Head.apply(n, reference.head(p, config), targets.view(-1), r)
    return loss


def gradients(
    p: reference.Params, tokens: Tensor, targets: Tensor, ends: Tensor | None, config: ModelConfig, r: Roundings
) -> dict[str, Tensor]:
    leaves = {name: x.double().requires_grad_() for name, x in p.items()}
    loss = loss_of(leaves, tokens, targets, ends, config, r)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def complaints(got: dict[str, Tensor], exact: dict[str, Tensor], draws: list[dict[str, Tensor]]) -> list[str]:
    found = []
    for name, g64 in exact.items():
        e, drawn = got[name].double() - g64, torch.stack([draw[name] for draw in draws]) - g64
        sigma = drawn.square().mean(0).sqrt()
        rms, all_rms = e.square().mean().sqrt(), drawn.flatten(1).square().mean(1).sqrt()
        along, all_along = (e * g64).sum(), (drawn * g64).flatten(1).sum(1)
        ratios = {
            "largest error": float((e.abs() / (6 * sigma + torch.finfo(torch.float32).eps * g64.abs().max())).max()),
            "root mean square error": float(rms / (all_rms.mean() + 6 * all_rms.std())),
            "factor of g64 in the error": float(along.abs() / (all_along.mean().abs() + 6 * all_along.std())),
        }
        found += [f"{name}: {what} {ratio:.2f} × its bound" for what, ratio in ratios.items() if not ratio <= 1]
    return found


def build(config: ModelConfig, documents: int = 0) -> tuple[Engine, Tensor, Tensor]:
    engine = Engine(config, 4, 29, dtype=torch.bfloat16, documents=documents)
    tokens, targets = batch(config, 4, 29)
    generator = torch.Generator().manual_seed(1)
    for p in engine.params.values():
        p.copy_((p + 0.1 * torch.randn(p.shape, generator=generator)).bfloat16())
    return engine, tokens, targets


def drawn(
    engine: Engine, tokens: Tensor, targets: Tensor, ends: Tensor | None = None, *, short: bool
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    given = (engine.params, tokens, targets, ends, engine.config)
    exact = gradients(*given, Roundings(0, exact=True, short=short))
    return exact, [gradients(*given, Roundings(seed, exact=False, short=short)) for seed in range(DRAWS)]


@pytest.mark.parametrize("name", CONFIGS)
def test_without_roundings_this_model_equals_the_reference_model(name: str) -> None:
    engine, tokens, targets = build(CONFIGS[name])
    p = {key: x.double() for key, x in engine.params.items()}
    got = gradients(p, tokens, targets, None, CONFIGS[name], Roundings(0, exact=True, short=False))
    _, want = reference.gradients(p, tokens, targets, CONFIGS[name])
    for key, g in want.items():
        torch.testing.assert_close(got[key], g, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_err_by_their_roundings_and_a_factor_of_1_05_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, short: bool
) -> None:
    monkeypatch.setattr(linear_op, "_has_bf16_products", lambda: short)
    engine, tokens, targets = build(CONFIGS[name])
    engine.gradients(tokens, targets)
    got = clones(engine.grads)
    exact, draws = drawn(engine, tokens, targets, short=short)
    assert complaints(got, exact, draws) == []
    for tensor in got:
        wrong = complaints(got | {tensor: 1.05 * got[tensor]}, exact, draws)
        assert wrong and all(line.startswith(f"{tensor}: ") for line in wrong), tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_packed_rows_err_by_their_roundings(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(linear_op, "_has_bf16_products", lambda: False)
    engine, tokens, targets = build(CONFIGS[name], documents=6)
    ends = random_ends(4, 29, 6)
    engine.gradients(tokens, targets, cu_seqlens=ends)
    exact, draws = drawn(engine, tokens, targets, ends, short=False)
    assert complaints(clones(engine.grads), exact, draws) == []
    whole = gradients(engine.params, tokens, targets, None, engine.config, Roundings(0, exact=True, short=False))
    assert complaints(whole, exact, draws)
