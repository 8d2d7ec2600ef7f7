"""transformers' causal language models train by tilegrad.linear_cross_entropy and have their own loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")

from support.architectures import DECODERS, VOCABULARY, batch_of, model_of  # noqa: E402

import tilegrad  # noqa: E402
from tilegrad.integrations import transformers_loss  # noqa: E402
from tilegrad.integrations.transformers import register  # noqa: E402
from tilegrad.integrations.transformers_loss import Logits  # noqa: E402

QUICK = ("llama", "gpt2", "qwen2, bias", "gemma2, softcap")
MODELS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]


@pytest.fixture(autouse=True)
def switched_off_again() -> Iterator[None]:
    yield
    register(linear_cross_entropy=False)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of linear_cross_entropy."""
    calls: list[dict[str, Any]] = []
    run = tilegrad.linear_cross_entropy

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return run(*tensors, **options)

    monkeypatch.setattr(transformers_loss, "linear_cross_entropy", spy)
    return calls


def model_in_training(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    return model_of(name, "eager", **more).to(dtype).train()


def labels_of(tokens: Tensor) -> Tensor:
    labels = tokens.clone()
    labels[:, :3], labels[1, -2:] = -100, -100
    return labels


def trained(model: Any, **more: Any) -> tuple[Any, list[Tensor]]:
    """The output of a forward, and all gradients."""
    tokens = batch_of("llama", None)["input_ids"]
    model.zero_grad()
    output = model(input_ids=tokens, **{"labels": labels_of(tokens), **more})
    output.loss.backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(
    name: str, losses: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' loss rounds logits to float32, and this would hide all but 7 digits; here it does not."""
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.is_floating_point() else x.to(torch.float32))
    experts = any(
        word in name for word in ("gpt_oss", "mixtral", "deepseek")
    )  # torch's grouped products have no float64
    dtype, tolerance = (torch.float32, 2e-5) if experts else (torch.float64, 1e-11)
    model = model_in_training(name, dtype)
    for items in (None, 7, torch.tensor(40)):
        given = {} if items is None else {"num_items_in_batch": items}
        register(linear_cross_entropy=False)
        want, exact = trained(model, **given)
        losses.clear()
        register(linear_cross_entropy=True)
        got, gradients = trained(model, **given)
        assert len(losses) == 1 and losses[0]["reduction"] == ("mean" if items is None else "sum")
        assert isinstance(got.logits, Logits) and got.logits.shape == want.logits.shape
        largest = max(
            float(y.detach().abs().max()) for y in (want.loss, *exact)
        )  # some gradients are rounding errors of 0
        for a, b in zip((got.loss, *gradients), (want.loss, *exact), strict=True):
            torch.testing.assert_close(a.to(b.dtype), b, rtol=tolerance, atol=tolerance * largest)


def test_the_softcap_of_a_config_becomes_an_option_of_the_loss(losses: list[dict[str, Any]]) -> None:
    register(linear_cross_entropy=True)
    trained(model_in_training("gemma2, softcap", final_logit_softcapping=5.0))
    assert losses[0]["softcap"] == 5.0 and losses[0]["ignore_index"] == -100


def test_scaled_and_capped_logits_have_the_loss_of_torch() -> None:
    """Cohere, Granite and Gemma-2 scale or cap their logits in these ways."""
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (9, 4), (9,)))
    targets, full = torch.arange(6), x @ w.t() + bias
    cross_entropy = torch.nn.functional.cross_entropy
    for change in (lambda y: 3 * y / 4, lambda y: 5 * torch.tanh(y * 0.25), lambda y: (y / 5).tanh() * 5):
        got = cross_entropy(change(Logits(x, w, bias)), targets, label_smoothing=0.1)
        torch.testing.assert_close(got, cross_entropy(change(full), targets, label_smoothing=0.1), rtol=1e-12, atol=0)


