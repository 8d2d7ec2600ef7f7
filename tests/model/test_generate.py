"""Generation with the cache against the whole model on the whole text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tilegrad import Engine, ModelConfig
from tilegrad.memory import AttentionBufferManager, BufferType
from tilegrad.model import reference
from tilegrad.model.generate import Decoder, NonFiniteLogits, _pick, generate, logits_of, sliding

CONFIG = ModelConfig(vocab_size=23, block_size=24, n_layer=2, n_head=4, n_embd=16)
CONFIGS = [
    CONFIG,
    replace(
        CONFIG, n_kv_head=2, activation="swiglu", norm="rmsnorm", position="rope", bias=False, tie_embeddings=False
    ),
    replace(CONFIG, projection="per_head", activation="tanh", window=5),
    replace(CONFIG, loss="embedding_mse", activation="relu"),
]


def params_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    params = Engine(config, 1, min(4, config.block_size), dtype=torch.float64).params
    for p in params.values():
        p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())), alpha=0.3)
    return params


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_are_those_of_the_whole_text(config: ModelConfig) -> None:
    params = params_of(config)
    text = torch.randint(0, 23, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder, read = Decoder(config, params), 0
    for piece in (text[:7], text[7:8], text[8:9], text[9:17], text[17:]):
        logits = decoder.feed(piece)
        read += len(piece)
        n = reference.hidden_states(params, torch.tensor([text[:read]]), config)[0, -1]
        head = params["wte.weight" if config.tie_embeddings else "lm_head.weight"]
        expected = -(n - head).square().mean(-1) if config.loss == "embedding_mse" else head @ n
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_seed_temperature_and_top_k() -> None:
    params = params_of(CONFIG)

    def text(**how: float | int | None) -> list[int]:
        return list(generate(CONFIG, params, [1, 2], 12, **how))  # type: ignore[arg-type]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(temperature=0.0) == text(top_k=1) == text(temperature=0.0, seed=5)
    assert len(text()) == 12 and all(0 <= token < 23 for token in text())


def test_a_low_temperature_takes_the_likeliest_and_a_high_one_does_not() -> None:
    logits, chance = torch.tensor([0.0, 1.0, 0.5]), torch.Generator().manual_seed(0)
    assert {_pick(logits, 0.02, None, chance) for _ in range(50)} == {1}
    assert {_pick(logits, 50.0, None, chance) for _ in range(50)} == {0, 1, 2}
    assert {_pick(logits, 50.0, 2, chance) for _ in range(50)} == {1, 2}


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-20, 1e-8])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float) -> None:
    params = params_of(CONFIG)
    greedy = list(generate(CONFIG, params, [1, 2], 6, temperature=0.0))
    for top_k in (None, 3, 10**30):
        assert list(generate(CONFIG, params, [1, 2], 6, temperature=temperature, top_k=top_k)) == greedy


def test_the_highest_temperature_draws_every_token_alike() -> None:
    chance = torch.Generator().manual_seed(0)
    assert {_pick(torch.tensor([0.0, 9.0, -9.0]), 1e308, None, chance) for _ in range(50)} == {0, 1, 2}


def test_a_sampling_value_out_of_range_is_refused_by_name() -> None:
    params = params_of(CONFIG)
    for name, value in (
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", -1e-300), ("temperature", 10**400),
        ("temperature", "hot"), ("temperature", True), ("top_k", -1), ("top_k", 1.5), ("top_k", "all"),
        ("seed", 1 << 64), ("seed", -(1 << 63) - 1), ("seed", 0.5), ("seed", None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: got {re.escape(repr(value))}; accepted: "):
            generate(CONFIG, params, [1, 2], 1, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-(1 << 63), -1, (1 << 64) - 1])
def test_every_seed_of_torch_is_one(seed: int) -> None:
    assert len(list(generate(CONFIG, params_of(CONFIG), [1, 2], 2, seed=seed))) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_are_refused_by_a_sentence(value: float, temperature: float) -> None:
    params = params_of(CONFIG)
    params["ln_f.weight"].fill_(value)
    with pytest.raises(NonFiniteLogits, match=r"^logits: got values that are not finite; use weights"):
        list(generate(CONFIG, params, [1, 2], 1, temperature=temperature))


def whole_text_says(config: ModelConfig, params: dict[str, torch.Tensor], window: list[int]) -> int:
    """The likeliest token after a window that begins at position 0."""
    n = reference.hidden_states(params, torch.tensor([window]), config)[0]
    return int(logits_of(params, n, config)[-1].argmax())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("block_size", [24, 7])
@pytest.mark.parametrize("length", [2, 24, 40])
def test_past_block_size_the_window_slides_by_half(config: ModelConfig, block_size: int, length: int) -> None:
    config = replace(config, block_size=block_size)
    params = params_of(config)
    prompt = torch.randint(0, 23, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    written = list(generate(config, params, prompt, 50, temperature=0.0))
    text, window = list(prompt), prompt[-block_size:]
    for token in written:
        assert token == whole_text_says(config, params, window)
        text.append(token)
        window = text[-((block_size + 1) // 2) :] if len(window) == block_size else [*window, token]
    assert len(written) == 50


def test_the_smallest_window_slides() -> None:
    config = replace(CONFIG, block_size=1)
    params = params_of(config)
    written = list(generate(config, params, [1, 2], 5, temperature=0.0))
    for before, token in zip([2, *written], written, strict=False):
        assert token == whole_text_says(config, params, [before])


def test_what_does_not_fit_is_said_to_slide() -> None:
    assert sliding(CONFIG, 2, 23) is None  # the last of 25 is never read
    assert sliding(CONFIG, 2, 24) == (
        "26 tokens are more than block_size, 24: the window slides, and a token attends to the last 12 to 24 before it"
    )


def test_what_a_decoder_cannot_read_is_named() -> None:
    params = params_of(CONFIG)
    with pytest.raises(ValueError, match="max_tokens: got 0; accepted: an int ≥ 1"):
        generate(CONFIG, params, [1, 2], 0)
    with pytest.raises(ValueError, match=r"temperature: got -0.1; accepted: a number ≥ 0"):
        generate(CONFIG, params, [1, 2], 1, temperature=-0.1)
    with pytest.raises(ValueError, match="top_k: got 0; accepted: None or an int ≥ 1"):
        generate(CONFIG, params, [1, 2], 1, top_k=0)
    (likeliest,) = generate(CONFIG, params, [1, 2], 1, temperature=0.0)
    assert list(generate(CONFIG, params, [1, 2], 1, top_k=1)) == [likeliest]
    decoder = Decoder(CONFIG, params)
    decoder.feed([0] * 24)
    with pytest.raises(ValueError, match="tokens: got 25 in all; accepted: at most block_size, 24"):
        decoder.feed([0])
    with pytest.raises(ValueError, match="tokens: got 23; accepted: 0 … 22"):
        Decoder(CONFIG, params).feed([23])


def test_the_cache_is_a_typed_buffer_that_is_given_back() -> None:
    manager = AttentionBufferManager()
    decoder = Decoder(CONFIG, params_of(CONFIG), manager)
    held = manager.get_stats()["bytes_in_use"]
    assert held >= 2 * 2 * 16 * 24 * 8
    assert manager.get_stats()["per_type"][BufferType.CACHE.value]["buffers_in_use"] == 1
    decoder.close()
    assert manager.get_stats()["bytes_in_use"] == 0
