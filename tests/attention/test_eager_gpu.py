"""Eager calls on a GPU: the kernels' bits at every stream, captured in a CUDA graph under autograd, and into odd buffers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import Call, Case, build, by_face, check_call, run
from support.hopper_specs import case_for_hopper, specs
from torch import Tensor

import tilegrad
from tilegrad import attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.scratch import new_scratch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.gpu

BASE = Case(b=2, hkv=2, group=2, tq=300, tk=300, d=64, dv=64, dtype=torch.bfloat16, causal=True, device="cuda")
PACKED = replace(BASE, lengths=((100, 100), (33, 33), (167, 167)))


@pytest.mark.parametrize("number", range(6))
def test_the_same_bits_as_the_kernels_own_functions(number: int) -> None:
    spec = specs()[number * len(specs()) // 6]
    call = build(case_for_hopper(spec, random.Random(number), 300), number)
    want = run(call, None, deterministic=True)
    for turn, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream())):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            got = by_face(call, deterministic=True)
        torch.cuda.synchronize()
        for name, x in got.items():
            other = (x.nan_to_num(-1.0) != want[name].nan_to_num(-1.0)).nonzero()
            assert not len(other), (
                f"call {turn}: {len(other)} of {x.numel()} of {name} differ, first at {other[:4].tolist()}"
            )


def step(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    """o, lse and the gradients of a call through autograd."""
    mask, options = call.mask, {"causal": True, "deterministic": True, "return_lse": True}
    if mask.varlen:
        ends = (mask.cu_seqlens_q, mask.cu_seqlens_k, mask.max_seqlen_q, mask.max_seqlen_k)
        o, lse = tilegrad.attention_varlen(*leaves, *ends, **options)  # type: ignore[call-overload]
    else:
        o, lse = tilegrad.attention(*leaves, **options)  # type: ignore[call-overload]
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, call.do)]


@pytest.mark.parametrize("case", [BASE, replace(BASE, d=128, dv=128), replace(BASE, dtype=torch.float32), PACKED])
def test_a_step_is_captured_and_replayed_to_the_same_bits(case: Case) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # where leaves are made is where their gradients are accumulated
        call, other = build(case, 0), build(case, 1)
        leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
        first = step(call, leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step(call, leaves)
    for given in (call, other, call):
        with torch.cuda.stream(side), torch.no_grad():
            for leaf, x in zip(leaves, (given.q, given.k, given.v), strict=True):
                leaf.copy_(x)
        with torch.cuda.stream(side):
            want = step(call, leaves)
            for x in captured:
                x.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, want))
        assert all(map(torch.equal, first, want)) == (given is call)


def odd(x: Tensor) -> Tensor:
    """As x, with rows that do not begin at multiples of 16 bytes."""
    return x.new_full((*x.shape[:-1], x.shape[-1] + 1), float("nan"))[..., :-1]


def test_buffers_that_tma_cannot_write_are_filled_by_another_kernel() -> None:
    call = build(BASE)
    q, k, v, mask = call.q, call.k, call.v, call.mask
    o, lse = odd(call.do), q.new_empty(q.shape[:-1], dtype=torch.float32)
    grads: dict[str, Any] = {"dq": odd(q), "dk": odd(k), "dv": odd(v)}
    assert tilegrad.explain(q, k, v, causal=True, o=o, **grads).kernel == "triton"
    scratch = new_scratch(attention_workspace(q, k, v, mask, backward=False, o=o), "cuda")
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch)
    others = {"o": o, "do": call.do} | grads
    scratch = new_scratch(attention_workspace(q, k, v, mask, backward=True, **others), "cuda")
    attention_bwd(q, k, v, o, lse, call.do, None, mask, **grads, scratch=scratch)
    check_call(call, {"o": o, "lse": lse, **grads})
