"""Attention of a sequence over ranks against one call on the whole of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.ops import poisoned, randn
from support.threads import ThreadRank, run_on_threads
from torch import Tensor

from tilegrad.kernels.attention import Mask, attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.attention.context import (
    gather_attention_bwd,
    gather_attention_fwd,
    gather_attention_workspace,
    positions_of,
)
from tilegrad.kernels.scratch import accumulation_dtype

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
    """Outputs, NaN but for dsinks, which is added to."""
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
    """Each rank's results, and the elements that it sent forward and in all."""

    def rank(group: ThreadRank) -> tuple[Results, int, int]:
        mine = Given(*(rows_of(t, group) for t in x[:5]), x.mask)
        o, lse = torch.full_like(mine.q, torch.nan), torch.full_like(mine.dlse, torch.nan)
        shapes = [gather_attention_workspace(*mine[:3], x.mask, world, backward=backward) for backward in (False, True)]
        gather_attention_fwd(*mine[:3], x.mask, group, o=o, lse=lse, scratch=poisoned(shapes[0]))
        sent, grads = group.sent, empty(mine)
        gather_attention_bwd(
            *mine[:3], o, lse, mine.do, mine.dlse, x.mask, group, **grads, scratch=poisoned(shapes[1])
        )  # fmt: skip
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
def test_in_bfloat16_o_and_dq_have_the_bits_of_one_call(name: str) -> None:
    x = given(name, torch.bfloat16)
    want, parts = alone(x), [result for result, _, _ in on_ranks(x, 2)]
    assert torch.equal(whole([part.o for part in parts]), want.o)
    assert torch.equal(whole([part.lse for part in parts]), want.lse)
    assert torch.equal(whole([part.dq for part in parts]), want.dq)
    exact = alone(Given(*(t.double() for t in x[:5]), given(name, torch.float64).mask))
    for field in ("dk", "dv"):  # of float32 sums, rounded once
        rounded = getattr(exact, field).bfloat16()
        got = whole([getattr(part, field) for part in parts])
        assert float((got == rounded).double().mean()) > 0.97, field
