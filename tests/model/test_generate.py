"""Generation with the cache against the whole model on the whole text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilegrad import Engine, ModelConfig
from tilegrad.memory import AttentionBufferManager, BufferType
from tilegrad.model import reference
from tilegrad.model.generate import Decoder, generate

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
    params = Engine(config, 1, 4, dtype=torch.float64).params
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


def test_past_block_size_it_raises() -> None:
    params = params_of(CONFIG)
    with pytest.raises(ValueError, match="max_tokens: got 23 after 2 of the prompt; accepted: 1 … 22"):
        generate(CONFIG, params, [1, 2], 23)
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
