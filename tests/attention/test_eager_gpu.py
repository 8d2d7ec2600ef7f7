"""Eager calls on a GPU: they have the kernels' bits on every stream, in a CUDA graph with autograd, and in odd buffers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import Call, Case, build, by_face, check_call, run
from support.hopper_specs import case_for_hopper, specs
from torch import Tensor

import tilegrad
from tilegrad import attention_bwd, attention_fwd, attention_workspace
from tilegrad.functional import call as eager_call
from tilegrad.functional import fast_path
from tilegrad.kernels.scratch import new_scratch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.gpu

BASE = Case(b=2, hkv=2, group=2, tq=300, tk=300, d=64, dv=64, dtype=torch.bfloat16, causal=True, device="cuda")
PACKED = replace(BASE, lengths=((100, 100), (33, 33), (167, 167)))


@pytest.mark.parametrize("number", range(6))
def test_eager_calls_on_a_gpu_have_the_bits_of_the_kernels_functions(number: int) -> None:
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


FIRST = """
import torch
from support.cases import build, by_face, run
from test_eager_gpu import BASE
call = build(BASE)
want = run(call, None)  # loads the kernels of both directions, in this thread
used = [torch.empty(1 << 24, device="cuda") for _ in range(2)]
del used  # what autograd's thread allocates needs no call of CUDA's
got = by_face(call)
assert all(torch.isfinite(x).all() for x in got.values())
"""


def test_the_first_backward_of_a_process_may_run_in_a_new_thread() -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (Path(tilegrad.__file__).parents[1], here.parent, here)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((paths, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("way", ["C++", "Python"])
@pytest.mark.parametrize("d", [64, 128, 192])
def test_calls_of_a_known_signature_run_in_used_memory(d: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch are in memory that held NaN, ones or −1, on two streams, at addresses that change and recur."""
    if way == "Python":
        monkeypatch.setattr(eager_call, "fast_path", None)
    elif eager_call.fast_path is None:
        pytest.skip(f"C++ for eager calls {fast_path.load()}")
    call = build(replace(BASE, d=d, dv=d, tq=69, tk=64, layout="fused", dtype=torch.float16), d)
    want, side, kept = run(call, None, deterministic=True), torch.cuda.Stream(), list[dict[str, Tensor]]()
    torch.cuda.synchronize()
    for turn in range(40):
        stream = side if turn % 4 > 1 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            for value in (-1, 1, 0x7FC00000):  # NaN in float32
                used = [
                    torch.full((n,), value, dtype=torch.int32, device="cuda") for n in (128, 1 << 14, 1 << 16, 1 << 20)
                ]
                del used
            got = by_face(call, deterministic=True)
        torch.cuda.synchronize()
        for name, x in got.items():
            other = (x != want[name]).nonzero()
            assert not len(other), f"call {turn}: {len(other)} of {x.numel()} of {name}, first at {other[:4].tolist()}"
        kept = [*kept, got] if turn % 3 else []
    o = tilegrad.attention(call.q.detach().requires_grad_(), call.k, call.v, causal=True, deterministic=True)
    assert (type(o.grad_fn).__name__ == "CppFunction") == (way == "C++")


def step(call: Call, leaves: list[Tensor]) -> list[Tensor]:
    """o, lse and the gradients of a call through the dispatcher."""
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
    with torch.cuda.stream(side):  # gradients accumulate on the stream on which their leaves are made
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
    """A copy of x whose rows do not begin at multiples of 16 bytes."""
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
