"""An invariant forward: the bits of a row depend only on the tokens of its sequence up to that row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine.batch import check_invariant
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels import gpu
from tilegrad.kernels.cpu import library
from tilegrad.model.lora import LoraConfig

pytestmark = pytest.mark.skipif(isinstance(library.library(), str), reason=f"the library {library.library()}")
# so wide that the order of a BLAS's additions shows
GPT2 = ModelConfig(vocab_size=61, block_size=64, n_layer=2, n_head=4, n_embd=128)
LLAMA = replace(
    GPT2,
    n_kv_head=2,
    activation="swiglu",
    norm="rmsnorm",
    position="rope",
    bias=False,
    tie_embeddings=False,
    ffn_dim=53,
)
FAMILIES = {
    "gpt2": GPT2,
    "mistral": replace(LLAMA, window=7, n_layer=1),
    "qwen2": replace(LLAMA, qkv_bias=True, n_layer=1),  # every op of llama, without a window
    "qwen3": replace(LLAMA, qk_norm=True, head_size=6, window=5),
    "softcap": replace(
        GPT2, n_layer=1, logit_softcap=2.0, activation="relu2", residual_scalars=True, value_embeddings=1
    ),
    "per head, tanh": replace(GPT2, projection="per_head", activation="tanh", window=9, n_layer=1),
}
CALLS = [  # tests/ops/test_ops_fixed_order.py has products of heads in bfloat16
    *((name, torch.float32) for name in FAMILIES),
    *((name, torch.bfloat16) for name in ("gpt2", "qwen3")),
]
LONGEST = 29
CASES = {  # number of threads: (sequences, tokens)
    1: ((64, LONGEST), (1, LONGEST), (17, LONGEST), (3, 1), (3, 3), (3, 6), (3, 16), (3, 27)),
    2: ((64, LONGEST), (1, LONGEST), (3, 16)),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def new_engine(config: ModelConfig, dtype: torch.dtype, b: int, t: int, *, invariant: bool = True) -> Engine:
    """Weights and biases have many magnitudes: those of a new model are too small to change the sums."""
    engine = Engine(config, b, t, dtype=dtype, invariant=invariant)
    g = torch.Generator().manual_seed(3)
    for p in engine.params.values():
        p.copy_(torch.randn(p.shape, generator=g) * (1.0 if p.ndim == 1 else p.shape[-1] ** -0.5))
    return engine


def hidden(engine: Engine, tokens: Tensor) -> Tensor:
    """The head's input, (B, T, C)."""
    b, t = tokens.shape
    engine.forward(tokens, torch.zeros_like(tokens))
    return engine._model(b, t).ln_f.y.view(b, t, -1).clone()


def tokens_of(config: ModelConfig, b: int, t: int) -> Tensor:
    return torch.randint(0, config.vocab_size, (b, t), generator=torch.Generator().manual_seed(1))


def differing(config: ModelConfig, dtype: torch.dtype, *, invariant: bool = True) -> list[object]:
    """The cases (threads, sequences, tokens) that change the bits of the rows of the first sequences."""
    tokens = tokens_of(config, 64, LONGEST)
    want: Tensor | None = None
    found: list[object] = []
    for count, cases in CASES.items():
        torch.set_num_threads(count)
        engine = new_engine(config, dtype, 64, LONGEST, invariant=invariant)
        for b, t in cases:
            got = hidden(engine, tokens[:b, :t])
            want = got if want is None else want
            if not torch.equal(got, want[:b, :t]):
                found.append((count, b, t))
    return found


@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_hidden_states_have_the_same_bits_alone_in_a_batch_and_as_a_prefix(name: str, dtype: torch.dtype) -> None:
    assert differing(FAMILIES[name], dtype) == []


def test_canary_products_that_are_not_invariant_are_seen() -> None:
    wide = replace(GPT2, n_layer=1)
    assert differing(wide, torch.float32) == []
    assert differing(wide, torch.float32, invariant=False) != []


@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_losses_of_a_sequence_have_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    """There is one target, so that the loss is that of its row. Steps in one call and in two give the same gradients."""
    config = FAMILIES[name]
    tokens = tokens_of(config, 9, 16)
    targets = torch.full_like(tokens, -1)
    targets[0, 5] = 7
    engine = new_engine(config, dtype, 9, 16)
    losses = {engine.forward(tokens[:b, :t], targets[:b, :t]) for b, t in ((1, 8), (2, 16), (9, 9), (9, 16))}
    assert len(losses) == 1
    engine.gradients(tokens, targets)
    once = {key: g.clone() for key, g in engine.grads.items()}
    engine.zero_gradients()
    engine.forward(tokens, targets)
    engine.backward()
    assert {engine.loss} == losses and all(torch.equal(engine.grads[key], g) for key, g in once.items())


def test_recomputed_activations_have_the_same_bits() -> None:
    tokens = tokens_of(LLAMA, 8, 32)
    engines = [Engine(LLAMA, 8, 32, memory_budget=budget, invariant=True) for budget in (None, 1 << 34)]
    for engine in engines:
        engine.gradients(tokens, tokens)
    assert any(engines[0].recompute) and not any(engines[1].recompute)
    assert all(torch.equal(g, engines[1].grads[key]) for key, g in engines[0].grads.items())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dtype": torch.float64}, "with dtype torch.float64"),
        ({"lora": LoraConfig(2)}, "with lora, .* no fixed order"),
        ({"linear": "fp8", "dtype": torch.bfloat16}, "with linear 'fp8'"),
    ],
)
def test_options_without_a_fixed_order_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=rf"^invariant: got True {why}.*; accepted: False here"):
        Engine(GPT2, 2, 8, invariant=True, **given)


def test_invariant_is_refused_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.engine import batch

    monkeypatch.setattr(batch, "library", lambda: "was not built")
    with pytest.raises(
        ValueError, match=r"^invariant: got True without the native library, which was not built; accepted: F"
    ):
        Engine(GPT2, 2, 8, invariant=True)


def test_on_a_device_every_kernel_must_be_one_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes norms of rows that Triton's kernel does not take."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(gpu, "capability", lambda _device: (9, 0))
    device, wide = torch.device("cuda:5"), replace(GPT2, n_embd=1 << 15, head_size=64)
    for dtype in (torch.bfloat16, torch.float32):
        check_invariant(StepSpec(GPT2, 1, 1, dtype, device, invariant=True))
        with pytest.raises(ValueError, match=r"^invariant: got True on cuda:5, where .* norms .* 32768; accepted: F"):
            check_invariant(StepSpec(wide, 1, 1, dtype, device, invariant=True))
    with pytest.raises(ValueError, match=r"with dtype torch\.float64"):
        check_invariant(StepSpec(GPT2, 1, 1, torch.float64, device, invariant=True))
    gpu._refusal.cache_clear()
