"""With invariant=True a sequence's log-probabilities have the same bits alone, in any batch, in prefill, in decoding and in the
forward of training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine.decoder import Decoder, Prompt
from tilegrad.engine.sampling import Sampling
from tilegrad.engine.scorer import Scorer
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels.cpu import library

CPU = torch.device("cpu")
SIZE = {"n_embd": 64, "block_size": 96, "vocab_size": 97, "n_layer": 2}
FAMILIES = {
    "gpt2": replace(CONFIG, **SIZE),  # type: ignore[arg-type]
    "llama": replace(LLAMA, **SIZE),  # type: ignore[arg-type]
    "mistral": replace(LLAMA, window=21, **SIZE),  # type: ignore[arg-type]
    "qwen2": replace(LLAMA, qkv_bias=True, **SIZE),  # type: ignore[arg-type]
    "qwen3": replace(QWEN3, window=30, rope_scaling=None, head_size=18, **SIZE),  # type: ignore[arg-type]
}
pytestmark = pytest.mark.skipif(isinstance(library.library(), str), reason="invariant=True needs the native library")


def params_of(config: ModelConfig) -> dict[str, Tensor]:
    params = Engine(config, batch_size=1, seq_len=4).params
    generator = torch.Generator().manual_seed(7)
    return {name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in params.items()}


def written(decoder: Decoder, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
    """What a decoder draws after each prompt, `batch_size` prompts at a time."""
    out = []
    for first in range(0, len(prompts), decoder.batch_size):
        some = prompts[first : first + decoder.batch_size]
        drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in some]
        sampling = Sampling(temperature=1.2, top_k=40, seed=3)
        decoder.prefill({i: Prompt(tokens, sequence=first + i, sampling=sampling) for i, tokens in enumerate(some)})
        for _ in range(max_tokens - 1):
            decoder.submit()
        for slots, tokens, logprobs in decoder.finished(wait=True):
            for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
                drawn[slot][0].append(token)
                drawn[slot][1].append(logprob)
        decoder.stop(range(len(some)))
        out += drawn
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_prefill_and_decoding_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    config, max_tokens = FAMILIES[family], 7
    params, generator = params_of(config), torch.Generator().manual_seed(1)
    lengths = torch.randint(1, config.block_size - max_tokens, (20,), generator=generator).tolist()
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    runs = []
    for batch_size in (1, 3, 20):
        decoder = Decoder(config, params, batch_size, config.block_size, dtype=dtype, invariant=True)
        runs.append(written(decoder, prompts, max_tokens))
    assert runs[0] == runs[1] == runs[2]
    spec = StepSpec(config, 1, config.block_size, dtype, CPU, invariant=True)
    scorer = Scorer(spec, params)
    for prompt, (tokens, logprobs) in zip(prompts, runs[0], strict=True):
        text = torch.tensor([[*prompt, *tokens]])
        scored = scorer.logprobs(text[:, :-1], text[:, 1:])[0]
        assert scored[len(prompt) - 1 :].tolist() == logprobs


def test_without_invariance_some_bits_differ() -> None:
    """So the test above can fail: the order of a BLAS's additions depends on the number of rows."""
    config = replace(FAMILIES["llama"], n_embd=256)
    params = params_of(config)
    text = torch.randint(0, config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    for invariant in (False, True):
        scorer = Scorer(StepSpec(config, 1, 63, torch.float32, CPU, invariant=invariant), params)
        whole = scorer.logprobs(text[:, :-1], text[:, 1:])[0]
        parts = [scorer.logprobs(text[:, :n], text[:, 1 : n + 1])[0, -1] for n in range(1, 64)]
        assert torch.equal(torch.stack(parts), whole) is invariant
