"""The gradient of every parameter against autograd for random configs; names, shapes and initial values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import assert_equal_gradients, batch
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.kernels.rope.frequencies import RopeScaling
from tilegrad.model import reference
from tilegrad.model.config import PRESETS


def check(config: ModelConfig, b: int, t: int, seed: int) -> None:
    tokens, targets = batch(config, b, t, seed)
    engine = Engine(config, b, t, dtype=torch.float64, seed=seed)
    for p in engine.params.values():  # moved from the initial values, at which many gradients are nearly 0
        p.add_(
            torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(seed + p.numel())), alpha=0.2
        )
    value = engine.gradients(tokens, targets)
    expected, exact = reference.gradients(engine.params, tokens, targets, config)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    assert_equal_gradients(engine.grads, exact, 1e-10)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    projection, loss = pick("dense", "dense", "per_head"), pick("cross_entropy", "cross_entropy", "embedding_mse")
    n_kv_head = pick(1, 2, 4, None) if projection == "dense" else None
    position, n_layer, biases = pick("learned", "rope"), pick(1, 2, 3), st.sampled_from((None, True, False))
    scaling = pick(
        None,
        None,
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0, original=4),
        RopeScaling("yarn", 4.0, original=6),
    )
    return ModelConfig(
        vocab_size=pick(7, 33), block_size=16, n_layer=n_layer, n_head=4, n_embd=pick(8, 24), n_kv_head=n_kv_head,
        ffn_dim=pick(None, 10), activation=pick("gelu", "tanh", "relu", "relu2", "swiglu"), norm=pick("layernorm", "rmsnorm"),
        position=position, bias=draw(st.booleans()),
        tie_embeddings=True if loss == "embedding_mse" else draw(st.booleans()), projection=projection, loss=loss,
        window=pick(None, None, 1, 3), norm_eps=pick(1e-5, 1e-2), rope_theta=pick(10000.0, 50.0),
        head_size=pick(None, 6) if projection == "dense" else None, qk_norm=draw(st.booleans()),
        qkv_bias=draw(biases), proj_bias=draw(biases), ffn_bias=draw(biases),
        window_layers=pick(None, (), (0,), (n_layer - 1,)), rope_scaling=scaling if position == "rope" else None,
        logit_softcap=pick(None, None, 0.5, 3) if loss == "cross_entropy" else None, residual_scalars=draw(st.booleans()),
        value_embeddings=draw(st.integers(0, (n_layer + 1) // 2)), embedding_scale=pick(1.0, 5),
    )  # fmt: skip


SPEED = ModelConfig(  # config of speed runs
    vocab_size=33, block_size=16, n_layer=3, n_head=4, n_embd=8, activation="relu2", logit_softcap=1.5,
    residual_scalars=True, value_embeddings=2, embedding_scale=4.0,
)  # fmt: skip


@settings(max_examples=40)
@example(config=SPEED, b=2, t=7, seed=0)
@given(config=configs(), b=st.integers(1, 3), t=st.sampled_from((1, 2, 7, 13)), seed=st.integers(0, 5))
def test_gradients_of_random_models_equal_autograd(config: ModelConfig, b: int, t: int, seed: int) -> None:
    check(config, b, t, seed)


@pytest.mark.parametrize("preset", ["gpt2", "llama-135m"])
def test_gradients_of_gpt2_and_llama_equal_autograd(preset: str) -> None:
    small = replace(
        PRESETS[preset], vocab_size=50, block_size=8, n_layer=2, n_embd=PRESETS[preset].n_head * 4, ffn_dim=20
    )
    check(small, 2, 8, 0)


def test_canary_a_wrong_backward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels import activation
    from tilegrad.model import feedforward

    right = activation.activation_bwd

    def wrong(da: Any, h: Any, kind: str, *, dh: Any, **others: Any) -> None:
        right(da, h, kind, dh=dh, **others)
        if isinstance(dh, Tensor):
            dh[0, 0] *= 1.00001

    monkeypatch.setattr(feedforward, "activation_bwd", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        check(ModelConfig(vocab_size=7, block_size=8, n_layer=1, n_head=2, n_embd=8), 2, 5, 0)


def test_parameters_have_their_names_and_shapes() -> None:
    config = ModelConfig(vocab_size=11, block_size=6, n_layer=1, n_head=4, n_embd=8, n_kv_head=2, tie_embeddings=False)
    shapes = {name: tuple(p.shape) for name, p in Engine(config, 1, 4).params.items()}
    assert shapes == {
        "wte.weight": (11, 8), "wpe.weight": (6, 8),
        "blocks.0.ln1.weight": (8,), "blocks.0.ln1.bias": (8,),
        "blocks.0.attn.qkv.weight": (16, 8), "blocks.0.attn.qkv.bias": (16,),
        "blocks.0.attn.proj.weight": (8, 8), "blocks.0.attn.proj.bias": (8,),
        "blocks.0.ln2.weight": (8,), "blocks.0.ln2.bias": (8,),
        "blocks.0.ffn.up.weight": (32, 8), "blocks.0.ffn.up.bias": (32,),
        "blocks.0.ffn.down.weight": (8, 32), "blocks.0.ffn.down.bias": (8,),
        "ln_f.weight": (8,), "ln_f.bias": (8,), "lm_head.weight": (11, 8),
    }  # fmt: skip
    per_head = replace(config, n_kv_head=None, projection="per_head", activation="swiglu", bias=True)
    names = {name: tuple(p.shape) for name, p in Engine(per_head, 1, 4).params.items()}
    assert names["blocks.0.attn.q.weight"] == (4, 2, 2) and names["blocks.0.attn.v.bias"] == (4, 2)
    assert names["blocks.0.ffn.up_gate.weight"] == (64, 8) and "blocks.0.attn.qkv.weight" not in names


def test_initial_values_have_their_distributions() -> None:
    config = ModelConfig(vocab_size=400, block_size=64, n_layer=8, n_head=4, n_embd=64)
    params = Engine(config, 1, 4, seed=3).params
    assert params["wte.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert params["blocks.0.ffn.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    for name in ("attn.proj", "ffn.down"):
        assert params[f"blocks.5.{name}.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert (params["blocks.0.ln1.weight"] == 1).all() and (params["blocks.0.attn.qkv.bias"] == 0).all()
    again, other = Engine(config, 1, 4, seed=3).params, Engine(config, 1, 4, seed=4).params
    assert torch.equal(params["wte.weight"], again["wte.weight"])
    assert not torch.equal(params["wte.weight"], other["wte.weight"])


def test_a_new_model_computes_what_it_computes_without_value_embeddings() -> None:
    config = ModelConfig(vocab_size=31, block_size=16, n_layer=5, n_head=4, n_embd=16, n_kv_head=2)
    with_values = replace(config, value_embeddings=2)
    tokens, targets = batch(config, 2, 9, ignored=0.0)
    before, engine = Engine(config, 2, 9, seed=3), Engine(with_values, 2, 9, seed=3)
    own = {name: tuple(p.shape) for name, p in engine.params.items() if name not in before.params}
    assert own == {
        "blocks.2.attn.value_embedding.weight": (31, 8), "blocks.2.attn.value_embedding.scalar": (1,),
        "blocks.4.attn.value_embedding.weight": (31, 8), "blocks.4.attn.value_embedding.scalar": (1,),
    }  # fmt: skip
    assert engine.gradients(tokens, targets) == before.gradients(tokens, targets)
    assert all(torch.equal(engine.grads[name], g) for name, g in before.grads.items())
    for block in (2, 4):
        grads = {part: engine.grads[f"blocks.{block}.attn.value_embedding.{part}"] for part in ("weight", "scalar")}
        seen = torch.zeros(31, dtype=torch.bool).index_fill_(0, tokens.flatten(), value=True)
        assert torch.equal(grads["weight"].abs().sum(1) > 0, seen) and (grads["scalar"] == 0).all()


def test_presets_have_their_numbers_of_parameters() -> None:
    def count(name: str) -> int:
        from tilegrad.model.transformer import parameters

        return sum(p.master.nbytes // 4 for p in parameters(PRESETS[name]).values())

    assert count("gpt2") == 124_439_808
    assert count("gpt2-medium") == 354_823_168
    assert count("gpt2-xl") == 1_557_611_200
    assert count("llama-135m") == 134_515_008


BAD = [
    ({"vocab_size": 0}, "vocab_size: got 0; accepted: an int ≥ 1"),
    ({"n_layer": 1.5}, "n_layer: got 1.5"),
    ({"n_head": 3}, r"n_head: got 3; accepted: a divisor of n_embd \(8\)"),
    ({"n_embd": 2048, "n_head": 2}, "n_head: got 2; .* ≤ 512"),
    ({"n_kv_head": 3}, r"n_kv_head: got 3; accepted: a divisor of n_head \(4\)"),
    ({"n_kv_head": 2, "projection": "per_head"}, "n_kv_head: got 2; .*per_head"),
    ({"activation": "gelu2"}, "activation: got 'gelu2'; accepted: 'gelu' or 'tanh' or 'relu' or 'relu2' or 'swiglu'"),
    ({"norm": None}, "norm: got None"),
    ({"bias": 1}, "bias: got 1; accepted: True or False"),
    ({"loss": "embedding_mse", "tie_embeddings": False}, "tie_embeddings: got False; accepted: True with loss"),
    ({"residual_scalars": 1}, "residual_scalars: got 1; accepted: True or False"),
    ({"embedding_scale": 0.0}, "embedding_scale: got 0.0; accepted: a number, 0.001 ≤ embedding_scale < 1e[+]06"),
    ({"embedding_scale": True}, "embedding_scale: got True; accepted: a number"),
    ({"value_embeddings": -1}, "value_embeddings: got -1; accepted: an int, 0 ≤ value_embeddings ≤ 1"),
    ({"value_embeddings": True}, "value_embeddings: got True; accepted: an int, 0 ≤ "),
    (
        {"value_embeddings": 2, "n_layer": 2},
        "value_embeddings: got 2; accepted: an int, 0 ≤ value_embeddings ≤ 1, every",
    ),
    ({"logit_softcap": 0}, "logit_softcap: got 0; accepted: None, or a number, 0.001 ≤"),
    ({"logit_softcap": True}, "logit_softcap: got True; accepted: None, or a number"),
    ({"logit_softcap": 10**400}, "logit_softcap: got 1000"),
    (
        {"logit_softcap": 5.0, "loss": "embedding_mse"},
        "logit_softcap: got 5.0; accepted: None with loss='embedding_mse'",
    ),
    ({"window": 0}, "window: got 0; accepted: None or an int ≥ 1"),
    ({"dropout": 1.0}, "dropout: got 1.0"),
    ({"position": "rope", "n_embd": 12}, "position: got 'rope'; .*odd"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_the_error_for_a_bad_value_names_it_and_the_accepted_ones(change: dict[str, Any], message: str) -> None:
    good = {"vocab_size": 5, "block_size": 8, "n_layer": 1, "n_head": 4, "n_embd": 8}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(good | change))


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(ValueError, match="n_heads: got a key that ModelConfig does not have"):
        ModelConfig.from_dict({"vocab_size": 5, "n_heads": 2})
