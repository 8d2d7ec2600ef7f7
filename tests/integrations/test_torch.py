"""torch's scaled_dot_product_attention runs tilegrad, and tilegrad.nn.Attention equals MultiheadAttention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegrad import masks as interval_masks
from tilegrad.integrations import torch as integration
from tilegrad.memory import AttentionBufferManager as Manager
from tilegrad.nn import Attention

D = torch.float64
needs_registry = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "activate_flash_attention_impl"), reason="torch is older than its registry of flash"
)


@pytest.fixture
def active() -> Iterator[None]:
    integration.register()
    torch.nn.attention.activate_flash_attention_impl("tilegrad")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def sdpa(tq: int, tk: int, heads: int, kv: int, causal: bool, mask: str | None) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((tq, heads), (tk, kv), (tk, kv))
    q, k, v = (torch.randn(2, t, h, 16, dtype=D, generator=draw).transpose(1, 2).requires_grad_() for t, h in sizes)
    drawn = torch.randn(2, 1, tq, tk, dtype=D, generator=draw)
    m = {None: None, "bool": drawn > -0.5, "float": drawn}[mask]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=causal, enable_gqa=heads != kv)
    return o, *torch.autograd.grad((o * o.detach().sin()).sum(), [q, k, v])


@needs_registry
@pytest.mark.usefixtures("active")
@pytest.mark.parametrize(
    "form",
    [
        (37, 37, 4, 4, True, None), (20, 37, 4, 4, True, None), (37, 20, 4, 4, True, None), (37, 37, 4, 4, False, "bool"),
        (37, 37, 4, 4, False, "float"), (9, 9, 4, 2, True, None),
    ],
    ids=str,
)  # fmt: skip
def test_sdpa_runs_tilegrad_and_agrees(form: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = integration._forward

    def spy(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ran.append("forward")
        return run(*arguments, **options)

    monkeypatch.setattr(integration, "_forward", spy)
    got = sdpa(*form)
    assert ran
    torch.nn.attention.restore_flash_attention_impl()
    ran.clear()
    with sdpa_kernel(SDPBackend.MATH):
        want = sdpa(*form)
    sdpa(*form)
    assert not ran, "restored"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@needs_registry
@pytest.mark.usefixtures("active")
def test_multihead_attention_and_torch_compile_run_tilegrad() -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32, requires_grad=True)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    f(q).backward()
    assert x.grad is not None and q.grad is not None


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(9) >= torch.tensor([[9], [5]])},
    "bool": {"attn_mask": torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) > 0.7},
    "float": {"attn_mask": torch.randn(7, 9, dtype=D, generator=torch.Generator().manual_seed(0))},
    "each head's": {"attn_mask": torch.rand(8, 7, 9, generator=torch.Generator().manual_seed(0)) > 0.7},
}
MASKS["both"] = MASKS["padding"] | MASKS["bool"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_has_the_weights_and_results_of_multihead_attention(mask: str, batch_first: bool, bias: bool) -> None:
    theirs = torch.nn.MultiheadAttention(32, 4, bias=bias, batch_first=batch_first, dtype=D)
    ours = Attention(32, 4, bias=bias, batch_first=batch_first, dtype=D)
    assert ours.load_state_dict(theirs.state_dict()) and {*ours.state_dict()} == {*theirs.state_dict()}
    draw = torch.Generator().manual_seed(1)
    x, key, value = (torch.randn(2, t, 32, dtype=D, generator=draw) for t in (7, 9, 9))
    if not batch_first:
        x, key, value = (y.transpose(0, 1) for y in (x, key, value))
    if MASKS[mask]:
        masks = {n: m.clone() for n, m in MASKS[mask].items()}
        for m in masks.values():
            if m.dtype == torch.bool:
                m[..., 0] = False  # a row that attends to nothing is NaN there
    else:
        masks = {}
    if mask == "both":
        masks["key_padding_mask"] = masks["key_padding_mask"].clone()
    got, want = ours(x, key, value, **masks), theirs(x, key, value, need_weights=False, **masks)
    assert got[1] is None
    torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-12)
    got[0].sin().sum().backward()
    want[0].sin().sum().backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11, msg=name)


def layers(norm_first: bool, batch_first: bool, heads: int = 4) -> tuple[Any, Any]:
    """torch's encoder layer, and a copy of it with tilegrad.nn.Attention."""
    torch.manual_seed(0)
    form: dict[str, Any] = {"batch_first": batch_first, "dtype": D}
    theirs = torch.nn.TransformerEncoderLayer(32, heads, 48, dropout=0.0, norm_first=norm_first, **form)
    torch.nn.init.normal_(theirs.self_attn.in_proj_bias)
    return theirs, with_ours(copy.deepcopy(theirs), batch_first)


def with_ours(module: Any, batch_first: bool = True) -> Any:  # noqa: FBT002
    for layer in module.modules():
        for name, theirs in list(layer.named_children()):
            if isinstance(theirs, torch.nn.MultiheadAttention):
                ours = Attention(32, theirs.num_heads, theirs.dropout, batch_first=batch_first, dtype=D)
                ours.load_state_dict(theirs.state_dict())
                setattr(layer, name, ours.train(theirs.training))
    return module


