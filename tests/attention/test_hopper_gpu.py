"""Compares the Hopper kernels with the oracle on a Hopper GPU:

./tg test -m gpu -k hopper_gpu --shapes 2000 --report found
compute-sanitizer python -m pytest -m gpu -k "hopper_gpu and one_process"
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import Call, Case, build, check_call, oracle, run
from support.hopper_specs import case_for_hopper, specs
from support.pairwise import Spec
from support.sweep import Verdict, check_shapes, report, sweep
from torch import Tensor

from tilegrad import attention_bwd, attention_fwd, attention_workspace, masks
from tilegrad.kernels.attention.problem import output_shapes

pytest.importorskip("triton", reason="needs Triton")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

SANITIZED = 20  # shapes of the test for a sanitizer, which checks memory and no results
FEW_PROGRAMS = 3  # so few programs that each has many tiles


def check(number: int, seed: int) -> None:
    """Every other shape has FEW_PROGRAMS persistent CTAs instead of one for each multiprocessor."""
    from tilegrad.kernels.attention import api
    from tilegrad.kernels.attention.hopper import launch_backward, launch_forward

    spec = specs()[number]
    call = build(case_for_hopper(spec, random.Random(seed)), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "prepared_calls", {})
        for module in (launch_forward, launch_backward):
            if seed % 2:
                patch.setattr(module, "multiprocessors", lambda _device: FEW_PROGRAMS)
        check_call(call, run(call, "hopper", deterministic=bool(spec["deterministic"])))


def check_specification(number: int, seeds: list[int]) -> Verdict:
    return check_shapes(check, number, seeds)


def test_random_shapes_agree_with_the_oracle(pytestconfig: pytest.Config) -> None:
    shapes, folder = pytestconfig.getoption("--shapes"), pytestconfig.getoption("--report")
    order = sorted(range(len(specs())), key=lambda n: -int(specs()[n]["d"]))
    verdicts = list(sweep(check_specification, order, shapes))
    summary = report("hopper", verdicts, folder)
    assert sum(verdict.shapes for verdict in verdicts) == shapes
    assert not any(verdict.failures for verdict in verdicts), summary


def test_one_process_runs_small_shapes_of_many_specifications() -> None:
    every = specs()
    for n in range(SANITIZED):
        spec = every[n * len(every) // SANITIZED]
        run(build(case_for_hopper(spec, random.Random(n), 200), n), "hopper", deterministic=bool(spec["deterministic"]))
    torch.cuda.synchronize()


BASE = Case(b=2, hkv=2, group=2, tq=700, tk=900, d=128, dv=128, dtype=torch.bfloat16, causal=True, device="cuda")
REPEATED: dict[str, Case] = {
    f"D{d}": replace(BASE, d=d, dv=d, sinks=d == 64, dlse=d == 128, tq=700 + d, tk=900) for d in (64, 96, 128, 192, 256)
} | {"packed": replace(BASE, lengths=((500, 600), (77, 300), (900, 900)))}


@pytest.mark.parametrize("name", REPEATED)
def test_deterministic_repeats_are_bit_equal(name: str) -> None:
    call = build(REPEATED[name])
    first = run(call, "hopper", deterministic=True)
    for _ in range(250):
        again = run(call, "hopper", deterministic=True)
        assert all(torch.equal(first[x], again[x]) for x in first)


TWO_PIECES: dict[str, Case] = {
    "full": replace(BASE, causal=False, group=1),
    "causal": replace(BASE, layout="fused", dlse=True),
    "window": replace(BASE, causal=False, window=(100, 9), dtype=torch.float16),
    "groups, open window": replace(BASE, group=4, window=(200, None), layout="bthd", sinks=True),
    "packed": replace(BASE, lengths=((500, 600), (77, 300), (40, 0), (300, 290)), sinks=True),
    "softcap, negative scale": replace(BASE, softcap=2.0, scale=-0.2),
}


@pytest.mark.parametrize("d", [72, 80, 96, 136, 160, 192])
@pytest.mark.parametrize("form", TWO_PIECES)
def test_head_dimensions_of_two_pieces_agree_with_the_oracle(form: str, d: int) -> None:
    call = build(replace(TWO_PIECES[form], d=d, dv=d))
    check_call(call, run(call, "hopper", deterministic=False))
    check_call(call, run(call, "hopper", deterministic=True))


def masks_of(t: int) -> dict[str, dict[str, Any]]:
    """Masks of tilegrad.masks with edges at and between the edges of tiles, and a random one with a row that attends to
    nothing."""
    ends, dice = [0, 128, 131, 640, 3 * t // 4, t], random.Random(t)
    tree = [dice.randrange(i) if i else 0 for i in range(t)]
    return {
        "documents": {**masks.documents(ends)},
        "documents, not causal": {**masks.documents(ends, causal=False)},
        "causal": {**masks.prefix([0], t)},
        "prefix": {**masks.prefix([300], t)},
        "shared question": {**masks.shared_question([200, 500, t - 700])},
        "tree": {"intervals": rows_outside_of_subtrees(tree)},
        "nothing": {"intervals": torch.tensor([0, t], dtype=torch.int32).expand(1, 1, t, 2).contiguous()},
    }


def rows_outside_of_subtrees(parents: list[int]) -> Tensor:
    """A node's rows are those of its subtree, if nodes are numbered in depth-first order. (1, 1, T, 4) of the order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        children[parent].append(node)
    intervals, stack, number = [[0, 0, 0, 0]] * len(parents), [(0, False)], 0
    begins: dict[int, int] = {}
    while stack:
        node, done = stack.pop()
        if done:
            intervals[begins[node]] = [0, begins[node], number, len(parents)]
            continue
        begins[node], number = number, number + 1
        stack += [(node, True), *((child, False) for child in children[node])]
    return torch.tensor(intervals, dtype=torch.int32)[None, None]


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("name", masks_of(1000))
def test_interval_masks_agree_with_the_oracle_and_repeat(name: str, d: int) -> None:
    call = build(replace(BASE, group=2, tq=1000, tk=1000, d=d, dv=d, causal=False, sinks=d == 64, dlse=d == 128))
    options: dict[str, Any] = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in masks_of(1000)[name].items()}
    call = replace(call, mask=replace(call.mask, **options))
    check_call(call, run(call, "hopper", deterministic=False))
    first = run(call, "hopper", deterministic=True)
    check_call(call, first)
    for _ in range(20):
        again = run(call, "hopper", deterministic=True)
        assert all(torch.equal(first[x], again[x]) for x in first)


