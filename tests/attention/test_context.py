"""Attention of a sequence over ranks against one call on the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.ops import assert_rounded, poisoned, randn
from support.threads import Alone, ThreadRank, run_on_threads
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.attention import Mask, attention_bwd, attention_fwd, attention_workspace, context
from tilegrad.kernels.attention.context import (
    gather_attention_bwd,
    gather_attention_fwd,
    gather_attention_workspace,
    positions_of,
)
from tilegrad.kernels.attention.problem import Problem
from tilegrad.kernels.attention.table import ATTENTION
from tilegrad.kernels.cpu import library
from tilegrad.kernels.scratch import Form, accumulation_dtype

B, HQ, D, T = 2, 4, 16, 96
CASES: dict[str, tuple[int, Mask, bool]] = {  # kv heads, mask, with sinks
    "causal": (4, Mask(causal=True), False),
    "GQA, softcap, sinks": (2, Mask(causal=True, softcap=5.0), True),
    "window 10": (2, Mask(causal=True, window=(9, None)), False),
    "window 29, one kv head, sinks": (1, Mask(causal=True, window=(28, None), scale=0.3), True),
    "window 70, slopes": (
        4,
        Mask(causal=True, window=(69, None), alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
        False,
    ),
}


class Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    mask: Mask


class Results(NamedTuple):
    o: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def given(name: str, dtype: torch.dtype) -> Given:
    hkv, mask, sinks = CASES[name]
    acc = accumulation_dtype(dtype)
    if mask.alibi_slopes is not None:
        mask = replace(mask, alibi_slopes=mask.alibi_slopes.to(acc))
    mask = replace(mask, sinks=randn(HQ, dtype=acc, seed=9) if sinks else None)
    q, k, v, do = (randn(B, h, T, D, dtype=dtype, seed=i) for i, h in enumerate((HQ, hkv, hkv, HQ)))
    return Given(q, k, v, do, randn(B, HQ, T, dtype=acc, seed=5), mask)


def empty(x: Given) -> dict[str, Any]:
    """Outputs of NaN, except dsinks, which accumulates."""
    out = {f"d{name}": torch.full_like(getattr(x, name), torch.nan) for name in "qkv"}
    return out | {"dsinks": None if x.mask.sinks is None else torch.zeros_like(x.mask.sinks)}


def alone(x: Given) -> Results:
    o, lse = torch.empty_like(x.q), torch.empty_like(x.dlse)
    shapes = [attention_workspace(x.q, x.k, x.v, x.mask, backward=backward) for backward in (False, True)]
    attention_fwd(x.q, x.k, x.v, x.mask, o=o, lse=lse, scratch=poisoned(shapes[0]))
    grads = empty(x)
    attention_bwd(x.q, x.k, x.v, o, lse, x.do, x.dlse, x.mask, **grads, scratch=poisoned(shapes[1]))
    return Results(o, lse, **grads)


def rows_of(x: Tensor, group: ThreadRank) -> Tensor:
    return torch.cat([x[:, :, i] for i in positions_of(group.rank, group.world, x.shape[2] // group.world)], 2)


def on_ranks(x: Given, world: int) -> list[tuple[Results, int, int]]:
    """The results of each rank, and the numbers of elements that it sent in the forward and in total."""

    def rank(group: ThreadRank) -> tuple[Results, int, int]:
        q, k, v, do, dlse = (rows_of(t, group) for t in x[:5])
        o, lse = torch.full_like(q, torch.nan), torch.full_like(dlse, torch.nan)
        shapes = [gather_attention_workspace(q, k, v, x.mask, world, backward=backward) for backward in (False, True)]
        gather_attention_fwd(q, k, v, x.mask, group, o=o, lse=lse, scratch=poisoned(shapes[0]))
        sent, grads = group.sent, empty(Given(q, k, v, do, dlse, x.mask))
        scratch = poisoned(shapes[1])
        gather_attention_bwd(q, k, v, o, lse, do, dlse, x.mask, group, **grads, scratch=scratch)
        return Results(o, lse, **grads), sent, group.sent

    return run_on_threads(world, rank)


def whole(parts: list[Tensor]) -> Tensor:
    """The rows of all ranks in the order of the sequence."""
    world, t = len(parts), parts[0].shape[2]
    out = torch.empty(*parts[0].shape[:2], world * t, *parts[0].shape[3:], dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        for i, half in zip(positions_of(rank, world, t), part.split(t // 2, 2), strict=True):
            out[:, :, i] = half
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_results_of_one_call(name: str, world: int) -> None:
    x = given(name, torch.float64)
    want, parts = alone(x), [result for result, _, _ in on_ranks(x, world)]
    for field in ("o", "lse", "dq", "dk", "dv"):
        exact = getattr(want, field)
        got = whole([getattr(part, field) for part in parts])
        assert float((got - exact).abs().max() / exact.abs().max()) < 1e-12, field
    if want.dsinks is not None:
        total = sum((part.dsinks for part in parts if part.dsinks is not None), torch.zeros_like(want.dsinks))
        assert float((total - want.dsinks).abs().max() / want.dsinks.abs().max()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_in_bfloat16_gradients_are_rounded_once(name: str) -> None:
    """Without a window o and dq have the bits of one call. dk and dv are float32 sums, as exact as those of one call."""
    x = given(name, torch.bfloat16)
    want, parts = alone(x), [result for result, _, _ in on_ranks(x, 2)]
    got = {field: whole([getattr(part, field) for part in parts]) for field in ("o", "dq", "dk", "dv")}
    if x.mask.window is None:
        assert torch.equal(got["o"], want.o)
        assert torch.equal(got["dq"], want.dq)
    q, k, v, do, dlse = (t.double() for t in x[:5])
    exact = alone(Given(q, k, v, do, dlse, given(name, torch.float64).mask))
    for field in got:
        error, allowed = ((y - getattr(exact, field)).square().mean() for y in (got[field], getattr(want, field)))
        assert float((error / allowed).sqrt()) < 1.002, field


def test_a_rank_sends_k_and_v_once_in_the_forward_and_twice_in_the_backward() -> None:
    x = given("GQA, softcap, sinks", torch.float32)
    for _, forward, in_all in on_ranks(x, 4):
        mine = (x.k.numel() + x.v.numel()) // 4
        assert (forward, in_all) == (3 * mine, 9 * mine)


def test_scratch_of_many_rows_serves_calls_with_fewer() -> None:
    x = given("causal", torch.float64)
    want = alone(x)

    def rank(group: ThreadRank) -> Tensor:
        q, k, v = (rows_of(t, group) for t in x[:3])
        form = Form((B, HQ, 3 * q.shape[2], D), q.dtype, q.device)
        o = torch.empty_like(q)
        scratch = poisoned(gather_attention_workspace(form, form, form, x.mask, 2, backward=False))
        gather_attention_fwd(q, k, v, x.mask, group, o=o, lse=None, scratch=scratch)
        return o

    assert float((whole(run_on_threads(2, rank)) - want.o).abs().max()) < 1e-12


def test_scratch_has_the_gathered_k_and_v_and_their_gradients_only() -> None:
    """One of four ranks has k (2, 3, 8, 5) and v (2, 3, 8, 7). Scratch: all of K and V, all parts, half of K and V."""
    q, k, v = (Form((2, h, 8, d), torch.bfloat16, torch.device("cpu")) for h, d in ((6, 5), (3, 5), (3, 7)))
    of = {
        backward: {
            name: form
            for name, form in gather_attention_workspace(q, k, v, Mask(causal=True), 4, backward=backward).items()
            if not name.startswith("attention.")
        }
        for backward in (False, True)
    }
    whole_k, whole_v, half_k, half_v = (2, 3, 32, 5), (2, 3, 32, 7), (2, 3, 16, 5), (2, 3, 16, 7)
    parts = (4, 2 * 3 * 8 * (5 + 7))
    assert of[False] == {name: (shape, q.dtype) for name, shape in (("parts", parts), ("k", whole_k), ("v", whole_v))}
    sums = {"dparts": parts, "dk": whole_k, "dv": whole_v, "run_dk": half_k, "run_dv": half_v}
    assert of[True] == of[False] | {name: (shape, torch.float32) for name, shape in sums.items()}


def test_scratch_covers_the_calls_with_the_most_rows_and_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is declared for every run of columns that a rank may have, with the most rows and with as few as in decoding."""
    seen: list[tuple[int, int, bool]] = []

    def declared(q: Form, k: Form, _v: Form, _mask: Mask, *, deterministic: bool, **_others: Any) -> Any:
        seen.append((q.shape[2], k.shape[2], deterministic))
        return {}

    monkeypatch.setattr(context, "attention_workspace", declared)
    for t, backward, want in (
        (40, False, {(c, n * c, False) for c in (16, 20) for n in (1, 2, 3, 4)}),
        (8, True, {(4, n * 4, True) for n in (1, 2, 3, 4)}),
        (0, True, {(0, 0, True)}),
    ):
        seen.clear()
        q = Form((1, 2, t, 4), torch.float32, torch.device("cpu"))
        gather_attention_workspace(q, q, q, Mask(causal=True), 2, backward=backward, deterministic=True)
        assert set(seen) == want and len(seen) == len(want)