def test_logits_are_computed_without_labels_and_in_evaluation(losses: list[dict[str, Any]]) -> None:
    register(linear_cross_entropy=True)
    model, tokens = model_in_training("llama"), batch_of("llama", None)["input_ids"]
    with_labels = model.eval()(input_ids=tokens, labels=tokens)
    assert isinstance(with_labels.logits, Tensor) and with_labels.logits.shape[-1] == VOCABULARY
    assert isinstance(model.train()(input_ids=tokens).logits, Tensor)
    assert not losses
    positional = model(tokens, None, None, None, None, tokens)
    assert len(losses) == 1 and torch.isfinite(positional.loss)
    loss, *_ = model(input_ids=tokens, labels=tokens, return_dict=False)
    assert torch.equal(loss, positional.loss)


def test_other_uses_of_logits_are_refused() -> None:
    register(linear_cross_entropy=True)
    output, _ = trained(model_in_training("llama"))
    for use in (
        lambda logits: logits.argmax(-1),
        lambda logits: logits[..., :5],
        lambda logits: logits.softmax(-1),
        lambda logits: torch.log_softmax(logits, -1),
        lambda logits: logits.view(-1, 3),
        lambda logits: logits * torch.ones(VOCABULARY),
        lambda logits: torch.nn.functional.cross_entropy(
            logits.view(-1, VOCABULARY), torch.zeros(1, dtype=torch.int64), weight=torch.ones(VOCABULARY)
        ),
    ):
        with pytest.raises(
            NotImplementedError, match=r"logits: .* accepted: .* register\(linear_cross_entropy=False\)"
        ):
            use(output.logits)
    rows = output.logits[:, :-1]
    assert rows.shape == (output.logits.shape[0], output.logits.shape[1] - 1, VOCABULARY)


def test_a_head_that_is_not_a_plain_linear_layer_is_refused() -> None:
    register(linear_cross_entropy=True)
    model = model_in_training("llama")
    head = model.lm_head

    class Adapted(nn.Linear):
        pass

    adapted = Adapted(head.in_features, head.out_features, bias=False).double()
    model.lm_head = adapted
    with pytest.raises(
        NotImplementedError, match=r"lm_head: .* got Adapted with a Parameter .* accepted: a torch.nn.Linear"
    ):
        trained(model)
    model.lm_head = head
    head.forward = head.forward  # as a library that offloads weights does
    with pytest.raises(NotImplementedError, match=r"lm_head: .* got Linear with a Parameter"):
        trained(model)
    del head.forward
    trained(model)
    model.get_output_embeddings = lambda: None
    with pytest.raises(NotImplementedError, match=r"lm_head: .* got NoneType in LlamaForCausalLM"):
        trained(model)


def test_a_model_class_defined_later_and_an_error_in_its_forward_are_handled(losses: list[dict[str, Any]]) -> None:
    register(linear_cross_entropy=True)

    class LaterForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[name-defined, misc]
        def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
            output = super().forward(*args, labels=labels, **kwargs)
            if output.logits.shape[0] == 1:
                raise RuntimeError("one row")
            return output

    model = LaterForCausalLM(model_of("llama", "eager").config).double().train()
    trained(model)
    assert len(losses) == 1
    tokens = batch_of("llama", None)["input_ids"][:1]
    with pytest.raises(RuntimeError, match="one row"):
        model(input_ids=tokens, labels=tokens)
    assert isinstance(model(input_ids=tokens.repeat(2, 1)).logits, Tensor)
    again = copy.deepcopy(model)
    assert again.lm_head.forward.head is again.lm_head


@pytest.mark.slow
def test_torch_compile_keeps_one_graph() -> None:
    model, tokens = model_in_training("llama", torch.float32), batch_of("llama", None)["input_ids"]
    register(linear_cross_entropy=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
    want = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(got, want)


def test_the_matrix_of_logits_is_not_allocated() -> None:
    from torch.profiler import ProfilerActivity, profile

    register(linear_cross_entropy=True)
    model, sizes = model_in_training("llama", torch.float32, vocab_size=5000), {}
    tokens = torch.arange(400).view(4, 100) % 97
    for enabled in (False, True):
        register(linear_cross_entropy=enabled)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        sizes[enabled] = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    logits = 4 * 400 * 5000
    assert (
        max(sizes[False]) >= logits and sum(size >= logits for size in sizes[True]) <= 1
    )  # the bytes of a chunk, which has room for all rows
