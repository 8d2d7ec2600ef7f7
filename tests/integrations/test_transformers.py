"""transformers with attn_implementation="tilegrad" against "eager": masks, packing, generation, compile, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")

from support.architectures import DECODER, DECODERS, MODELS, VOCABULARY, apart, batch_of, model_of, results  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening  # noqa: E402

from tilegrad import functional, masks  # noqa: E402
from tilegrad.integrations import transformers as integration  # noqa: E402
from tilegrad.integrations.transformers import Attends, _restarts, attention_forward, mask, register  # noqa: E402

register()
LOGITS, GRADIENTS = 5e-6, 1e-5  # float32, relative
QUICK = (
    "llama",
    "gpt2",
    "mistral, window",
    "gemma2, softcap",
    "gpt_oss, sinks",
    "modernbert, window",
    "t5, learned bias",
)


def quick_or_slow(names: Any) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the calls of attention, with words for their bias and intervals."""
    calls: list[str] = []

    def spy_on(name: str) -> None:
        run = getattr(functional, name)

        def spy(*arguments: Any, **options: Any) -> Any:
            bias = options.get("bias")
            calls.append(name + ("" if bias is None else f" {bias.dtype} {tuple(bias.shape)}"))
            if options.get("intervals") is not None:
                calls[-1] += f" intervals {tuple(options['intervals'].shape)}"
            return run(*arguments, **options)

        monkeypatch.setattr(functional, name, spy)

    spy_on("attention")
    spy_on("attention_varlen")
    return calls


@pytest.mark.parametrize("name", quick_or_slow(MODELS))
def test_logits_and_gradients_under_every_padding(name: str) -> None:
    for padding in (None, "right", "left", "holes"):
        batch = batch_of(name, padding)
        want, got = (results(model_of(name, implementation), batch) for implementation in ("eager", "tilegrad"))
        logits, gradients = apart(got, want)
        assert logits < LOGITS and gradients < GRADIENTS, (padding, logits, gradients)


@pytest.mark.parametrize(
    ("name", "padding", "call"),
    [
        ("llama", None, "attention"),
        ("llama", "right", "attention_varlen"),
        ("llama", "left", "attention_varlen"),
        ("llama", "holes", "attention torch.bool (3, 1, 1, 23)"),
        ("mistral, window", None, "attention"),
        ("mistral, window", "left", "attention_varlen"),
        ("bert", "right", "attention_varlen"),
        ("modernbert, window", "left", "attention_varlen"),
        ("bart, cross attention", "right", "attention_varlen"),
    ],
)
def test_each_padding_makes_the_expected_call(name: str, padding: str | None, call: str, ran: list[str]) -> None:
    results(model_of(name, "tilegrad"), batch_of(name, padding))
    others = {"attention"} if name.startswith("bart") else set()  # Bart's decoder is not padded
    assert set(ran) == {call} | others