SELF_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"src_key_padding_mask": torch.arange(9) >= torch.tensor([[9], [5]])},
    "bool": {"src_mask": torch.ones(9, 9, dtype=torch.bool).triu(3)},
    "float": {"src_mask": torch.randn(9, 9, dtype=D, generator=torch.Generator().manual_seed(0))},
    "each head's": {"src_mask": torch.randn(8, 9, 9, dtype=D, generator=torch.Generator().manual_seed(0))},
    "causal": {"src_mask": torch.ones(9, 9, dtype=torch.bool).triu(1), "is_causal": True},
}
SELF_MASKS["both"] = SELF_MASKS["padding"] | SELF_MASKS["bool"]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_computes_the_same_in_train_and_in_eval(norm_first: bool, batch_first: bool) -> None:
    theirs, ours = layers(norm_first, batch_first)
    x = torch.randn(2, 9, 32, dtype=D, generator=torch.Generator().manual_seed(1))
    x = x if batch_first else x.transpose(0, 1)
    for training in (True, False):
        theirs.train(training), ours.train(training)
        for name, masks in SELF_MASKS.items():
            got, want = ours(x, **masks), theirs(x, **masks)
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11, msg=name)
            pairs = ((ours, got), (theirs, want))
            gradients = [torch.autograd.grad(y.sin().sum(), [*layer.parameters()]) for layer, y in pairs]
            torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10, msg=name)
            with torch.no_grad():  # in eval torch's layer is fused, and reads every number of a mask as −inf
                alone, fused = ours(x, **masks), theirs(x, **masks)
            torch.testing.assert_close(alone, want, rtol=1e-10, atol=1e-11, msg=name)
            if name not in ("float", "each head's"):
                torch.testing.assert_close(alone, fused, rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("built", ["of our layers", "and then given our attention"])
def test_encoders_and_decoders_have_the_results_of_torch(built: str, norm_first: bool) -> None:
    """An encoder of torch's layers skips padding by nested tensors; an encoder of our layers has values there."""
    theirs, ours = layers(norm_first, batch_first=True)
    whole = torch.nn.TransformerEncoder(theirs, 2).eval()
    mine = torch.nn.TransformerEncoder(ours, 2) if built == "of our layers" else with_ours(copy.deepcopy(whole))
    x = torch.randn(2, 9, 32, dtype=D, generator=torch.Generator().manual_seed(1))
    padding = SELF_MASKS["padding"]["src_key_padding_mask"]
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded):
            got, want = (model.eval()(x, src_key_padding_mask=padding) for model in (mine, whole))
            torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-10, atol=1e-11)
            got, want = (model(x, mask=SELF_MASKS["bool"]["src_mask"]) for model in (mine, whole))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    decoder = torch.nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True, norm_first=norm_first, dtype=D).eval()
    target = torch.randn(2, 5, 32, dtype=D, generator=torch.Generator().manual_seed(2))
    masks: dict[str, Any] = {"memory_key_padding_mask": padding, "tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)}
    want = decoder(target, x, tgt_is_causal=True, **masks)
    got = with_ours(decoder)(target, x, tgt_is_causal=True, **masks)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_has_the_results_of_single_sequences() -> None:
    options: dict[str, Any] = {"num_kv_heads": 2, "window": 3, "rope_theta": 100.0, "dtype": D}
    layer = Attention(32, 4, batch_first=True, **options)
    parts = [torch.randn(n, 32, dtype=D, requires_grad=True) for n in (5, 1, 9)]
    for causal in (False, True):
        nested = torch.nested.as_nested_tensor(parts)
        got, _ = layer(nested, nested, nested, is_causal=causal)
        want = [layer(part, is_causal=causal)[0] for part in parts]
        for a, b in zip(got.unbind(), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        results = [
            torch.autograd.grad(sum(y.sin().sum() for y in of), [*parts, *layer.parameters()])
            for of in (got.unbind(), want)
        ]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)
    for case in ({"key": nested[0]}, {"key_padding_mask": torch.zeros(3, 9)}, {"cache": layer.new_cache(3, 9)}):
        with pytest.raises(
            ValueError, match="query: got a nested tensor; accepted: one strided tensor as query, key and value"
        ):
            layer(nested, **case)
    with pytest.raises(ValueError, match="key: got a nested tensor; accepted: a padded tensor"):
        layer(torch.randn(3, 9, 32, dtype=D), nested, nested)


def test_causal_attention_without_a_batch_equals_multihead_attention() -> None:
    theirs, ours = torch.nn.MultiheadAttention(32, 4, dtype=D), Attention(32, 4, dtype=D)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(7, 32, dtype=D, generator=torch.Generator().manual_seed(1))
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    for got in (ours(x, is_causal=True), ours(x, x, x, attn_mask=hidden, is_causal=True), ours(x, attn_mask=hidden)):
        torch.testing.assert_close(got[0], want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("managed", [False, True])
def test_intervals_have_the_results_of_attention(managed: bool) -> None:
    documents = interval_masks.documents([0, 3, 10])
    attended = interval_masks.from_bool(torch.block_diag(torch.ones(3, 3), torch.ones(7, 7)).bool())["intervals"]
    module = Attention(32, 4, batch_first=True, num_kv_heads=2, dtype=D, manager=Manager() if managed else None)
    x = torch.randn(2, 10, 32, dtype=D, requires_grad=True)
    for causal, intervals in ((True, documents["intervals"]), (False, attended)):
        together, _ = module(x, is_causal=causal, intervals=intervals)
        apart = torch.cat([module(part, is_causal=causal)[0] for part in x.split((3, 7), 1)], 1)
        torch.testing.assert_close(together, apart)
        both = [torch.autograd.grad(y.sin().sum(), (x, *module.parameters())) for y in (together, apart)]
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="query: got a nested tensor"):
        module(torch.nested.nested_tensor([x[0].detach()], layout=torch.jagged), intervals=attended)
    no_first = (torch.arange(10) == 0).expand(
        10, 10
    )  # with intervals, is_causal is no hint about attn_mask: both mask out
    by_mask, _ = module(x, attn_mask=no_first, is_causal=True, intervals=documents["intervals"])
    by_padding, _ = module(x, key_padding_mask=no_first[:2], is_causal=True, intervals=documents["intervals"])
    torch.testing.assert_close(by_mask, by_padding)


@pytest.mark.parametrize(
    "options", [{}, {"rope_theta": 100.0}, {"num_kv_heads": 2, "window": 4, "rope_theta": 100.0}], ids=str
)
def test_decoding_with_a_cache_equals_a_call_on_the_whole_text(options: dict[str, Any]) -> None:
    layer = Attention(32, 4, batch_first=True, dtype=D, **options).eval()
    x = torch.randn(2, 12, 32, dtype=D, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = layer(x, is_causal=True)[0]
        cache = layer.new_cache(2, 12)
        got = torch.cat([layer(part, cache=cache)[0] for part in x.split([5, 1, 1, 3, 2], 1)], 1)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
        with pytest.raises(ValueError, match="cache: got 13 tokens; accepted: at most max_tokens = 12"):
            layer(x[:, :1], cache=cache)


def test_rope_depends_on_relative_positions() -> None:
    layer = Attention(32, 4, dtype=D, rope_theta=100.0)
    q, k = torch.randn(2, 1, 4, 1, 8, dtype=D, generator=torch.Generator().manual_seed(1))
    near, far = ((layer._rotate(q, i + 3) * layer._rotate(k, i)).sum() for i in (0, 40))
    torch.testing.assert_close(near, far, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(near, (layer._rotate(q, 5) * layer._rotate(k, 0)).sum())


def test_dropout_is_active_only_in_training() -> None:
    layer, x = Attention(32, 4, dropout=0.5, batch_first=True), torch.randn(2, 12, 32)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_bad_arguments_of_attention_are_refused() -> None:
    layer, x = Attention(32, 4, batch_first=True), torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match="need_weights: got True; accepted: False"):
        layer(x, need_weights=True)
    with pytest.raises(ValueError, match="is_causal: got 3 rows, 2 keys; accepted: as many rows as keys, or a cache"):
        layer(x, x[:, :2], x[:, :2], is_causal=True)
    with pytest.raises(ValueError, match="num_heads: got embed_dim 32, num_heads 5"):
        Attention(32, 5)
    with pytest.raises(ValueError, match="num_heads 0, num_kv_heads 0; accepted: ints ≥ 1"):
        Attention(32, 0)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x[..., :8],), {}, r"query: got shape \(1, 3, 8\); accepted: \(B, T, C\).* with C = embed_dim = 32"),
        ((x, x[..., :8]), {}, r"key: got shape \(1, 3, 8\), but query is \(1, 3, 32\); accepted"),
        ((x, x, x[0]), {}, r"value: got shape \(3, 32\), but query is \(1, 3, 32\); accepted"),
        ((x[None],), {}, r"query: got shape \(1, 1, 3, 32\); accepted"),
        ((x[0, 0],), {}, r"query: got shape \(32,\); accepted"),
        (
            (x,),
            {"attn_mask": torch.zeros(2, 3, 3)},
            r"attn_mask: got shape \(2, 3, 3\); accepted: \(3, 3\) or \(4, 3, 3\)",
        ),
        ((x,), {"key_padding_mask": torch.zeros(1, 4)}, r"key_padding_mask: got shape \(1, 4\); accepted: \(1, 3\) or"),
    ]
    for inputs, options, message in cases:
        with pytest.raises(ValueError, match=message):
            layer(*inputs, **options)
    with pytest.raises(TypeError, match=r"query: got ndarray; accepted: a tensor \(torch.from_numpy"):
        layer(x.numpy())
    with pytest.raises(ValueError, match=r"accepted: \(T, B, C\) .batch_first=True for \(B, T, C\)."):
        Attention(32, 4)(x[..., :8])
