"""Prompts over the slots of a decoder: texts do not depend on the batch, and end where they should."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoders import ReferenceDecoder, ScriptedDecoder, scripted
from support.models import CONFIG, LLAMA

import tilegrad
from tilegrad import Engine, Generated, ModelConfig, Piece, TrainedModel
from tilegrad.data.tokenizer import ByteTokenizer, TextStream, text_after
from tilegrad.engine.sampling import Sampling
from tilegrad.training import generation
from tilegrad.training.generation import NonFiniteLogits, Request, StopAt, WindowSlides, draw, sliding, write

BYTES = ModelConfig(vocab_size=256, block_size=12, n_layer=1, n_head=2, n_embd=16)
PROMPTS = [[1, 2, 3], [7], [4, 5] * 4, [9] * 15, [11, 3, 200, 5], [6, 6]]  # the fourth is longer than the window


def params_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    params = Engine(config, 1, min(4, config.block_size), dtype=torch.float64).params
    for p in params.values():
        p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel())), alpha=0.3)
    return params


def model_of(config: ModelConfig, eos: frozenset[int] = frozenset()) -> TrainedModel:
    return TrainedModel(config, params_of(config), ByteTokenizer(), 0, Path("none"), eos)


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return model_of(BYTES)


@pytest.fixture
def over_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "Decoder", ReferenceDecoder)


CONFIGS = {
    "gpt2": replace(CONFIG, vocab_size=23, n_layer=1),
    "llama": replace(LLAMA, vocab_size=23, n_layer=1),
    "per head, window": replace(CONFIG, vocab_size=23, n_layer=1, projection="per_head", activation="tanh", window=5),
    "embedding_mse": replace(CONFIG, vocab_size=23, n_layer=1, loss="embedding_mse", activation="relu"),
}


@pytest.mark.parametrize(
    ("name", "block_size", "length", "n"),  # n: tokens that are drawn, so many that the window slides
    [
        *(("gpt2", 16, 2, 17), ("gpt2", 7, 7, 10), ("gpt2", 7, 20, 5), ("gpt2", 1, 2, 4)),
        *(("llama", 7, 20, 10), ("per head, window", 7, 7, 10), ("embedding_mse", 7, 5, 10)),
    ],
)
def test_after_block_size_tokens_the_window_slides_by_half(name: str, block_size: int, length: int, n: int) -> None:
    model = model_of(replace(CONFIGS[name], block_size=block_size))
    prompt = torch.randint(0, 23, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    assert list(draw(model.config, model.params, prompt, n, temperature=0.0)) == alone(model, prompt, n)


def test_a_text_longer_than_the_window_is_reported_to_slide() -> None:
    assert sliding(CONFIG, 2, 15) is None  # the last of 17 tokens is never read
    assert sliding(CONFIG, 2, 16) == (
        "18 tokens are more than block_size, 16: the window slides, and a token attends to the last 8 to 16 before it"
    )


def tokens_of(pieces: Iterator[Piece]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for piece in pieces:
        found.setdefault(piece.sequence, []).append(piece.token)
    return found


def alone(model: TrainedModel, prompt: Sequence[int], n: int) -> list[int]:
    """The likeliest tokens by the reference model, with the window that slides by half."""
    size, text = model.config.block_size, list(prompt)
    window, written = text[-size:], list[int]()
    for _ in range(n):
        logits = model.logits(window)[-1]
        token = int(logits.argmax())
        written.append(token)
        text.append(token)
        window = text[-((size + 1) // 2) :] if len(window) == size else [*window, token]
    return written


@pytest.mark.filterwarnings("ignore::tilegrad.training.generation.WindowSlides")
def test_greedy_tokens_in_any_batch_are_those_of_the_whole_text(model: TrainedModel) -> None:
    expected = [tuple(alone(model, prompt, 12)) for prompt in PROMPTS]
    for batch_size in (1, 4, 32):
        found = tilegrad.generate(model, PROMPTS, max_tokens=12, temperature=0.0, batch_size=batch_size, logprobs=True)
        assert [one.tokens for one in found] == expected
        assert all(
            one.prompt == (*prompt,) and one.finish == "length" for one, prompt in zip(found, PROMPTS, strict=True)
        )
    assert found[0].logprobs is not None and len(found[0].logprobs) == 12
    first = model.logits(PROMPTS[0])[-1].log_softmax(-1)[found[0].tokens[0]]
    torch.testing.assert_close(torch.tensor(found[0].logprobs[0], dtype=torch.float64), first, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::tilegrad.training.generation.WindowSlides")
@pytest.mark.usefixtures("over_reference")
def test_drawn_tokens_do_not_depend_on_the_batch(model: TrainedModel) -> None:
    def written(batch_size: int, **how: int) -> list[Generated]:
        return tilegrad.generate(model, PROMPTS, max_tokens=10, batch_size=batch_size, num_samples=2, **how)  # type: ignore[arg-type]

    found = written(1)
    assert found == written(3) == written(64) != written(3, seed=1)
    assert found[0].prompt == found[1].prompt and found[0].tokens != found[1].tokens  # two samples
    pieces = tokens_of(tilegrad.stream(model, PROMPTS, max_tokens=10, batch_size=3, num_samples=2))
    assert [tuple(pieces[i]) for i in range(12)] == [one.tokens for one in found]


@pytest.mark.parametrize("ahead", ["cpu", "cuda"])
def test_slots_are_refilled_as_sequences_end(ahead: str) -> None:
    """Sequence n writes n + 1 tokens and then EOS: three slots take far fewer steps than one slot."""
    eos, n = frozenset({0}), 12
    decoder = ScriptedDecoder(3, 50, lambda sequence, draws: 0 if draws > sequence else 1 + draws, ahead)
    requests = [Request([5], 30, Sampling(), i, eos) for i in range(n)]
    found = tokens_of(write(decoder, requests, ByteTokenizer()))  # type: ignore[arg-type]
    assert found == {i: [*range(1, i + 2), 0] for i in range(n)}
    assert len(decoder.read) == n and decoder.steps <= (n * (n + 3) // 2) // 3 + n + (0 if ahead == "cpu" else 3 * n)
    if ahead == "cpu":
        assert decoder.drawn == sum(map(len, found.values())), "nothing is drawn in vain"


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99), st.sampled_from(["cpu", "cuda"]))
def test_each_sequence_has_its_own_tokens_for_any_sizes(
    batch_size: int, capacity: int, max_tokens: int, seed: int, device: str
) -> None:
    chance = random.Random(seed)
    ends = [chance.randrange(15) for _ in range(7)]
    decoder = ScriptedDecoder(batch_size, capacity, lambda s, draws: 0 if draws == ends[s] else 1 + s, device)
    requests = [Request([9] * chance.randint(1, 12), max_tokens, Sampling(), i, frozenset({0})) for i in range(7)]
    found = tokens_of(write(decoder, requests, ByteTokenizer()))  # type: ignore[arg-type]
    for i, end in enumerate(ends):
        assert found[i] == ([1 + i] * max_tokens if end >= max_tokens else [1 + i] * end + [0])
    assert all(1 <= len(tokens) <= capacity for tokens in decoder.read)


def test_a_decoder_can_be_used_again_after_an_early_end() -> None:
    decoder = ScriptedDecoder(2, 9, lambda sequence, draws: 10 * sequence + draws)
    for _ in range(2):
        pieces = write(decoder, [Request([1], 8, Sampling(), i) for i in range(4)], ByteTokenizer())  # type: ignore[arg-type]
        assert [next(pieces).token for _ in range(2)] == [0, 10]
        pieces.close()  # type: ignore[attr-defined]
    assert tokens_of(write(decoder, [Request([1], 3, Sampling(), 7)], ByteTokenizer())) == {7: [70, 71, 72]}  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("stop", "text", "finish", "tokens"),
    [
        ("END", "one EN two ", "stop", 14),
        (["ND", "zzz"], "one EN two E", "stop", 14),
        (["two END", "EN t"], "one ", "stop", 8),  # the stop string that is complete first ends the text
        (["n", "ne"], "o", "stop", 2),
        ("🦊", "one EN two END ", "stop", 19),
        ("nowhere", "one EN two END 🦊 aba", "length", 23),
        ("abab", "one EN two END 🦊 aba", "length", 23),  # the text is held back, and shown at the end
        ((), "one EN two END 🦊 aba", "length", 23),
    ],
)
def test_stop_strings_may_be_split_over_tokens(
    stop: str | Sequence[str], text: str, finish: str, tokens: int, device: str, model: TrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole = "one EN two END 🦊 aba".encode()
    monkeypatch.setattr(generation, "Decoder", scripted(lambda _, draws: (whole + b"???")[draws], device=device))
    (found,) = tilegrad.generate(replace_block(model, 64), "x", max_tokens=len(whole), stop=stop)
    assert (found.text, found.finish, len(found.tokens)) == (text, finish, tokens)
    assert bytes(found.tokens) == whole[:tokens]
    pieces = list(tilegrad.stream(replace_block(model, 64), "x", max_tokens=len(whole), stop=stop))
    assert "".join(piece.text for piece in pieces) == text and pieces[-1].finish == finish
    assert not any(piece.finish for piece in pieces[:-1]) and "�" not in text


def replace_block(model: TrainedModel, block_size: int) -> TrainedModel:
    return replace(model, config=replace(model.config, block_size=block_size))


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stop = StopAt(["END", "\n\n"])
    assert [stop.add(text) for text in ("a", " E", "N", "x", "\n", "y", "E", "E", "\n", "\n", "z")] == [
        *("a", " ", "", "ENx", "", "\ny", "", "E", "E", "", ""),
    ]
    assert stop.found and stop.rest() == ""


@given(
    st.lists(st.text("abé\n", max_size=5), max_size=9), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3)
)
def test_stopped_text_does_not_depend_on_the_tokens(pieces: list[str], stops: list[str]) -> None:
    def before(parts: Sequence[str]) -> tuple[str, bool]:
        stop = StopAt(stops)
        text = "".join(stop.add(part) for part in parts)
        return text + stop.rest(), stop.found

    whole = "".join(pieces)
    text, found = before(pieces)
    assert (text, found) == before([whole]) == before([*whole])
    assert whole.startswith(text) and found == any(stop in whole for stop in stops)
    assert text == whole or found and any(whole[len(text) :].startswith(stop) for stop in stops)


@given(st.lists(st.integers(0, 260), max_size=20), st.lists(st.integers(0, 255), max_size=9))
def test_the_whole_text_equals_the_streamed_text(tokens: list[int], after: list[int]) -> None:
    stream = TextStream(ByteTokenizer(), after=after)
    assert "".join([*map(stream.add, tokens), stream.rest()]) == text_after(ByteTokenizer(), tokens, after)


@pytest.mark.usefixtures("over_reference")
def test_eos_ends_a_sequence_unless_it_is_switched_off(model: TrainedModel) -> None:
    (found,) = tilegrad.generate(model, "the", max_tokens=9, temperature=0.0)
    at = found.tokens[4]
    ends = replace(model, eos_token_ids=frozenset({at}))
    first = found.tokens.index(at)
    (ended,) = tilegrad.generate(ends, "the", max_tokens=9, temperature=0.0)
    assert ended.finish == "eos" and ended.tokens == found.tokens[: first + 1]
    assert ended.text == text_after(ByteTokenizer(), ended.tokens[:-1], [*b"the"])
    assert tilegrad.generate(ends, "the", max_tokens=9, temperature=0.0, eos=False) == [found]
    assert tuple(ends.tokens([*b"the"], 9, temperature=0.0, stop={at})) == ended.tokens[:-1]
    assert tuple(ends.tokens([*b"the"], 9, temperature=0.0)) == found.tokens
    assert ends.generate("the", 9, temperature=0.0) == "the" + ended.text


@pytest.mark.usefixtures("over_reference")
def test_prompts_are_texts_and_token_lists(model: TrainedModel) -> None:
    greedy = {"max_tokens": 4, "temperature": 0.0}
    text, tokens, array = tilegrad.generate(model, ["the", [*b"the"], ByteTokenizer().encode("the")], **greedy)  # type: ignore[arg-type]
    assert text.tokens == tokens.tokens == array.tokens and (text.prompt, tokens.prompt) == ("the", (*b"the",))
    assert tilegrad.generate(model, "the", **greedy) == [text] and tilegrad.generate(model, []) == []  # type: ignore[arg-type]
    assert list(tilegrad.stream(model, [])) == [] and text.logprobs is None


@pytest.mark.usefixtures("over_reference")
def test_a_prompt_that_does_not_fit_into_the_window_is_reported_once(model: TrainedModel) -> None:
    with pytest.warns(WindowSlides) as caught:
        tilegrad.generate(model, [[1] * 9, [2] * 8], max_tokens=5)
    assert [str(w.message) for w in caught] == [
        "14 tokens are more than block_size, 12: the window slides, and a token attends to the last 6 to 12 before it"
    ]
    assert caught[0].filename == __file__
    with pytest.warns(
        WindowSlides, match="^prompt: got 30 tokens, and only the last 12 are read; 33 tokens are more than"
    ):
        tilegrad.stream(model, [[1] * 30], max_tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilegrad.generate(model, [[1] * 5], max_tokens=8)


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ("", {}, "prompt: got ''; accepted: a text of at least one token"),
        (["the", ""], {}, r"prompts\[1\]: got ''; accepted: a text of at least one token"),
        ([[]], {}, r"prompt: got \(\); accepted: a text of at least one token"),
        ("a\udcff", {}, r"prompt: got half of a surrogate pair in 'a\\udcff'; accepted: text that UTF-8 can encode"),
        (["the", "\ud800"], {}, r"prompts\[1\]: got half of a surrogate pair in "),
        ("x", {"stop": ["a", "\udcff"]}, "stop: got half of a surrogate pair in "),
        ([1, 2], {}, "prompts: got a list with 1; accepted: a text, or a list of texts and of token lists"),
        ([[1.5]], {}, r"prompts\[0\]: got \[1.5\]; accepted: a text, or a list of tokens"),
        ([[3], [256]], {}, r"prompts\[1\]: got the token 256; accepted: 0 … 255, the model's vocabulary"),
        ([[-1]], {}, "prompt: got the token -1; accepted: 0 … 255"),
        ("x", {"max_tokens": 0}, "max_tokens: got 0; accepted: an int ≥ 1"),
        ("x", {"max_tokens": 1.5}, "max_tokens: got 1.5; accepted: an int ≥ 1"),
        ("x", {"num_samples": 0}, "num_samples: got 0; accepted: an int ≥ 1"),
        ("x", {"batch_size": True}, "batch_size: got True; accepted: an int ≥ 1"),
        ("x", {"stop": ""}, "stop: got ''; accepted: a text of at least one character"),
        ("x", {"stop": ["a", ""]}, "stop: got ''; accepted: a text of at least one character"),
        ("x", {"top_p": 0}, r"top_p: got 0; accepted: a number in \(0, 1\]"),
        ("x", {"temperature": -1}, "temperature: got -1; accepted: "),
        ("x", {"device": "cuda:99"}, "device: got 'cuda:99'"),
        ("x", {"dtype": "int8"}, "dtype: got 'int8'; accepted: float32, float64, bfloat16"),
    ],
)
def test_a_bad_argument_of_generate_is_refused_by_name(
    prompts: str, settings: dict[str, object], said: str, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "Decoder", None)  # no decoder is made
    for front in (tilegrad.generate, tilegrad.stream):
        with pytest.raises(ValueError, match=f"^{said}"):
            front(model, prompts, **settings)  # type: ignore[arg-type]


def test_several_samples_of_one_prompt_differ(model: TrainedModel) -> None:
    with pytest.raises(ValueError, match=r"num_samples: got 2; accepted: 1, or more with tilegrad.generate"):
        model.generate("x", num_samples=2)


@pytest.mark.parametrize("config", [CONFIG, LLAMA])
def test_diverged_weights_are_refused_with_a_sentence(config: ModelConfig) -> None:
    diverged = model_of(config)
    diverged.params["ln_f.weight"].fill_(float("nan"))
    with pytest.raises(NonFiniteLogits, match=r"^logits: got values that are not finite; use weights"):
        tilegrad.generate(diverged, [[1, 2]], max_tokens=2)