@pytest.mark.parametrize(
    ("attends", "call"),
    [
        (lambda i, j: (j <= i) & (i // 9 == j // 9), "attention intervals (2, 1, 24, 2)"),
        (lambda i, j: i // 9 == j // 9, "attention intervals (2, 1, 24, 4)"),
        (lambda i, j: (j <= i) & (i // 2 % 2 == j % 2) | (i == j), "attention torch.bool (2, 1, 24, 24)"),
    ],
)
def test_a_bool_mask_of_the_caller_becomes_intervals_once(
    attends: Any, call: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Tensor] = []

    def spy(x: Tensor) -> masks.IntervalMask | str:
        found.append(x)
        return masks.intervals_of_bool(x)

    monkeypatch.setattr(integration, "intervals_of_bool", spy)
    attended = attends(torch.arange(24)[:, None], torch.arange(24)).repeat(2, 1, 1, 1)
    added = torch.zeros(attended.shape).masked_fill(~attended, torch.finfo(torch.float32).min)
    tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    for own in (attended, attended.clone()):
        got = model_of("llama", "tilegrad")(tokens, attention_mask=own, use_cache=False).logits
    want = model_of("llama", "eager")(tokens, attention_mask=added, use_cache=False).logits
    assert float((got - want).detach().abs().max()) < LOGITS * float(want.detach().abs().max())
    assert set(ran) == {call} and len(ran) > 2 and len(found) == 2  # a mask is read once, not in every layer


def forward_with(own: Tensor, device: str = "cpu") -> Tensor:
    """Call attention with 4 query heads and 2 kv heads."""
    q, k = torch.ones(2, 4, 24, 16, device=device), torch.ones(2, 2, 24, 16, device=device)
    return attention_forward(SimpleNamespace(is_causal=True), q, k, k, own.to(device))[0]


def test_a_bool_mask_without_values_stays_a_bias(ran: list[str]) -> None:
    own = torch.ones(2, 1, 24, 24, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert forward_with(own).shape == (2, 24, 4, 16)
    assert forward_with(own, "meta").shape == (2, 24, 4, 16)
    assert set(ran) == {"attention torch.bool (2, 1, 24, 24)"}


def test_a_bool_mask_of_each_kv_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias: got shape \(2, 2, 24, 24\)"):
        forward_with(torch.ones(2, 2, 24, 24, dtype=torch.bool))


def test_two_threads_have_their_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(1, 1, 24, 24, dtype=torch.bool), torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    q = torch.ones(1, 1, 24, 16)

    def read_by_another_thread_now() -> Tensor:
        monkeypatch.setattr(
            integration, "_read_bias", (lambda: second, second._version, masks.intervals_of_bool(second))
        )
        return first

    read = (read_by_another_thread_now, first._version, masks.intervals_of_bool(first))
    monkeypatch.setattr(integration, "_read_bias", read)
    found = integration._intervals(first, q, q)
    assert found is not None and not found["causal"]


class Largest(TorchDispatchMode):
    """The bytes of the largest storage that an op returned."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.found = max(self.found, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize(("implementation", "there"), [("tilegrad", False), ("eager", True)])
def test_no_matrix_of_t_by_t_exists(padding: str | None, implementation: str, there: bool) -> None:
    t = 1024
    config = AutoConfig.for_model("llama", **{**DECODER, "max_position_embeddings": t, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).model
    batch = batch_of("llama", padding, b=1, t=t)
    if padding:
        batch["attention_mask"][:, :99] = 0
    with Largest() as largest:
        model(batch["input_ids"], attention_mask=batch.get("attention_mask")).last_hidden_state.sum().backward()
    assert (largest.found >= t * t) is there  # bytes: not even a bool mask


@pytest.mark.parametrize("name", quick_or_slow(DECODERS))
def test_packed_sequences_have_the_results_of_single_ones(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (7, 1, 12, 3)]
    eager, model = (model_of(name, implementation) for implementation in ("eager", "tilegrad"))
    with torch.no_grad():
        want = torch.cat([eager(torch.tensor([x])).logits for x in tokens], 1)
        for lengths in (False, True):
            batch = DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)([{"input_ids": x} for x in tokens])
            batch.pop("labels")
            got = model(**batch, use_cache=False).logits
            assert float((got - want).abs().max()) < LOGITS * float(want.abs().max()), lengths


def test_gradients_of_packed_sequences_equal_those_of_single_ones() -> None:
    draw = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, VOCABULARY, (n,), generator=draw) for n in (7, 2, 12, 3)]
    eager, model = (model_of("llama", implementation) for implementation in ("eager", "tilegrad"))
    sum(eager(x[None]).logits.sin().sum() for x in tokens).backward()
    positions = torch.cat([torch.arange(len(x)) for x in tokens])[None]
    model(torch.cat(tokens)[None], position_ids=positions, use_cache=False).logits.sin().sum().backward()
    for (name, want), (_, got) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        assert float((got.grad - want.grad).norm()) < GRADIENTS * float(want.grad.norm()), name


GENERATE = ("llama", "gemma2, softcap", "gpt_oss, sinks", "gpt2", "t5, learned bias", "bart, cross attention")


@pytest.mark.parametrize("name", quick_or_slow(GENERATE))
@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}], ids=str
)
def test_generation_is_the_same_token_for_token(name: str, options: dict[str, Any]) -> None:
    got = []
    for implementation in ("eager", "tilegrad"):
        batch = batch_of(name, "left", t=13)
        batch.pop("labels")
        more = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
        got.append(model_of(name, implementation).generate(**batch, **more, **options))
    assert torch.equal(*got)


@pytest.mark.parametrize(
    ("q_length", "q_offset", "tracing", "whole"),
    [
        (1, torch.tensor(5), False, True),
        (1, torch.tensor(5), True, True),
        (3, torch.tensor(5), True, True),
        (3, torch.tensor(5), False, False),
        (1, 5, False, False),
        (3, 5, True, False),
    ],
)
def test_the_mask_is_a_tensor_where_the_position_of_a_static_cache_cannot_be_read(
    q_length: int, q_offset: int | Tensor, tracing: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A static cache has its length on the device. A prompt reads that once; a decoded token and a compiler do not."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: tracing)
    made = mask(1, q_length, 12, q_offset, attention_mask=None)
    if whole:
        assert isinstance(made, Tensor) and made.shape == (1, 1, q_length, 12)
    else:
        assert isinstance(made, Attends) and made.bias is None
        assert made.band == (None, 0) and made.before == int(q_offset) and made.columns == 12
    unknown = mask(1, 3, 12, 9, mask_function=lambda _b, _h, i, j: (i + j) % 2 == 0)
    assert isinstance(unknown, Attends) and unknown.bias is not None and unknown.bias.shape == (1, 1, 3, 12)


def test_only_positions_that_restart_are_read_as_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    q, positions = torch.zeros(1, 2, 5, 8), torch.tensor([[0, 1, 2, 0, 1]])
    runs = _restarts(positions, q)
    assert runs is not None and runs[0].tolist() == [0, 3, 5] and runs[2:] == (3, 3)
    assert _restarts(torch.arange(5)[None], q) is None
    for others in (None, positions[0], positions[..., None].expand(1, 5, 2), torch.tensor([[0, 1, 2, 0, 1, 2]])):
        assert _restarts(others, q) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert _restarts(positions, q) is None


def test_gradient_checkpointing_draws_the_same_dropout() -> None:
    grads = []
    for checkpointing in (False, True):
        model = model_of("llama", "tilegrad", attention_dropout=0.3).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model(**batch_of("llama", "right")).loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*grads)
    without = results(model_of("llama", "tilegrad").train(), batch_of("llama", "right"))
    assert not torch.equal(grads[0], without["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("padding", [None, pytest.param("left", marks=pytest.mark.slow)])
def test_torch_compile_captures_the_whole_graph(padding: str | None) -> None:
    name, batch = "mistral, window", batch_of("mistral, window", padding)
    want = results(model_of(name, "eager", num_hidden_layers=1), batch)
    model = model_of(name, "tilegrad", num_hidden_layers=1)
    got = results(model, batch, torch.compile(model, backend="aot_eager", fullgraph=True))
    logits, gradients = apart(got, want)
    assert logits < LOGITS and gradients < GRADIENTS


def test_an_unsupported_option_is_refused_by_name() -> None:
    tokens, x = torch.tensor([[3, 4, 5]]), torch.randn(1, 2, 4, 8)
    bloom = AutoConfig.for_model("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(NotImplementedError, match="computes attention itself"):
        AutoModelForCausalLM.from_config(bloom, attn_implementation="tilegrad")(tokens)
    with pytest.raises(ValueError, match="a head dimension of 1 to 512"):
        model_of("llama", "tilegrad", head_dim=520)(tokens)
    with pytest.raises(ValueError, match=r"attention_mask: got a mask for 3 columns; accepted: 4, as this layer has"):
        attention_forward(None, x, x, x, Attends(columns=3))


@pytest.mark.slow
def test_torch_compile_refuses_padding_between_tokens() -> None:
    model = model_of("llama", "tilegrad", num_hidden_layers=1)
    with pytest.raises(RuntimeError, match="padding between tokens"):
        torch.compile(model, backend="eager")(**batch_of("llama", "holes"))


def test_canary_a_lost_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.integrations import transformers as integration

    monkeypatch.setattr(integration, "_padded", lambda padding, rows: integration._packed(torch.zeros_like(padding)))  # noqa: ARG005
    with pytest.raises(AssertionError, match="left"):
        test_logits_and_gradients_under_every_padding("llama")


def test_the_code_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert names["model"].model.layers[0].self_attn.q_proj.weight.grad is not None  # type: ignore[attr-defined]


def test_positions_are_read_once_until_they_change() -> None:
    """All layers of a forward get one tensor; the lengths of its sequences are the same object."""
    from tilegrad.integrations.transformers import _restarts

    q, positions = torch.zeros(1, 2, 5, 4), torch.tensor([[0, 1, 2, 0, 1]])
    first = _restarts(positions, q)
    assert first is not None and first[0].tolist() == [0, 3, 5]
    assert _restarts(positions, q) is first
    positions[0, 2] = 0
    changed = _restarts(positions, q)
    assert changed is not None and changed[0].tolist() == [0, 2, 3, 5]
    with torch.inference_mode():  # changes of such a tensor are not counted
        unwatched = torch.tensor([[0, 1, 2, 0, 1]])
        before = _restarts(unwatched, q)
        unwatched[0, 2] = 0
        after = _restarts(unwatched, q)
    assert before is not None and after is not None and before[0].tolist() != after[0].tolist()


def test_without_a_mask_a_module_is_causal_by_default() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    causal, whole = (functional.attention(q, k, v, causal=side).transpose(1, 2) for side in (True, False))
    assert not torch.equal(causal, whole)
    for module, given, want in (
        (SimpleNamespace(), None, causal),
        (SimpleNamespace(is_causal=True), None, causal),
        (SimpleNamespace(is_causal=False), None, whole),
        (SimpleNamespace(is_causal=True), False, whole),
    ):
        assert torch.equal(attention_forward(module, q, k, v, None, is_causal=given)[0], want)
