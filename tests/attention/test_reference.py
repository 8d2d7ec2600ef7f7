"""The oracle against torch autograd, central differences, and results derived by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import Case, build, oracle, run
from torch import Tensor

from tilegrad import Mask
from tilegrad.kernels.attention import reference

CASES = {
    "plain": Case(),
    "causal": Case(causal=True, tq=20, tk=33),
    "more rows than columns": Case(causal=True, tq=33, tk=20),
    "window": Case(window=(5, 3)),
    "softcap": Case(softcap=2.0, scale=0.7),
    "bias": Case(bias="bhqk"),
    "broadcast bias": Case(bias="hk", b=3),
    "bool bias": Case(bias="BQK"),
    "alibi": Case(alibi="bh", tq=20),
    "sinks": Case(sinks=True, causal=True, tq=33, tk=20),
    "groups": Case(group=3, dv=24),
    "dropout": Case(dropout_p=0.3),
    "all": Case(causal=True, window=(9, None), softcap=3.0, bias="hqk", alibi="h", sinks=True, group=2, dropout_p=0.2),
}


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in plain torch, pair by pair where that is clearest, differentiable by autograd."""
    b, hq, tq, d = q.shape
    tk, group = k.shape[2], hq // k.shape[1]
    rows = []
    for head in range(hq):
        s = torch.einsum("bid,bjd->bij", q[:, head], k[:, head // group]) * (mask.scale or 1 / math.sqrt(d))
        if mask.softcap > 0:
            s = torch.tanh(s / mask.softcap) * mask.softcap
        seen = torch.zeros(b, tq, tk, dtype=torch.bool)
        far = torch.zeros(tq, tk, dtype=s.dtype)
        left, right = mask.window if mask.window is not None else (None, None)
        for i in range(tq):
            at = i + tk - tq
            for j in range(tk):
                far[i, j] = abs(at - j)
                inside = (left is None or at - left <= j) and (right is None or j <= at + right)
                seen[:, i, j] = inside and (j <= at or not mask.causal)
        if mask.bias is not None:
            bias = mask.bias.expand(b, hq, tq, tk)[:, head]
            if bias.dtype == torch.bool:
                seen &= bias
            else:
                s = s + bias
        if mask.alibi_slopes is not None:
            s = s - mask.alibi_slopes.expand(b, hq)[:, head, None, None] * far
        rows.append(torch.where(seen, s, -torch.inf))
    s = torch.stack(rows, 1)
    if mask.sinks is not None:
        s = torch.cat([s, mask.sinks[:, None, None].expand(b, hq, tq, 1)], -1)
    some = (s > -torch.inf).any(-1, keepdim=True)
    p = torch.softmax(torch.where(some, s, 0.0), -1) * some
    lse = torch.where(some[..., 0], torch.logsumexp(torch.where(some, s, 0.0), -1), -torch.inf)
    return (p[..., :tk] * keep) @ v.repeat_interleave(group, 1), lse


def keep_of(case: Case, mask: Mask) -> Tensor:
    """keep / (1 − p), from the oracle's own dropout of a matrix of ones (philox has its own tests)."""
    ones = torch.ones(case.b, case.hq, case.tq, case.tk).double()
    return reference._dropout(ones, mask, range(case.b))(ones)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_equal_autograd(name: str) -> None:
    case = replace(CASES[name], dtype=torch.float64, bias_dtype=torch.float64, dlse=True)
    call = build(case)
    mask = call.mask
    leaves = {"dq": call.q, "dk": call.k, "dv": call.v}
    if mask.float_bias is not None:
        leaves["dbias"] = mask.float_bias
    if mask.sinks is not None:
        sinks = mask.sinks.double()
        mask = replace(mask, sinks=sinks)
        leaves["dsinks"] = sinks
    for x in leaves.values():
        x.requires_grad_()
    o, lse = plain_attention(call.q, call.k, call.v, mask, keep_of(case, mask))
    assert call.dlse is not None
    seen = lse.detach() > -torch.inf
    loss = (o * call.do).sum() + (lse * call.dlse)[seen].sum()
    expected = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    with torch.no_grad():
        got = oracle(replace(call, mask=mask))
    torch.testing.assert_close(got["o"], o.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got["lse"], lse.detach(), rtol=1e-12, atol=1e-12)
    for gradient, value in expected.items():
        torch.testing.assert_close(got[gradient], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_central_differences(name: str) -> None:
    case = replace(
        CASES[name], dtype=torch.float64, bias_dtype=torch.float64, dlse=True, tq=min(CASES[name].tq, 12), tk=13
    )
    call = build(case)
    sinks = None if call.mask.sinks is None else call.mask.sinks.double()
    call = replace(call, mask=replace(call.mask, sinks=sinks))
    got, dlse = oracle(call), call.dlse
    assert dlse is not None

    def loss() -> Tensor:
        o, lse = reference.forward(call.q, call.k, call.v, call.mask)
        seen = lse > -torch.inf
        return (o * call.do).sum() + (lse * dlse)[seen].sum()

    inputs = {"dq": call.q, "dk": call.k, "dv": call.v, "dbias": call.mask.float_bias, "dsinks": sinks}
    for i, (name, x) in enumerate(inputs.items()):
        if x is None:
            continue
        direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(i))
        step = 1e-6
        x += step * direction
        up = loss()
        x -= 2 * step * direction
        down = loss()
        x += step * direction
        slope = (up - down) / (2 * step)
        torch.testing.assert_close((got[name] * direction).sum(), slope, rtol=1e-6, atol=1e-7)


def test_a_row_that_attends_to_nothing_has_an_output_of_zero() -> None:
    case = Case(causal=True, tq=6, tk=4, dtype=torch.float64, dlse=True)
    got = oracle(build(case))
    assert (got["o"][:, :, :2] == 0).all()
    assert (got["lse"][:, :, :2] == -torch.inf).all()
    assert (got["dq"][:, :, :2] == 0).all()
    assert not any(x.isnan().any() for x in got.values())


def test_lse_of_a_row_that_attends_to_nothing_is_the_logit_of_its_sink() -> None:
    call = build(Case(causal=True, tq=6, tk=4, sinks=True, dtype=torch.float64))
    lse = oracle(call)["lse"]
    assert call.mask.sinks is not None
    assert torch.equal(lse[:, :, :2], call.mask.sinks.double()[:, None].expand(2, 2, 2))


def test_minus_infinity_in_a_bias_masks_a_key_out() -> None:
    call = build(Case(bias="bhqk", dtype=torch.float64))
    assert call.mask.bias is not None
    call.mask.bias[0, 0, :, 3] = -torch.inf
    got = oracle(call)
    assert (got["dbias"][0, 0, :, 3] == 0).all()
    assert not any(x.isnan().any() for x in got.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_reference_kernel_computes_in_float64_and_rounds_once(dtype: torch.dtype) -> None:
    call = build(Case(causal=True, sinks=True, bias="hqk", dtype=dtype, dlse=True))
    got, exact = run(call, "reference"), oracle(call)
    for name, x in got.items():
        assert torch.equal(x, exact[name].to(x.dtype)), name


def test_canary_comparing_with_autograd_shows_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference._summed_to_heads_of
    monkeypatch.setattr(reference, "_summed_to_heads_of", lambda dk, like: right(dk, like) * (1 + 1e-6))
    with pytest.raises(AssertionError):
        test_forward_and_gradients_equal_autograd("groups")
