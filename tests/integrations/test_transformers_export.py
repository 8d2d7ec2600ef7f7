"""torch.export takes transformers' models with attn_implementation="tilegrad", for any T and for a static cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.export import Dim, export
from torch.utils import _pytree

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")

from support.architectures import batch_of, model_of  # noqa: E402

from tilegrad import Mask  # noqa: E402
from tilegrad.integrations.transformers import Attends, attention_forward, mask, register  # noqa: E402
from tilegrad.kernels.attention.checks import check_options  # noqa: E402
from tilegrad.kernels.attention.problem import FEW_ROWS  # noqa: E402

register()
LOGITS = 5e-6  # float32, relative
pytestmark = pytest.mark.filterwarnings(  # torch and transformers load each other's while they export
    "ignore:.*torch.jit.script. is deprecated:DeprecationWarning"
)


def whole(name: str, padding: str | None, b: int, t: int) -> dict[str, Any]:
    batch = batch_of(name, padding, b, t)
    return {x: batch[x] for x in batch if x != "labels"}


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("mistral, window", "left"),
        pytest.param("mistral, window", None, marks=pytest.mark.slow),
        pytest.param("llama", "right", marks=pytest.mark.slow),
        pytest.param("gemma2, softcap", None, marks=pytest.mark.slow),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_an_exported_model_takes_any_batch_and_length(name: str, padding: str | None) -> None:
    layers = {"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}
    model, eager = (model_of(name, implementation, **layers) for implementation in ("tilegrad", "eager"))
    example = whole(name, padding, 3, 23)
    shapes = {x: {0: Dim.AUTO, 1: Dim.AUTO} for x in example} | {"use_cache": None}
    exported = export(model, (), {**example, "use_cache": False}, dynamic_shapes=shapes, strict=False).module()
    for b, t in ((3, 23), (2, 41), (2, 9)):
        batch = whole(name, padding, b, t)
        got, want = exported(**batch, use_cache=False).logits, eager(**batch).logits
        keep = batch.get("attention_mask", torch.ones(b, t)).bool()
        assert float((got - want)[keep].abs().max()) < LOGITS * float(want.abs().max()), (b, t)


@torch.no_grad()
def test_an_exported_layer_with_a_bool_mask_takes_any_length() -> None:
    """Few rows too, for which an eager call does not compute intervals."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            return attention_forward(self, x, x, x, Attends(bias=mask))[0]

    def given(t: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, 4, t, 8), torch.ones(2, 1, t, t, dtype=torch.bool).tril()

    shapes = ({2: Dim.AUTO}, {2: Dim.AUTO, 3: Dim.AUTO})
    for example in (FEW_ROWS, FEW_ROWS + 1):
        exported = export(Layer(), given(example), dynamic_shapes=shapes, strict=False).module()
        for t in (5, FEW_ROWS, FEW_ROWS + 1, 40):
            x, mask = given(t)
            torch.testing.assert_close(exported(x, mask), Layer()(x, mask))


def calls_of_generate(model: Any, t: int, columns: int) -> list[dict[str, Any]]:
    """The arguments of the model's forward in the prefill and in the first step of generation with a static cache."""
    calls: list[dict[str, Any]] = []

    def keep(_: Any, __: Any, given: dict[str, Any]) -> None:
        kept = ("input_ids", "attention_mask", "position_ids", "past_key_values")
        calls.append({name: copy.deepcopy(given[name]) for name in kept if given.get(name) is not None})

    hook = model.register_forward_pre_hook(keep, with_kwargs=True)
    batch = whole("llama", None, 2, t)
    options: dict[str, Any] = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "disable_compile": True}
    config = transformers.GenerationConfig(
        cache_implementation="static", max_cache_len=columns, pad_token_id=0, **options
    )
    model.generate(**batch, attention_mask=torch.ones_like(batch["input_ids"]), generation_config=config)
    hook.remove()
    return calls


def exported_by_transformers(model: Any, given: dict[str, Any]) -> Any:
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

    return DynamoExporter().export(model, copy.deepcopy(given), DynamoConfig(dynamic=True)).module()


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral, window", marks=pytest.mark.slow)])
def test_generation_with_a_static_cache_is_exported(name: str) -> None:
    """The prefill is exported at one length and runs at another. The mask of a step is a tensor, as the cache is static."""
    pytest.importorskip("transformers.exporters", reason="transformers has its exporter from 5.16 on")
    model = model_of(name, "tilegrad", num_hidden_layers=1)
    prefill, step = calls_of_generate(model, 7, 32)
    assert isinstance(prefill["attention_mask"], Attends)
    assert name != "llama" or isinstance(step["attention_mask"], torch.Tensor)
    with torch.no_grad():
        for given, others in ((prefill, calls_of_generate(model, 12, 32)[0]), (step, step)):
            exported = exported_by_transformers(model, given)
            for batch in (given, others):
                want = model(**copy.deepcopy(batch)).logits
                assert torch.equal(exported(**copy.deepcopy(batch)).logits, want)


def test_an_attends_is_a_pytree_of_its_tensors() -> None:
    ends, bias = torch.tensor([0, 3, 5]), torch.ones(1, 1, 1, 5, dtype=torch.bool)
    for attends in (
        Attends(),
        Attends((3, 0), before=2, columns=32),
        Attends((None, 0), (ends, ends, 3, None), bias, columns=5),
    ):
        leaves, spec = _pytree.tree_flatten(attends)
        again = _pytree.tree_unflatten(leaves, _pytree.treespec_loads(_pytree.treespec_dumps(spec)))
        assert all(isinstance(x, torch.Tensor | None) for x in leaves)
        names = ("band", "runs", "bias", "before", "columns")
        assert [getattr(again, name) for name in names] == [getattr(attends, name) for name in names]


def test_a_mask_of_a_cache_whose_length_is_on_the_device_is_a_tensor() -> None:
    """For torch.export and torch.compile the mask is an input of the model, as with sdpa."""
    made = mask(2, 1, 12, torch.tensor(5), attention_mask=None)
    assert isinstance(made, torch.Tensor) and made.shape == (2, 1, 1, 12) and int(made.sum()) == 2 * 6
    q, kv = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 12, 8)
    got, want = (attention_forward(None, q, x, x, given)[0] for x, given in ((kv, made), (kv[:, :, :6], Attends())))
    torch.testing.assert_close(got, want)


def test_a_max_seqlen_that_is_not_a_count_is_refused() -> None:
    q, ends = torch.zeros(5, 1, 8), torch.zeros(2, dtype=torch.int32)
    for longest in (5.0, True, -1):
        with pytest.raises(ValueError, match="max_seqlen_q: got"):
            check_options(q, q, q, Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest))  # type: ignore[arg-type]


def test_output_attentions_warns_and_gives_none(capsys: pytest.CaptureFixture[str]) -> None:
    """So does sdpa."""
    from transformers.utils import logging

    logging.get_logger("tilegrad.integrations.transformers").warning_once.cache_clear()
    model = model_of("llama", "tilegrad", num_hidden_layers=2)
    tokens = torch.tensor([[3, 4, 5]])
    output = model(tokens, output_attentions=True)
    assert not any(x is not None for x in output.attentions or ())
    assert torch.equal(output.logits, model(tokens).logits)
    assert capsys.readouterr().err.count("output_attentions: got True; accepted: False, because probabilities") == 1
