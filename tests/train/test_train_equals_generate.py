"""With invariant=True a sequence's log-probabilities have the same bits alone, in any batch, in prefill, in decoding and in the
forward of training: on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3, SPEED_RUN
from support.native import needs_library
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine.decoder import Decoder, Prompt
from tilegrad.engine.sampling import Sampling
from tilegrad.engine.scorer import Scorer
from tilegrad.engine.spec import StepSpec

CPU = torch.device("cpu")
SIZE = {"n_embd": 64, "block_size": 96, "vocab_size": 97, "n_layer": 2}
SHALLOW = SIZE | {"n_layer": 1}
FAMILIES = {
    "gpt2": replace(CONFIG, **SIZE),  # type: ignore[arg-type]
    "speed run": replace(SPEED_RUN, **SIZE),  # type: ignore[arg-type]
    "mistral": replace(LLAMA, window=21, **SHALLOW),  # type: ignore[arg-type]
    "qwen2": replace(LLAMA, qkv_bias=True, **SHALLOW),  # type: ignore[arg-type]  # every op of llama, and no window
    "qwen3": replace(QWEN3, window=30, rope_scaling=None, head_size=18, **SIZE),  # type: ignore[arg-type]
}
# lengths of prompts; with the drawn tokens some pass 21, 30 and 64
LENGTHS = (1, 2, 3, 19, 21, 28, 33, 47, 62, 64, 66, 91)


def params_of(config: ModelConfig) -> dict[str, Tensor]:
    params = Engine(config, batch_size=1, seq_len=4).params
    generator = torch.Generator().manual_seed(7)
    return {name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in params.items()}


Written = dict[int, tuple[list[int], list[float]]]  # sequence → tokens and log-probabilities


def written(decoder: Decoder, prompts: dict[int, list[int]], max_tokens: int) -> Written:
    """The tokens that a decoder draws after each prompt, `batch_size` prompts at a time."""
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


def check_bits(
    config: ModelConfig, dtype: torch.dtype, device: str, lengths: Sequence[int], max_tokens: int,
    groups: Sequence[tuple[int, Sequence[int]]], scored: int, alone: Sequence[int],
) -> None:  # fmt: skip
    """Decodes after prompts of `lengths` with each (batch_size, prompts) of `groups`, the first of which has all prompts. Then
    scores `scored` of the texts at a time, and those of `alone` by themselves."""
    params, generator = params_of(config), torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    every: Written = {}
    for batch_size, some in groups:
        decoder = Decoder(config, params, batch_size, config.block_size, dtype=dtype, device=device, invariant=True)
        found = written(decoder, {n: prompts[n] for n in some}, max_tokens)
        every = every or found
        assert found == {n: every[n] for n in some}, f"batches of {batch_size}"
    texts = torch.zeros(len(prompts), config.block_size + 1, dtype=torch.int64)
    for text, prompt, (tokens, _) in zip(texts, prompts, every.values(), strict=True):
        text[: len(prompt) + max_tokens] = torch.tensor(prompt + tokens)
    scorer = Scorer(StepSpec(config, scored, config.block_size, dtype, torch.device(device), invariant=True), params)
    parts = [scorer.logprobs(some[:, :-1], some[:, 1:]).cpu() for some in texts.split(scored)]
    for n, (together, prompt, (_, logprobs)) in enumerate(zip(torch.cat(parts), prompts, every.values(), strict=True)):
        drawn = slice(len(prompt) - 1, len(prompt) - 1 + max_tokens)
        assert together[drawn].tolist() == logprobs, f"prompt of {len(prompt)} tokens, scored in a batch"
        if n in alone:
            one = scorer.logprobs(texts[n : n + 1, : drawn.stop], texts[n : n + 1, 1 : drawn.stop + 1])
            assert one[0, drawn].tolist() == logprobs, f"prompt of {len(prompt)} tokens, scored alone"


@needs_library
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *((family, torch.bfloat16) for family in FAMILIES if family != "mistral"),  # qwen3 has a window too
    ],
)
def test_training_prefill_and_decoding_have_the_same_bits(family: str, dtype: torch.dtype) -> None:
    """All prompts are decoded together, some of them in groups of three, of which one is not full, and some alone."""
    groups = ((12, range(12)), (3, (0, 4, 6, 9, 11)), (1, (2, 5, 8)))
    check_bits(FAMILIES[family], dtype, "cpu", LENGTHS, 5, groups, 12, (0, 3, 8))


WIDE: dict[str, Any] = {"n_embd": 256, "block_size": 640, "vocab_size": 1000, "n_layer": 2}
ON_A_DEVICE = {  # heads of 64, in the last two of 40 and 128; splits have 256 columns
    "gpt2": replace(CONFIG, **WIDE),
    "llama": replace(LLAMA, **WIDE),
    "mistral": replace(LLAMA, window=300, **WIDE),
    "qwen2": replace(LLAMA, qkv_bias=True, head_size=40, **WIDE),
    "qwen3": replace(QWEN3, window=300, rope_scaling=None, **WIDE | {"head_size": 128}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ON_A_DEVICE)
def test_training_prefill_and_decoding_have_the_same_bits_on_a_device(family: str, dtype: torch.dtype) -> None:
    """100 sequences in batches of 64, 7 and 1; some cross the end of a tile, of a split or of the window."""
    crossing = (
        1,
        2,
        30,
        60,
        62,
        63,
        64,
        127,
        250,
        253,
        255,
        256,
        257,
        290,
        299,
        300,
        320,
        508,
        511,
        512,
        513,
        600,
        630,
    )
    drawn = torch.randint(1, 630, (100 - len(crossing),), generator=torch.Generator().manual_seed(2)).tolist()
    some = (0, 3, 5, 9, 11, 14, 17, 18, 22, 40, 70)
    groups = ((64, range(100)), (7, some), (1, some[::2]))
    check_bits(ON_A_DEVICE[family], dtype, "cuda", (*crossing, *drawn), 9, groups, 25, (0, 5, 11, 22))


@pytest.mark.gpu
def test_an_engine_on_a_device_trains_with_an_invariant_forward() -> None:
    """Hidden states have the same bits in smaller and shorter batches, and gradients are close to the usual ones."""
    config, generator = ON_A_DEVICE["mistral"], torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (8, 400), generator=generator)
    how: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    ordered, usual = (Engine(config, 8, 400, **how, invariant=invariant) for invariant in (True, False))

    def hidden(b: int, t: int) -> Tensor:
        ordered.forward(tokens[:b, :t], tokens[:b, :t])
        return ordered._model(b, t).ln_f.y.view(b, t, -1).clone()

    whole = hidden(8, 400)
    for b, t in ((1, 400), (8, 257), (3, 64), (2, 1), (5, 399)):
        assert torch.equal(hidden(b, t), whole[:b, :t]), (b, t)
    for engine in (ordered, usual):  # both engines have the same initial weights
        engine.gradients(tokens, tokens)
    for name, grad in ordered.grads.items():
        assert (grad - usual.grads[name]).norm() <= 0.02 * usual.grads[name].norm(), name


@needs_library
def test_without_invariance_some_bits_differ() -> None:
    """This shows that the test above can fail: the order of a BLAS's additions depends on the number of rows."""
    config = replace(FAMILIES["qwen2"], n_embd=256)
    params = params_of(config)
    text = torch.randint(0, config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    for invariant in (False, True):
        scorer = Scorer(StepSpec(config, 1, 63, torch.float32, CPU, invariant=invariant), params)
        whole = scorer.logprobs(text[:, :-1], text[:, 1:])[0]
        ends = torch.arange(1, 64, 12)
        parts = [scorer.logprobs(text[:, :n], text[:, 1 : n + 1])[0, -1] for n in ends.tolist()]
        assert torch.equal(torch.stack(parts), whole[ends - 1]) is invariant