@pytest.mark.parametrize("kernel", ["native", "tiled", "reference"])
def test_dk_and_dv_are_float32_on_request(kernel: str) -> None:
    if kernel == "native" and isinstance(library.library(), str):
        pytest.skip("needs the native library")
    x = given("GQA, softcap, sinks", torch.bfloat16)
    one = alone(x)
    dk, dv = (Form(tuple(y.shape), torch.float32, y.device) for y in (x.k, x.v))
    scratch = poisoned(attention_workspace(*x[:3], x.mask, backward=True, kernel=kernel, dk=dk, dv=dv))
    grads = {}
    for dtype in (torch.bfloat16, torch.float32):
        out: dict[str, Any] = {"dk": torch.empty_like(x.k, dtype=dtype), "dv": torch.empty_like(x.v, dtype=dtype)}
        attention_bwd(
            *x[:3], one.o, one.lse, x.do, x.dlse, x.mask, dq=None, **out, scratch=scratch, kernel=kernel
        )  # fmt: skip
        grads[dtype] = out
    for name in ("dk", "dv"):
        assert_rounded(grads[torch.bfloat16][name], grads[torch.float32][name])
        assert not torch.equal(grads[torch.bfloat16][name].float(), grads[torch.float32][name])


def test_dk_and_dv_have_one_dtype() -> None:
    x = given("causal", torch.bfloat16)
    one, scratch = alone(x), poisoned(attention_workspace(*given("causal", torch.bfloat16)[:3], Mask(), backward=True))
    for dtypes in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64), (torch.float16, torch.bfloat16)):
        dk, dv = (torch.empty(x.k.shape, dtype=dtype) for dtype in dtypes)
        with pytest.raises(ValueError, match=r"d[kv]: got torch.*; accepted: torch"):
            attention_bwd(*x[:3], one.o, one.lse, x.do, None, x.mask, dq=None, dk=dk, dv=dv, scratch=scratch)