@pytest.mark.parametrize("kind", ["2", "h2", "b4", "bh4"])
@pytest.mark.parametrize("form", ["full", "causal", "window", "softcap, negative scale"])
def test_random_intervals_agree_with_the_oracle(form: str, kind: str) -> None:
    for seed, d in enumerate((40, 64, 96, 128, 160, 256)):
        call = build(replace(TWO_PIECES[form], d=d, dv=d, intervals=kind), seed)
        for deterministic in (False, True):
            check_call(call, run(call, "hopper", deterministic=deterministic))


class Bound:
    """A call with all its buffers, as a training step holds them."""

    def __init__(self, call: Call, *, deterministic: bool = False) -> None:
        q, k, v, mask = call.q, call.k, call.v, call.mask
        o_shape, lse_shape = output_shapes(q, v, mask)
        self.call, self.deterministic = call, deterministic
        self.o, self.lse = q.new_empty(o_shape), q.new_empty(lse_shape, dtype=torch.float32)
        self.grads = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        if mask.sinks is not None:
            self.grads["dsinks"] = torch.zeros_like(mask.sinks)
        self.scratch = [
            {
                name: torch.empty(shape, dtype=dtype, device="cuda")
                for name, (shape, dtype) in attention_workspace(
                    q, k, v, mask, backward=backward, kernel="hopper", deterministic=deterministic
                ).items()
            }
            for backward in (False, True)
        ]

    def forward(self) -> None:
        call = self.call
        attention_fwd(
            call.q, call.k, call.v, call.mask, o=self.o, lse=self.lse, scratch=self.scratch[0], kernel="hopper"
        )

    def backward(self) -> None:
        call = self.call
        attention_bwd(
            call.q, call.k, call.v, self.o, self.lse, call.do, call.dlse, call.mask, **self.grads,
            scratch=self.scratch[1], kernel="hopper", deterministic=self.deterministic,
        )  # fmt: skip


