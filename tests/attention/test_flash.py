"""flash-attn's functions compute what its documentation says, compared with whole matrices in float64."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilegrad
from tilegrad.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed + sum(shape)))


def whole(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1), softcap: float = 0.0, slopes: Any = None
) -> Tensor:  # fmt: skip
    return whole_with_lse(q, k, v, causal=causal, window_size=window, softcap=softcap, slopes=slopes)[0]


def whole_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, slopes: Any = None, softmax_scale: float | None = None, deterministic: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence, in the documentation's words: row i attends to keys i + Tk − Tq − left to i + Tk − Tq + right."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * (s / softcap).tanh()
    gap = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
    if slopes is not None:
        s = s - slopes[:, None, None] * gap.abs()
    left, right = window_size
    out = torch.zeros_like(gap, dtype=torch.bool)
    if left >= 0:
        out |= gap > left
    if right >= 0:
        out |= gap < -right
    if causal:
        out |= gap < 0
    none, s = out.all(1), s.masked_fill(out, -torch.inf)
    p = torch.where(none[:, None], 0.0, torch.where(none[:, None], 0.0, s).softmax(-1))
    lse = torch.where(none, -torch.inf, torch.where(none[:, None], 0.0, s).logsumexp(-1))
    return torch.einsum("hij,jhd->ihd", p, v), lse


@pytest.mark.parametrize("tq", [5, 9, 13])
@pytest.mark.parametrize(
    ("causal", "window", "softcap", "alibi"),
    [(False, (-1, -1), 0.0, False), (True, (-1, -1), 0.0, True), (True, (3, -1), 2.0, False),
     (False, (2, 1), 0.0, True), (False, (-1, 2), 0.0, False)],
)  # fmt: skip
def test_flash_attn_func_equals_whole_matrices(
    tq: int, causal: bool, window: tuple[int, int], softcap: float, alibi: bool
) -> None:
    q, k, v = draw(2, tq, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8, seed=1)
    slopes = draw(2, 4).abs() if alibi else None
    got = flash_attn_func(q, k, v, 0.0, None, causal, window, softcap, slopes)
    for b in range(2):
        want = whole(q[b], k[b], v[b], causal, window, softcap, None if slopes is None else slopes[b])
        torch.testing.assert_close(got[b], want, rtol=1e-12, atol=1e-12)


def test_qkvpacked_equals_whole_matrices() -> None:
    qkv = draw(2, 7, 3, 4, 8).requires_grad_()
    o, lse, probs = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    assert o.shape == (2, 7, 4, 8) and lse.shape == (2, 4, 7) and probs is None and o.is_contiguous()
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv.unbind(2))
    want = torch.stack([whole(q[b], k[b], v[b], causal=True) for b in range(2)])
    grads = torch.autograd.grad(want.sin().sum(), (q, k, v))
    (got,) = torch.autograd.grad(o.sin().sum(), qkv)
    torch.testing.assert_close(got, torch.stack(grads, 2), rtol=1e-11, atol=1e-12)


def test_varlen_is_a_call_for_each_sequence() -> None:
    q, k, v = draw(12, 4, 8), draw(16, 2, 8), draw(16, 2, 8, seed=1)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 12], [0, 9, 10, 16]))
    o, lse, _ = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 7, 9, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 12)
    for b in (0, 2):
        i, j = (slice(int(e[b]), int(e[b + 1])) for e in (ends_q, ends_k))
        torch.testing.assert_close(o[i], whole(q[i], k[j], v[j], causal=True), rtol=1e-12, atol=1e-12)


ENDS_Q, ENDS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 12], [0, 9, 10, 16]))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.3, "window_size": (3, -1), "deterministic": True},
    {"softcap": 2.0, "window_size": (2, 1), "alibi": True},
    {"causal": True, "alibi": True, "softcap": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["kvpacked", "qkvpacked", "varlen_kvpacked", "varlen_qkvpacked"])
def test_packed_functions_equal_whole_matrices(form: str, options: dict[str, Any]) -> None:
    """o, lse and every gradient are those of whole matrices in float64, sequence by sequence."""
    varlen, both = form.startswith("varlen"), form.endswith("_kvpacked") or form == "kvpacked"
    rows = (12,) if varlen and both else (16,) if varlen else (2, 7) if both else (2, 9)
    columns = (16,) if varlen else (2, 9)
    heads = 2 if both else 4
    packed = draw(*columns, 2 if both else 3, heads, 8).requires_grad_()
    inputs = [draw(*rows, 4, 8).requires_grad_(), packed] if both else [packed]
    options = dict(options)
    slopes = draw(3 if varlen else 2, 4).abs() if options.pop("alibi", False) else None
    ends: tuple[Any, ...] = () if not varlen else (ENDS_Q, ENDS_K, 7, 9) if both else (ENDS_K, 9)
    call = getattr(tilegrad.flash, f"flash_attn_{form}_func")
    o, lse, none = call(*inputs, *ends, alibi_slopes=slopes, return_attn_probs=True, **options)
    assert none is None and torch.equal(call(*inputs, *ends, alibi_slopes=slopes, **options), o)
    q, k, v = [inputs[0], *packed.unbind(-3)] if both else packed.unbind(-3)
    cuts = [(slice(None),) * 2] * 2 if not varlen else [
        tuple(slice(int(e[b]), int(e[b + 1])) for e in (ENDS_Q if both else ENDS_K, ENDS_K)) for b in range(3)
    ]  # fmt: skip
    wants, lses = [], []
    for b, (i, j) in enumerate(cuts):
        one = [x[s] if varlen else x[b] for x, s in ((q, i), (k, j), (v, j))]
        slope = None if slopes is None else slopes[b]
        want, norm = whole_with_lse(*one, slopes=slope, **options)
        wants.append(want)
        lses.append(norm)
    want, norm = (torch.cat(wants), torch.cat(lses, 1)) if varlen else (torch.stack(wants), torch.stack(lses))
    torch.testing.assert_close(o, want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, norm, rtol=1e-11, atol=1e-12)
    seen = lse.isfinite()
    results = [torch.autograd.grad(x.sin().sum() + y[seen].cos().sum(), inputs) for x, y in ((o, lse), (want, norm))]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("form", ["kvpacked", "qkvpacked", "varlen_kvpacked", "varlen_qkvpacked"])
def test_packed_functions_drop_the_same_pairs_as_unpacked_ones(form: str) -> None:
    varlen, both = form.startswith("varlen"), form.endswith("_kvpacked") or form == "kvpacked"
    packed = draw(*((16,) if varlen else (2, 9)), 2 if both else 3, 4, 8)
    inputs = [packed[..., 0, :, :] + 1, packed] if both else [packed]
    q, k, v = [inputs[0], *packed.unbind(-3)] if both else packed.unbind(-3)
    ends: tuple[Any, ...] = () if not varlen else (ENDS_K, 9)
    twice: tuple[Any, ...] = (ENDS_K, ENDS_K, 9, 9) if varlen else ()
    plain: Any = flash_attn_varlen_func if varlen else flash_attn_func
    torch.manual_seed(0)
    got = getattr(tilegrad.flash, f"flash_attn_{form}_func")(*inputs, *(twice if both else ends), 0.3, causal=True)
    torch.manual_seed(0)
    assert torch.equal(got, plain(q, k, v, *twice, 0.3, causal=True)) and not torch.equal(got, plain(q, k, v, *twice))


@pytest.mark.parametrize(
    "window",
    [[3, 1], np.array([3, 1]), (np.int64(3), np.int8(1)), torch.tensor([3, 1]), (torch.tensor(3), 1), iter((3, 1))],
)
def test_a_window_is_two_numbers_of_any_integer_type(window: Any) -> None:
    q, k, v = draw(2, 5, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8, seed=1)
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, window_size=(3, 1)))


def test_the_longest_length_is_of_any_integer_type() -> None:
    qkv = draw(16, 3, 4, 8)
    want = flash_attn_varlen_qkvpacked_func(qkv, ENDS_K, 9)
    for longest in (np.int64(9), torch.tensor(9), ENDS_K.diff().max()):
        assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, ENDS_K, longest), want)


@pytest.mark.slow
def test_the_functions_compile_as_one_graph() -> None:
    q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 2, 8, requires_grad=True)
    call = torch.compile(
        lambda: flash_attn_kvpacked_func(q, kv, causal=True, window_size=(3, -1)), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(call(), flash_attn_kvpacked_func(q, kv, causal=True, window_size=(3, -1)))


@pytest.mark.parametrize("new", [True, False])
def test_decoding_over_caches_of_different_lengths_equals_whole_matrices(new: bool) -> None:
    k_cache, v_cache = draw(3, 32, 2, 8), draw(3, 32, 2, 8, seed=1)
    lengths = torch.tensor([5, 4, 17], dtype=torch.int32)
    q, k, v = draw(3, 4, 4, 8), draw(3, 4, 2, 8), draw(3, 4, 2, 8, seed=1)
    slopes = draw(3, 4).abs()
    keys, values = k_cache.clone(), v_cache.clone()
    more = (k, v) if new else (None, None)
    o, lse = flash_attn_with_kvcache(
        q, keys, values, more[0], more[1], cache_seqlens=lengths, causal=True, window_size=(6, -1), alibi_slopes=slopes,
        return_softmax_lse=True,
    )  # fmt: skip
    assert o.shape == (3, 4, 4, 8) and lse.shape == (3, 4, 4)
    for b, n in enumerate(lengths.tolist()):
        held = [torch.cat([old[b, :n], x[b]]) if new else old[b, :n] for old, x in ((k_cache, k), (v_cache, v))]
        want = whole(q[b], held[0], held[1], causal=True, window=(6, -1), slopes=slopes[b])
        torch.testing.assert_close(o[b], want, rtol=1e-12, atol=1e-12)
        written = len(held[0])
        assert torch.equal(keys[b, :written], held[0]) and torch.equal(keys[b, written:], k_cache[b, written:])
        assert torch.equal(values[b, :written], held[1])


def test_cache_seqlens_may_be_absent_or_one_int() -> None:
    q, k, v = draw(2, 1, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8, seed=1)
    full, seven = flash_attn_with_kvcache(q, k, v), flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    for b in range(2):
        torch.testing.assert_close(full[b], whole(q[b], k[b], v[b], causal=False), rtol=1e-12, atol=1e-12)
        short = whole(q[b], k[b, :7], v[b, :7], causal=False)
        torch.testing.assert_close(seven[b], short, rtol=1e-12, atol=1e-12)


def test_dropout_p_is_the_share_of_dropped_pairs() -> None:
    q, k = draw(1, 64, 1, 8), draw(1, 64, 1, 8)
    o = flash_attn_func(q, k, torch.eye(64, dtype=D)[None, :, None], 0.25)
    assert 0.2 < float((o == 0).double().mean()) < 0.3


def test_argument_names_are_those_of_flash_attn() -> None:
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap",
              "alibi_slopes", "deterministic", "return_attn_probs"]  # fmt: skip
    assert list(inspect.signature(flash_attn_func).parameters) == ["q", "k", "v", *common]
    assert list(inspect.signature(flash_attn_qkvpacked_func).parameters) == ["qkv", *common]
    packed = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(inspect.signature(flash_attn_kvpacked_func).parameters) == ["q", "kv", *common]
    assert list(inspect.signature(flash_attn_varlen_kvpacked_func).parameters) == ["q", "kv", *packed, *common]
    own = ["qkv", "cu_seqlens", "max_seqlen"]
    assert list(inspect.signature(flash_attn_varlen_qkvpacked_func).parameters) == [*own, *common]
    assert list(inspect.signature(flash_attn_varlen_func).parameters) == [
        "q",
        "k",
        "v",
        *packed,
        *common,
        "block_table",
    ]


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table"])
def test_an_unsupported_argument_is_named(name: str) -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(NotImplementedError, match=f"{name}: got a tensor; accepted: None"):
        flash_attn_with_kvcache(q, q, q, **{name: torch.zeros(1)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got only k; accepted: both, or neither"):
        flash_attn_with_kvcache(q, q, q, q)
    with pytest.raises(ValueError, match=r"qkv: got shape \(1, 1, 1, 8\); accepted: \(B, T, 3, H, D\)"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"kv: got shape \(1, 1, 3, 1, 8\); accepted: \(B, Tk, 2, Hkv, D\)"):
        flash_attn_kvpacked_func(q, torch.zeros(1, 1, 3, 1, 8))
    with pytest.raises(ValueError, match=r"kv: got shape \(1, 1, 2, 1, 8\); accepted: \(total_k, 2, Hkv, D\)"):
        flash_attn_varlen_kvpacked_func(q, torch.zeros(1, 1, 2, 1, 8), ENDS_K, ENDS_K, 9, 9)
    for sides in (3, (1, 2, 3), ()):
        with pytest.raises(ValueError, match=r"window_size: got .*; accepted: a pair \(left, right\) of ints; −1"):
            flash_attn_func(q, q, q, window_size=sides)  # type: ignore[arg-type]
    for side in (1.5, None, torch.tensor(1.5)):
        with pytest.raises(TypeError, match=r"window_size: got .*; accepted: an int, also of NumPy or torch"):
            flash_attn_func(q, q, q, window_size=(side, 0))  # type: ignore[arg-type]
    array: Any = q.numpy()
    with pytest.raises(TypeError, match=r"k: got ndarray; accepted: a tensor \(torch.from_numpy"):
        flash_attn_func(q, array, q)
    with pytest.raises(TypeError, match="qkv: got ndarray"):
        flash_attn_qkvpacked_func(array)
    with pytest.raises(TypeError, match="v_cache: got ndarray"):
        flash_attn_with_kvcache(q, q, array)
    with pytest.raises(ValueError, match="head dimension"):
        flash_attn_func(*torch.zeros(3, 1, 1, 1, 520))
    assert tilegrad.flash.flash_attn_func is flash_attn_func
