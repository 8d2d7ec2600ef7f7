"""The decoder in planned memory, against the model in torch ops over the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3
from support.native import without_library
from torch import Tensor

from tilegrad import Engine, LoraConfig, ModelConfig
from tilegrad.engine import capture as capture_module
from tilegrad.engine import decoder as decoder_module
from tilegrad.engine.decoder import Decoder, Prompt, decoder_spec, largest_batch, plan_decoder
from tilegrad.engine.sampling import Sampling
from tilegrad.engine.scorer import Scorer
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels.cross_entropy import torch_ops
from tilegrad.kernels.op import observe
from tilegrad.memory.planned.arena import poison_dead
from tilegrad.model import reference
from tilegrad.model.decoding import Decoding
from tilegrad.model.reference import logits_of

FAMILIES = {
    "gpt2": CONFIG,
    "llama": LLAMA,
    "mistral": replace(LLAMA, window=5),
    "qwen3": QWEN3,
    "per_head, mse": replace(CONFIG, projection="per_head", loss="embedding_mse"),
    "dropout": replace(CONFIG, dropout=0.3),
    "speed run": replace(CONFIG, activation="relu2", logit_softcap=2.0, residual_scalars=True, value_embeddings=2),
}
GREEDY = Sampling(temperature=0.0)


def params_of(config: ModelConfig, lora: LoraConfig | None = None) -> dict[str, Tensor]:
    params = Engine(config, batch_size=1, seq_len=4, dtype=torch.float64, lora=lora).params
    generator = torch.Generator().manual_seed(3)
    return {name: x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in params.items()}


def check(
    config: ModelConfig, params: dict[str, Tensor], text: list[int], drawn: list[tuple[int, float]],
    lora: LoraConfig | None = None,
) -> None:  # fmt: skip
    """Checks that each token drawn after a text is the likeliest, and its log-probability."""
    whole = [*text, *(token for token, _ in drawn[:-1])]
    n = reference.hidden_states(params, torch.tensor([whole]), config, lora)
    logits = logits_of(params, n[0], config)[len(text) - 1 :]
    most = logits.log_softmax(-1).max(-1)
    tokens, logprobs = zip(*drawn, strict=True)
    assert list(tokens) == most.indices.tolist()
    assert float((torch.tensor(logprobs, dtype=torch.float64) - most.values).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("family", "prefill_tokens"),  # None: prompts together; 16: prompts in groups
    [
        *(("gpt2", None), ("llama", None), ("mistral", None), ("per_head, mse", None), ("speed run", None)),
        *(("gpt2", 16), ("mistral", 16), ("qwen3", 16), ("dropout", 16)),
    ],
)
def test_every_token_is_the_one_that_the_whole_text_gives(family: str, prefill_tokens: int | None) -> None:
    """Slots begin with prompts of different lengths, end, and begin again with new ones."""
    config = FAMILIES[family]
    exact = replace(config, dropout=0.0)
    params = params_of(config)
    decoder = Decoder(config, params, batch_size=3, capacity=16, prefill_tokens=prefill_tokens)
    texts = {0: [1, 2, 3], 2: [5] * 10, 1: [7, 8, 9, 10]}
    decoder.prefill({slot: Prompt(text, sequence=slot, sampling=GREEDY) for slot, text in texts.items()})
    drawn: dict[int, list[tuple[int, float]]] = {slot: [] for slot in texts}
    draws = 0
    for step in range(9):
        if step == 2:
            decoder.stop([1])
        if step == 4:
            check(exact, params, texts[1], drawn[1])
            texts[1], drawn[1] = [11, 12], []
            decoder.prefill({1: Prompt(texts[1], sampling=GREEDY)})
        if step == 6:
            decoder.stop([2])
        decoder.submit()
        for slots, tokens, logprobs in decoder.finished(wait=True):
            for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
                drawn[slot].append((token, logprob))
                draws += 1
    for slot, text in texts.items():
        check(exact, params, text, drawn[slot])
    assert draws == (1 + 9) + (1 + 2) + (1 + 5) + (1 + 6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_rows_added_to_a_prefill_change_no_result(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA such rows let prompts of many lengths share few graphs."""
    monkeypatch.setattr(decoder_module, "prefill_rows", lambda tokens, spec: min(tokens + 5, spec.prefill_tokens))
    test_every_token_is_the_one_that_the_whole_text_gives(family, 24)


