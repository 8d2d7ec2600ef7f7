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
SHALLOW = SIZE | {"n_layer": 1}
FAMILIES = {
    "gpt2": replace(CONFIG, **SIZE),  # type: ignore[arg-type]
    "mistral": replace(LLAMA, window=21, **SHALLOW),  # type: ignore[arg-type]
    "qwen2": replace(LLAMA, qkv_bias=True, **SHALLOW),  # type: ignore[arg-type]  # every op of llama, and no window
    "qwen3": replace(QWEN3, window=30, rope_scaling=None, head_size=18, **SIZE),  # type: ignore[arg-type]
}
LENGTHS = (1, 2, 3, 19, 21, 28, 33, 47, 62, 64, 66, 91)  # of prompts; with what is drawn some pass 21, 30 and 64
pytestmark = pytest.mark.skipif(isinstance(library.library(), str), reason="invariant=True needs the native library")


def params_of(config: ModelConfig) -> dict[str, Tensor]:
    params = Engine(config, batch_size=1, seq_len=4).params
    generator = torch.Generator().manual_seed(7)
    return {name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in params.items()}


Written = dict[int, tuple[list[int], list[float]]]  # sequence → tokens and log-probabilities


def written(decoder: Decoder, prompts: dict[int, list[int]], max_tokens: int) -> Written:
    """What a decoder draws after each prompt, `batch_size` prompts at a time."""
    out, sequences = Written(), list(prompts)
    for first in range(0, len(prompts), decoder.batch_size):
        some = sequences[first : first + decoder.batch_size]
        drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in some]
        sampling = Sampling(temperature=1.2, top_k=40, seed=3)
        decoder.prefill({i: Prompt(prompts[n], sequence=n, sampling=sampling) for i, n in enumerate(some)})
        for _ in range(max_tokens - 1):
            decoder.submit()
        for slots, tokens, logprobs in decoder.finished(wait=True):
            for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
                drawn[slot][0].append(token)
                drawn[slot][1].append(logprob)
        decoder.stop(range(len(some)))
        out |= zip(some, drawn, strict=True)
    return out


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *((family, torch.bfloat16) for family in FAMILIES if family != "mistral"),  # qwen3 has a window too
    ],
)
def test_training_prefill_and_decoding_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """All prompts together; of them some in threes, with a group that is not full, and some alone."""
    config, max_tokens = FAMILIES[family], 5
    params, generator = params_of(config), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    every: Written = {}
    for batch_size, some in ((12, range(12)), (3, (0, 4, 6, 9, 11)), (1, (2, 5, 8))):
        decoder = Decoder(config, params, batch_size, config.block_size, dtype=dtype, invariant=True)
        found = written(decoder, {n: prompts[n] for n in some}, max_tokens)
        every = every or found
        assert found == {n: every[n] for n in some}
    texts = torch.zeros(12, config.block_size + 1, dtype=torch.int64)
    for text, prompt, (tokens, _) in zip(texts, prompts, every.values(), strict=True):
        text[: len(prompt) + max_tokens] = torch.tensor(prompt + tokens)
    scorer = Scorer(StepSpec(config, 12, config.block_size, dtype, CPU, invariant=True), params)
    together = scorer.logprobs(texts[:, :-1], texts[:, 1:])
    for n, (prompt, (_, logprobs)) in enumerate(zip(prompts, every.values(), strict=True)):
        drawn = slice(len(prompt) - 1, len(prompt) - 1 + max_tokens)
        assert together[n, drawn].tolist() == logprobs
        if n in (0, 3, 8):  # also alone
            assert (
                scorer.logprobs(texts[n : n + 1, : drawn.stop], texts[n : n + 1, 1 : drawn.stop + 1])[0, drawn].tolist()
                == logprobs
            )


def test_without_invariance_some_bits_differ() -> None:
    """So the test above can fail: the order of a BLAS's additions depends on the number of rows."""
    config = replace(FAMILIES["qwen2"], n_embd=256)
    params = params_of(config)
    text = torch.randint(0, config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    for invariant in (False, True):
        scorer = Scorer(StepSpec(config, 1, 63, torch.float32, CPU, invariant=invariant), params)
        whole = scorer.logprobs(text[:, :-1], text[:, 1:])[0]
        ends = torch.arange(1, 64, 12)
        parts = [scorer.logprobs(text[:, :n], text[:, 1 : n + 1])[0, -1] for n in ends.tolist()]
        assert torch.equal(torch.stack(parts), whole[ends - 1]) is invariant
