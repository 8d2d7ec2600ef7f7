"""The features of model families besides GPT-2 and Llama: checks of configs, gradients by central differences, generation."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from support.models import LLAMA, QWEN3

from tilegrad import Engine, ModelConfig
from tilegrad.engine.gradcheck import check_model
from tilegrad.kernels.rope.frequencies import RopeScaling, rope_frequencies
from tilegrad.model import reference
from tilegrad.training.generation import draw


@pytest.mark.parametrize(
    "config", [QWEN3, replace(LLAMA, qkv_bias=True), replace(LLAMA, rope_scaling=RopeScaling("yarn", 4.0, original=6))]
)
@pytest.mark.slow
def test_gradients_equal_central_differences(config: ModelConfig) -> None:
    failed = [r.tensor for r in check_model(config) if not r.passed]
    assert not failed


def test_gradients_equal_those_of_autograd() -> None:
    assert not [r.tensor for r in check_model(QWEN3, against="autograd") if not r.passed]


def test_generation_gives_the_tokens_of_the_reference_model() -> None:
    engine = Engine(QWEN3, 1, 8, dtype=torch.float64)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())), alpha=0.3)
    text = [1, 2, 3]
    for _ in range(9):
        n = reference.hidden_states(engine.params, torch.tensor([text]), QWEN3)
        text.append(int((n[0, -1] @ reference.head(engine.params, QWEN3).T).argmax()))
    assert list(draw(QWEN3, engine.params, [1, 2, 3], 9, temperature=0.0)) == text[3:]


def test_parameters_have_the_names_and_shapes_of_the_config() -> None:
    shapes = {name: tuple(p.shape) for name, p in Engine(QWEN3, 1, 4).params.items()}
    assert shapes["blocks.0.attn.q.weight"] == (24, 16) and shapes["blocks.0.attn.k.weight"] == (12, 16)
    assert shapes["blocks.0.attn.q.bias"] == (24,) and "blocks.0.attn.proj.bias" not in shapes
    assert shapes["blocks.0.attn.q_norm.weight"] == (6,) and shapes["blocks.0.attn.proj.weight"] == (16, 24)
    assert "blocks.0.ffn.up.bias" not in shapes


def test_a_config_is_equal_after_a_round_trip_through_plain_data() -> None:
    assert ModelConfig.from_dict(asdict(QWEN3)) == QWEN3
    assert replace(QWEN3, window_layers=[1]).window_layers == (1,)  # type: ignore[arg-type]
    assert [QWEN3.window_of(i) for i in range(2)] == [None, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_size": 600}, r"head_size: got 600; accepted: None or an int ≥ 1, at most 512"),
        ({"head_size": 6, "projection": "per_head", "n_kv_head": None}, "head_size: got 6; accepted: None or n_embd / n_head"),
        ({"window_layers": (3,)}, r"window_layers: got \(3,\); accepted: None, or numbers of blocks, 0 … 2"),
        ({"qkv_bias": 2}, "qkv_bias: got 2; accepted: None, True or False"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2.0}}, "rope_scaling.kind: got 'ntk'; accepted: 'linear' or"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling: got no kind or no factor; accepted: kind, factor"),
        ({"rope_scaling": {"kind": "linear", "factor": 2, "beta": 1}}, "rope_scaling: got the key 'beta'"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "rope_scaling.factor: got 0.5; accepted: a number ≥ 1"),
        ({"rope_scaling": RopeScaling("linear", 2.0), "position": "learned"}, "accepted: None, or a RopeScaling with"),
    ],
)  # fmt: skip
def test_a_bad_config_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **values)


def test_each_kind_of_scaling_scales_its_frequencies() -> None:
    plain, one = rope_frequencies(10000.0, 8, None)
    assert plain == pytest.approx([1.0, 0.1, 0.01, 0.001]) and one == 1.0
    assert rope_frequencies(10000.0, 8, RopeScaling("linear", 4.0)) == ([f / 4.0 for f in plain], 1.0)
    far, _ = rope_frequencies(10000.0, 8, RopeScaling("llama3", 8.0, original=256))
    assert far[0] == plain[0] and far[3] == plain[3] / 8.0 and plain[1] / 8 < far[1] <= plain[1]
    turned, factor = rope_frequencies(10000.0, 8, RopeScaling("yarn", 4.0, original=256))
    assert turned[0] == plain[0] and turned[3] == pytest.approx(plain[3] / 4.0) and factor == pytest.approx(1.1386294)


def test_frequencies_between_the_limits_are_blended() -> None:
    """llama3 has wavelengths 6, 63, 628 and 6283 and limits 250 and 1000; yarn blends from i = 2.3 to i = 5.4."""
    plain, _ = rope_frequencies(10000.0, 8, None)
    scaled, one = rope_frequencies(10000.0, 8, RopeScaling("llama3", 8.0, original=1000))
    m = (1000 / (200 * math.pi) - 1) / 3
    assert scaled == pytest.approx([1.0, 0.1, (1 - m) * 0.01 / 8 + m * 0.01, 0.001 / 8], rel=1e-12) and one == 1.0
    other, _ = rope_frequencies(10000.0, 8, RopeScaling("llama3", 8.0, original=1000, low=0.5, high=2.0))
    m = (1000 / (200 * math.pi) - 0.5) / 1.5
    assert other == pytest.approx([1.0, 0.1, (1 - m) * 0.01 / 8 + m * 0.01, 0.001 / 8], rel=1e-12)
    plain, _ = rope_frequencies(10000.0, 16, None)
    turned, factor = rope_frequencies(10000.0, 16, RopeScaling("yarn", 4.0, original=3000))
    shares = [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    want = [f / 4.0 * share + f * (1.0 - share) for f, share in zip(plain, shares, strict=True)]
    assert turned == pytest.approx(want, rel=1e-12) and factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert rope_frequencies(10000.0, 16, RopeScaling("yarn", 4.0, attention_factor=0.7))[1] == 0.7
    short, _ = rope_frequencies(10000.0, 4, RopeScaling("yarn", 4.0, original=6))
    assert short == pytest.approx([1.0, 0.01 / 4.0]), "none turns once in six tokens"
    tokens = int(2 * math.pi * math.exp(17.8))  # so that the upper limit is i = 15.5, and no i is above 15
    wide, _ = rope_frequencies(10000.0, 16, RopeScaling("yarn", 4.0, original=tokens, beta_fast=math.exp(16)))
    shares = [max(i - 1, 0) / 14 for i in range(8)]
    assert wide == pytest.approx([f / 4.0 * x + f * (1.0 - x) for f, x in zip(plain, shares, strict=True)], rel=1e-12)


def test_numbers_of_a_scaling_are_accepted_at_their_limits_only() -> None:
    RopeScaling("yarn", 1.0, original=1, low=1e-6, high=0.5, beta_slow=1e-6)
    assert RopeScaling("yarn", 2.0) == RopeScaling("yarn", 2.0, 8192, 1.0, 4.0, 32.0, 1.0, None)
    for bad in (
        {"factor": 0.99}, {"original": 0}, {"low": -0.1}, {"high": math.inf}, {"factor": True}, {"factor": "2"},
        {"beta_slow": -1.0}, {"low": 4.0}, {"beta_slow": 32.0}, {"low": 4.0, "high": 3.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="rope_scaling"):
            RopeScaling(**({"kind": "yarn", "factor": 2.0} | bad))  # type: ignore[arg-type]