def test_a_prefill_on_cuda_has_one_of_few_numbers_of_rows() -> None:
    spec = replace(decoder_spec(CONFIG, 4, 16, device="cpu", dtype=torch.float32), device=torch.device("cuda"))
    spec = replace(spec, prefill_tokens=8000)
    rows = {tokens: decoder_module.prefill_rows(tokens, spec) for tokens in range(1, 8001)}
    assert all(tokens <= padded < tokens + max(64, tokens / 4) for tokens, padded in rows.items())
    assert len(set(rows.values())) <= 32 and rows[8000] == 8000


def test_the_decoder_works_without_the_native_library(tmp_path: Path) -> None:
    with without_library(tmp_path):
        with pytest.warns(UserWarning, match="plain torch ops"):
            test_every_token_is_the_one_that_the_whole_text_gives("llama", None)
        test_every_token_is_the_one_that_the_whole_text_gives("mistral", 16)  # warned of once


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_have_the_bits_of_steps_op_by_op(family: str, dtype: torch.dtype) -> None:
    config, drawn = FAMILIES[family], []
    params = {name: x.to(dtype) for name, x in params_of(config).items()}
    for capture in (True, False):
        decoder = Decoder(config, params, batch_size=2, capacity=16, capture=capture)
        decoder.prefill({0: Prompt([1, 2, 3]), 1: Prompt([4], sequence=1)})
        for _ in range(6):
            decoder.submit()
        drawn.append(decoder.finished(wait=True))
        recorded = decoder._recorded
        assert (recorded is not None and bool(recorded.calls)) is capture
    assert drawn[0] == drawn[1]


def test_adapters_are_read_without_merging_them() -> None:
    lora = LoraConfig(rank=2, alpha=4, dropout=0.5)
    params = params_of(LLAMA, lora)
    decoder = Decoder(LLAMA, params, batch_size=1, capacity=8, lora=lora)
    text = [3, 1, 4]
    decoder.prefill({0: Prompt(text, sampling=GREEDY)})
    decoder.submit()
    drawn = [(token, logprob) for _, (token,), (logprob,) in decoder.finished(wait=True)]
    assert len(drawn) == 2
    check(LLAMA, params, text, drawn, lora)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_plan_has_every_byte_and_no_dead_buffer_is_read(family: str) -> None:
    """Every dead buffer is filled with NaN after the op that reads it last, and no token changes."""
    config = FAMILIES[family]
    params = params_of(config)
    prompts = {0: Prompt([1, 2, 3], sampling=GREEDY), 1: Prompt([4] * 13, sequence=1, sampling=GREEDY)}

    def draw(*, poisoned: bool) -> list[object]:
        decoder = Decoder(config, params, batch_size=2, capacity=16, prefill_tokens=16)
        assert decoder.arenas.nbytes == decoder.plan.peak_bytes
        decoder.arenas.poison()
        if poisoned:
            with poison_dead(decoder.arenas, observe):
                decoder.prefill(prompts)
                decoder.submit()
        else:
            decoder.prefill(prompts)
            decoder.submit()
        return [*decoder.finished(wait=True)]

    assert draw(poisoned=True) == draw(poisoned=False)


def test_weights_of_the_decoders_dtype_are_not_copied_and_copies_of_the_rest_are_planned() -> None:
    params = params_of(CONFIG)
    own, copied = (Decoder(CONFIG, params, 1, 8, dtype=dtype) for dtype in (None, torch.float32))
    assert "frozen" not in own.plan.arenas and own._step.model.params["wte.weight"].value is params["wte.weight"]
    nbytes = sum(x.numel() for x in params.values()) * 4
    assert nbytes <= copied.plan.arenas["frozen"].arena_bytes < nbytes + 64 * len(params)
    assert copied._step.model.params["wte.weight"].value.dtype == torch.float32