@pytest.mark.usefixtures("on_hopper")
def test_hopper_leaves_float32_dk_and_dv_to_triton() -> None:
    if not gpu.has_triton():
        pytest.skip("needs Triton")
    q = Form((1, 8, 4096, 128), torch.bfloat16, torch.device("cuda"))
    assert ATTENTION.select(Problem(q, q, q, Mask(causal=True))).name == "hopper"
    dk = Form(q.shape, torch.float32, q.device)
    explained = ATTENTION.explain(Problem(q, q, q, Mask(causal=True), dk=dk, dv=None))
    assert explained.kernel == "triton"
    assert explained.reasons["hopper"] == "writes dk and dv only in q's dtype, not in float32"
    declared = gather_attention_workspace(q, q, q, Mask(causal=True), 2, backward=True)
    assert {name.split(".")[1] for name in declared if name.startswith("attention.")} == {"triton"}
    assert all(
        name.split(".")[1] == "hopper"
        for name in gather_attention_workspace(q, q, q, Mask(causal=True), 2, backward=False)
        if name.startswith("attention.")
    )


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask(), "causal: got False; accepted: True"),
        (Mask(causal=True, bias=torch.zeros(1, 1, 8, 8)), "bias: got a tensor; accepted: None"),
        (Mask(causal=True, intervals=torch.zeros(1, 1, 8, 2).int()), "intervals: got a tensor; accepted: None"),
        (Mask(causal=True, dropout_p=0.1, seed=1), "dropout_p: got 0.1; accepted: 0.0"),
        (
            Mask(causal=True, cu_seqlens_q=torch.zeros(2, dtype=torch.int32)),
            "cu_seqlens_q: got a tensor; accepted: None",
        ),
    ],
)
def test_a_sequence_over_ranks_refuses_some_masks(mask: Mask, message: str) -> None:
    q = torch.zeros(1, 1, 8, 4)
    with pytest.raises(ValueError, match=message):
        gather_attention_workspace(q, q, q, mask, 2, backward=False)
    with pytest.raises(ValueError, match=message):
        gather_attention_fwd(q, q, q, mask, Alone(), o=None, lse=None, scratch={})


def test_an_odd_number_of_rows_is_refused() -> None:
    q = torch.zeros(1, 1, 7, 4)
    with pytest.raises(ValueError, match="q: got 7; accepted: an even number of rows"):
        gather_attention_workspace(q, q, q, Mask(causal=True), 2, backward=False)


def test_canary_a_run_at_a_wrong_position_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(rank: int, world: int, t: int) -> tuple[slice, ...]:
        return tuple(slice(a * t // 2, (a + 1) * t // 2) for a in (rank, world + rank))

    monkeypatch.setattr(context, "positions_of", other)
    with pytest.raises(AssertionError, match="o"):
        test_ranks_have_the_results_of_one_call("causal", 2)