def test_10000_calls_in_one_stream_do_not_hang() -> None:
    """If a kernel waits for ever, this test does not end."""
    dice, every, seen = random.Random(1), list[Spec](), set[object]()
    for spec in specs():  # the first with each head dimension and `deterministic`, and the first with each band
        features = {(spec["d"], spec["deterministic"]), spec["band"]}
        if spec["d"] in (64, 128, 256) and not features <= seen:
            every.append(spec)
            seen |= features
    bound = []
    for n in range(70):
        spec = every[n % len(every)]
        bound.append(Bound(build(case_for_hopper(spec, dice, 2000), n), deterministic=bool(spec["deterministic"])))
    torch.cuda.synchronize()
    for n in range(5000):
        one = bound[dice.randrange(len(bound))]
        one.forward()
        one.backward()
        if n % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()


def gradients(call: Call, o: Tensor, lse: Tensor, absent: str = "") -> dict[str, Tensor]:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="hopper", deterministic=True)
    scratch = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}
    grads = {name: torch.full_like(x, float("nan")) for name, x in (("dq", q), ("dk", k), ("dv", v)) if name != absent}
    attention_bwd(
        q, k, v, o, lse, call.do, call.dlse, mask, **dict.fromkeys(("dq", "dk", "dv")) | grads, scratch=scratch,
        kernel="hopper", deterministic=True,
    )  # fmt: skip
    return grads


PACKED = replace(BASE, causal=False, lengths=((100, 70), (90, 200), (33, 77)))
SPOILT = {"q": (100, 190), "k": (70, 270), "v": (70, 270)}  # rows of the second sequence


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_nan_stays_in_its_packed_sequence_in_the_forward(d: int) -> None:
    call = build(replace(PACKED, d=d, dv=d))
    bound = Bound(call)
    bound.forward()
    o, lse = bound.o.clone(), bound.lse.clone()
    for name, rows in SPOILT.items():
        getattr(call, name)[slice(*rows)] = float("nan")
    bound.forward()
    others = [*range(100), *range(190, 223)]
    assert torch.equal(o[others], bound.o[others]) and torch.equal(lse[:, others], bound.lse[:, others])


@pytest.mark.parametrize("d", [96, 128, 192, 256])
def test_nan_stays_in_its_packed_sequence_in_the_backward(d: int) -> None:
    call = build(replace(PACKED, d=d, dv=d))
    exact = oracle(call)
    o, lse = exact["o"].to(call.q.dtype), exact["lse"].float()
    wanted = gradients(call, o, lse)
    for name, rows in SPOILT.items():
        getattr(call, name)[slice(*rows)] = float("nan")
    for x in (call.do, o):
        x[100:190] = float("nan")
    lse[:, 100:190] = float("nan")
    got = gradients(call, o, lse)
    for name, (begin, end) in SPOILT.items():
        before, after = wanted[f"d{name}"], got[f"d{name}"]
        assert torch.equal(before[:begin], after[:begin]) and torch.equal(before[end:], after[end:]), name


@pytest.mark.parametrize("absent", ["dq", "dk", "dv"])
def test_leaving_out_a_gradient_changes_no_other(absent: str) -> None:
    call = build(PACKED)
    exact = oracle(call)
    o, lse = exact["o"].to(call.q.dtype), exact["lse"].float()
    wanted, some = gradients(call, o, lse), gradients(call, o, lse, absent)
    assert len(some) == 2 and all(torch.equal(x, wanted[name]) for name, x in some.items())


def microseconds(run: Callable[[], None], count: int = 200) -> float:
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, 1e6 * (time.perf_counter() - began) / count)
    return best


def test_a_call_allocates_nothing_and_can_be_captured(pytestconfig: pytest.Config) -> None:
    """The report has the host's time for a call: the call is so small that the device is idle most of the time."""
    bound = Bound(build(replace(BASE, b=1, hkv=2, group=1, tq=64, tk=64)))
    bound.forward()
    bound.backward()
    results = {**bound.grads, "o": bound.o, "lse": bound.lse}
    wanted = {name: x.clone() for name, x in results.items()}  # one tile of columns, so that dq too has one order
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    bound.forward()
    bound.backward()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.forward()
        bound.backward()
    for x in results.values():
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, results[name]) for name, x in wanted.items())
    folder = pytestconfig.getoption("--report")
    if folder is not None:
        host = {"forward_us": microseconds(bound.forward), "backward_us": microseconds(bound.backward)}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hopper_host.json").write_text(json.dumps(host) + "\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(specs())))
def test_shapes_of_a_specification_agree_with_the_oracle(number: int) -> None:
    """The mutants run against this (./tg mutants --gpu): one process, one specification after the other."""
    for seed in range(4):
        check(number, 4 * number + seed)