def test_weights_with_other_strides_are_copied() -> None:
    params = params_of(CONFIG)
    strided = {name: x.t().contiguous().t() if x.ndim == 2 else x for name, x in params.items()}
    drawn = []
    for given in (params, strided):
        decoder = Decoder(CONFIG, given, 1, 8)
        decoder.prefill({0: Prompt([1, 2, 3], sampling=GREEDY)})
        decoder.submit()
        drawn.append(decoder.finished(wait=True))
        assert ("frozen" in decoder.plan.arenas) is (given is strided)
    assert drawn[0] == drawn[1]


def test_logits_that_are_not_finite_draw_no_token_and_end_no_step() -> None:
    params = params_of(CONFIG)
    params["ln_f.weight"].fill_(torch.nan)
    decoder = Decoder(CONFIG, params, 1, 8)
    decoder.prefill({0: Prompt([1])})
    for _ in range(2):
        decoder.submit()
    assert [drawn.tokens for drawn in decoder.finished(wait=True)] == [[-1]] * 3


def test_a_slot_forgets_the_tokens_of_its_last_sequence() -> None:
    """Otherwise the repetition penalty would still count them."""
    params, penalty = params_of(CONFIG), Sampling(temperature=0.0, repetition_penalty=50.0)
    drawn = []
    for first in ([3], list(range(12))):
        decoder = Decoder(CONFIG, params, 1, 16, penalties=True)
        decoder.prefill({0: Prompt(first, sampling=penalty)})
        decoder.finished(wait=True)
        decoder.prefill({0: Prompt([3], sampling=penalty)})
        for _ in range(8):
            decoder.submit()
        drawn.append([each.tokens for each in decoder.finished(wait=True)])
    assert drawn[0] == drawn[1] and len({token for (token,) in drawn[0]}) > 5  # few tokens occur twice


