"""Compares the Triton kernels with the oracle on a GPU:

./tg test -m gpu -k triton_gpu --shapes 2000 --report found
compute-sanitizer --tool racecheck python -m pytest -m gpu -k "triton_gpu and one_process"
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.cases import Case, build, check_call, run
from support.sweep import Verdict, check_shapes, report, sweep
from support.triton_specs import case_of, specs

import tilegrad

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.gpu

SANITIZED = 20  # number of shapes of the test for a sanitizer
SANITIZED_T = 96


def check(number: int, seed: int) -> None:
    call = build(case_of(specs()[number], random.Random(seed), "cuda"), seed)
    check_call(call, run(call, "triton"))


def check_specification(number: int, seeds: list[int]) -> Verdict:
    from tilegrad.kernels.attention.triton.fit import fits

    before = set(fits)
    verdict = check_shapes(check, number, seeds)
    verdict.specialised = Counter(fit.kernel for key, fit in fits.items() if key not in before)
    return verdict


def compile_time(number: int) -> int:
    """A rough estimate, so that the longest start first."""
    of = specs()[number]
    return int(max(of["dims"])) * (4 if of["dtype"] == torch.float32 else 1) * (2 if of["bias"] else 1)


def test_random_shapes_agree_with_the_oracle(pytestconfig: pytest.Config) -> None:
    """Sizes are not specialised: 44 specifications are at most 80 forwards."""
    shapes, folder = pytestconfig.getoption("--shapes"), pytestconfig.getoption("--report")
    order = sorted(range(len(specs())), key=compile_time, reverse=True)
    verdicts = list(sweep(check_specification, order, shapes))
    summary = report("triton", verdicts, folder)
    assert sum(verdict.shapes for verdict in verdicts) == shapes
    assert not any(verdict.failures for verdict in verdicts), summary
    assert sum(verdict.specialised["fwd"] + verdict.specialised["decode"] for verdict in verdicts) <= 80, summary


def test_one_process_runs_small_shapes_of_many_specifications() -> None:
    """This test is for a sanitizer, which watches one process. The oracle runs on the CPU: its kernels would take too long."""
    every = specs()
    for n in range(SANITIZED):
        case = case_of(every[n * len(every) // SANITIZED], random.Random(n), "cuda", t=SANITIZED_T)
        got = {name: x.cpu() for name, x in run(build(case, n), "triton").items()}
        check_call(build(replace(case, device="cpu"), n), got)


def test_repeats_are_bit_equal() -> None:
    case = Case(
        tq=300, tk=400, d=64, dv=64, group=2, causal=True, bias="hk", sinks=True, dropout_p=0.2, dlse=True,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    for shape in (case, replace(case, tq=2, tk=5000, b=1)):
        call = build(shape)
        first = run(call, "triton", deterministic=True)
        for _ in range(200):
            again = run(call, "triton", deterministic=True)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_tensors_may_have_more_than_2_to_the_31_elements() -> None:
    """B·H·T·D = 2³¹ + 2²⁰: the last head, beyond 32 bits, has the results of a call with that head alone."""
    b, t, d = 8193, 2048, 128
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(b, 1, t, d, generator=g, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    last = slice(b - 1, b)
    names = ("q", "k", "v")
    whole = dict(zip(names, (x.requires_grad_() for x in (q, k, v)), strict=True))
    alone = {name: x.detach()[last].clone().requires_grad_() for name, x in whole.items()}
    results = []
    for inputs, grad in ((whole, do), (alone, do[last])):
        o = tilegrad.attention(inputs["q"], inputs["k"], inputs["v"], causal=True, kernel="triton")
        assert isinstance(o, torch.Tensor)
        grads = torch.autograd.grad(o, [inputs[name] for name in names], grad)
        results.append([x.detach()[-1:] for x in (o, *grads)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(specs())))
def test_shapes_of_a_specification_agree_with_the_oracle(number: int) -> None:
    """The mutants run against this (./tg mutants --gpu): one process, one specification after the other."""
    for seed in range(4):
        check(number, 4 * number + seed)