def test_a_scorer_has_the_log_probabilities_of_the_reference_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a scorer adapters have no dropout, and the logits of only a few rows exist at a time."""
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", 3 * LLAMA.vocab_size * 8)
    lora = LoraConfig(rank=2, alpha=4, dropout=0.5)
    params = params_of(LLAMA, lora)
    spec = StepSpec(LLAMA, 2, 8, torch.float64, torch.device("cpu"), lora=lora)
    tokens = torch.randint(0, LLAMA.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[1, 3] = -1
    got = Scorer(spec, params).logprobs(tokens, targets)
    n = reference.hidden_states(params, tokens, LLAMA, lora)
    exact = torch.log_softmax(reference.logits_of(params, n.flatten(0, 1), LLAMA), -1).view(2, 8, -1)
    want = exact.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets < 0, 0.0)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)


def test_a_failed_prefill_stops_only_its_own_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of(CONFIG)
    decoder = Decoder(CONFIG, params, batch_size=3, capacity=16, prefill_tokens=16)
    texts = {0: [1, 2, 3], 1: [5] * 12}
    run = decoder._run_prefill

    def fail(decoding: Decoding) -> None:
        if decoding.model.tokens.numel() == 16:
            raise MemoryError("no memory")
        run(decoding)

    monkeypatch.setattr(decoder, "_run_prefill", fail)
    decoder.prefill({1: Prompt([4, 4], sampling=GREEDY)})
    groups = {0: Prompt(texts[0], sampling=GREEDY), 1: Prompt([5] * 16, sampling=GREEDY)}
    with pytest.raises(MemoryError, match="no memory"):
        decoder.prefill(groups)
    decoder.submit()
    drawn = decoder.finished(wait=True)
    assert [each.slots for each in drawn] == [(1,), (0,), (0,)]
    check(CONFIG, params, texts[0], [(each.tokens[0], each.logprobs[0]) for each in drawn[1:]])
    decoder.prefill({1: Prompt(texts[1], sampling=GREEDY)})
    decoder.submit()
    after = decoder.finished(wait=True)
    assert [each.slots for each in after] == [(1,), (0, 1)]
    check(CONFIG, params, texts[1], [(each.tokens[-1], each.logprobs[-1]) for each in after])


def test_the_number_of_cached_programs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "MOST_SHAPES", 2)
    params = params_of(CONFIG)
    scorer = Scorer(StepSpec(CONFIG, 1, 8, torch.float64, torch.device("cpu")), params)
    decoder = Decoder(CONFIG, params, batch_size=1, capacity=8)
    first: dict[int, float] = {}
    for t in (2, 3, 4, 5, 2, 3):
        tokens = torch.arange(t)[None]
        assert first.setdefault(t, scorer.loss(tokens, tokens)) == scorer.loss(tokens, tokens)
        scorer.logprobs(tokens, tokens)
        decoder.prefill({0: Prompt(tokens[0].tolist(), sampling=GREEDY)})
    assert [*scorer._bound] == [(1, 2), (1, 3)] and [*decoder._prefills] == [2, 3]


def test_bad_arguments_of_a_decoder_are_refused() -> None:
    params = params_of(CONFIG)
    decoder = Decoder(CONFIG, params, batch_size=2, capacity=8)
    for slot, prompt, error in (
        (2, Prompt([1]), "slot: got 2; accepted: 0 … 1"),
        (0, Prompt([]), "tokens: got 0 in a prompt; accepted: 1 … capacity, 8"),
        (0, Prompt([1] * 9), "tokens: got 9 in a prompt; accepted: 1 … capacity, 8"),
        (0, Prompt([1, 31]), "tokens: got 31; accepted: 0 … 30"),
        (0, Prompt([-1]), "tokens: got -1; accepted: 0 … 30"),
        (0, Prompt([1, 2.5]), r"tokens: got \[1, 2.5\]; accepted: a sequence of ints"),  # type: ignore[list-item]
        (0, Prompt([1], sequence=1 << 63), "sequence: got 9223372036854775808; accepted: 0 … 9223372036854775807"),
        (0, Prompt([1], draws=-1), "draws: got -1; accepted: 0 … 4294967295"),
        (0, Prompt([1], sampling=Sampling(repetition_penalty=1.5)), r"Decoder\(penalties=True\)"),
    ):
        with pytest.raises(ValueError, match=error):
            decoder.prefill({slot: prompt})
    decoder.prefill({0: Prompt([1] * 7), 1: Prompt([1])})
    decoder.submit()
    with pytest.raises(ValueError, match="slot 0: got 8 tokens, which fill its cache"):
        decoder.submit()
    decoder.stop([0])
    decoder.submit()
    assert [drawn.slots for drawn in decoder.finished(wait=True)] == [(0, 1), (0, 1), (1,)]
    for arguments, error in (
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"capacity": 17}, "capacity: got 17; accepted: at most block_size, 16"),
        ({"prefill_tokens": 7}, "prefill_tokens: got 7; accepted: at least capacity, 8"),
        ({"dtype": torch.float16}, "dtype: got torch.float16"),
        ({"device": "xpu"}, "device: got 'xpu'"),
        ({"params": {**params, "wpe.weight": params["wpe.weight"][:3]}}, r"params: got \(3, 16\) for wpe.weight"),
        ({"params": {"wte.weight": params["wte.weight"]}}, "params: got none for wpe.weight"),
    ):
        with pytest.raises(ValueError, match=error):
            Decoder(**({"config": CONFIG, "params": params, "batch_size": 2, "capacity": 8} | arguments))  # type: ignore


def test_the_error_for_a_batch_that_does_not_fit_names_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = decoder_spec(CONFIG, 8, 16, device="cpu", dtype=torch.float32)
    limit = plan_decoder(replace(spec, batch_size=5, prefill_tokens=spec.prefill_tokens)).peak_bytes
    assert largest_batch(spec, limit)[0]["largest_batch_size"] == 5
    params = {name: x.float() for name, x in params_of(CONFIG).items()}
    monkeypatch.setattr("tilegrad.engine.machine.memory_limit", lambda _device: limit // 4)
    monkeypatch.setattr(decoder_module, "memory_limit", lambda _device: limit // 4)
    with pytest.raises(ValueError, match=r"memory: got a plan of .* (the largest batch that fits is|no batch fits)"):
        Decoder(CONFIG, params, batch_size=64, capacity=16)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_restored")
def test_a_changed_number_of_threads_is_refused() -> None:
    decoder = Decoder(CONFIG, params_of(CONFIG), batch_size=1, capacity=8)
    torch.set_num_threads(torch.get_num_threads() + 1)
    with pytest.raises(RuntimeError, match="threads: got"):
        decoder.prefill({0: Prompt([1])})
