"""The Hopper kernels on a Hopper GPU, as a program:

python tests/hopper_on_gpu.py shapes 2000       random shapes against the oracle, a process for each specification
python tests/hopper_on_gpu.py repeats 1000      deterministic, bit-equal
python tests/hopper_on_gpu.py calls 10000       random shapes one after another: nothing hangs
python tests/hopper_on_gpu.py neighbours        NaN stays in its packed sequence; gradients that are not wanted
python tests/hopper_on_gpu.py host              microseconds of Python for a call; capture in a CUDA graph
compute-sanitizer python tests/hopper_on_gpu.py one-process 20
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch
from support.cases import Call, Case, build, check_call, oracle, run
from torch import Tensor

from tilegrad import attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.attention.hopper import backward as hopper_bwd
from tilegrad.kernels.attention.hopper import launch as hopper_attention
from tilegrad.kernels.attention.problem import output_shapes
from tilegrad.kernels.attention.triton.launch import multiprocessors

AXES: dict[str, tuple[object, ...]] = {
    "dtype": (torch.bfloat16, torch.float16),
    "d": (64, 128, 256, 96, 40, 192, 16),
    "group": (1, 3),
    "band": ((False, None), (True, None), (False, (40, 7)), (False, (90, None)), (True, (130, None))),
    "softcap": (0.0, 0.0, 2.0),
    "scale": (None, None, -0.2),
    "sinks": (False, True),
    "dlse": (False, True),
    "layout": ("bhtd", "bthd", "fused"),
    "packed": (False, False, True),
    "deterministic": (False, True),
}
LONGEST, LEAST = 420, 17  # fewer rows go to triton


@functools.cache
def specifications() -> tuple[dict[str, object], ...]:
    """Greedy: of 40 random ones always the one with the most pairs of values not seen yet, until none is missing."""
    dice = random.Random(0)
    missing = {((a, x), (b, y)) for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2) for x in xs for y in ys}
    chosen = []
    while missing:
        drawn = [{axis: dice.choice(values) for axis, values in AXES.items()} for _ in range(40)]
        best = max(drawn, key=lambda spec: len(missing & set(itertools.combinations(spec.items(), 2))))
        missing -= set(itertools.combinations(best.items(), 2))
        chosen.append(best)
    return tuple(chosen)


def case_of(spec: dict[str, object], dice: random.Random, longest: int = LONGEST) -> Case:
    """Sizes for a specification."""
    d, (causal, window) = spec["d"], spec["band"]  # type: ignore[misc]
    lengths: tuple[tuple[int, int], ...] = ()
    if spec["packed"]:
        some = ((dice.randint(0, longest), dice.choice((0, 1, 60, longest))) for _ in range(dice.randint(0, 3)))
        lengths = ((dice.randint(LEAST, longest), dice.randint(1, 4 * LEAST)), *some)
    return Case(
        b=dice.randint(1, 3), hkv=dice.randint(1, 2), group=spec["group"], d=d, dv=d,  # type: ignore[arg-type]
        tq=dice.randint(LEAST, longest), tk=dice.choice((1, 64, dice.randint(1, 4 * LEAST), dice.randint(1, longest))),
        dtype=spec["dtype"], causal=causal, window=window, softcap=spec["softcap"], scale=spec["scale"],  # type: ignore[arg-type]
        sinks=spec["sinks"], dlse=spec["dlse"], layout=spec["layout"], lengths=lengths, device="cuda",  # type: ignore[arg-type]
    )  # fmt: skip


def few(case: Case) -> bool:
    """Left to triton by the table: few rows, many columns."""
    tq = max(q for q, _ in case.lengths) if case.lengths else case.tq
    tk = max(k for _, k in case.lengths) if case.lengths else case.tk
    return 4 * tq <= tk


def drawn(spec: dict[str, object], dice: random.Random, longest: int) -> Case:
    """A case that the table gives to the Hopper kernels."""
    case = case_of(spec, dice, longest)
    return replace(case, tk=case.tq, lengths=tuple((q, min(q, k)) for q, k in case.lengths)) if few(case) else case


def wrong(spec: dict[str, object], seed: int) -> str:
    case = drawn(spec, random.Random(seed), LONGEST)
    call = build(case, seed)
    for module in (hopper_attention, hopper_bwd):  # every other time so few programs that each has many tiles
        module.multiprocessors = (lambda device: 3) if seed % 2 else multiprocessors
    hopper_attention._launches.clear()
    hopper_bwd._prepared.clear()
    try:
        check_call(call, run(call, "hopper", deterministic=bool(spec["deterministic"])))
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"seed {seed}: {type(error).__name__}: {str(error)[:200]}; {case}"
    return ""


def check_specification(number: int, seeds: list[int]) -> tuple[int, list[str]]:
    torch.set_num_threads(1)
    return number, [line for seed in seeds if (line := wrong(specifications()[number], seed))]


def shapes(count: int) -> int:
    every = specifications()
    began, seconds, ran, failed = time.perf_counter(), 0.0, 0, 0
    order = sorted(range(len(every)), key=lambda n: -int(every[n]["d"]))  # type: ignore[call-overload]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(check_specification, n, list(range(n, count, len(every)))) for n in order]
        for future in as_completed(futures):
            number, red = future.result()
            failed += len(red)
            ran += len(range(number, count, len(every)))
            told = f"specification {number}: {len(red)} red, first {red[0]}; " if red else ""
            seconds = time.perf_counter() - began
            print(f"{told}{ran - failed} of {ran} shapes pass so far, {seconds:.0f} s", flush=True)
    print(f"{count - failed} of {count} shapes pass, {len(every)} specifications, {seconds:.0f} s", flush=True)
    return failed


def one_process(count: int) -> int:
    """For a sanitizer, which watches memory and no results: small shapes of `count` specifications in even steps."""
    every = specifications()
    for n in range(count):
        spec = every[n * len(every) // count]
        run(build(drawn(spec, random.Random(n), 200), n), "hopper", deterministic=bool(spec["deterministic"]))
    torch.cuda.synchronize()
    print(f"{count} shapes ran", flush=True)
    return 0


BASE = Case(b=2, hkv=2, group=2, tq=700, tk=900, d=128, dv=128, dtype=torch.bfloat16, causal=True, device="cuda")


def repeats(count: int) -> int:
    """Deterministic mode, every result of every repeat bit-equal to the first."""
    failed = 0
    cases = {
        f"D{d}": replace(BASE, d=d, dv=d, sinks=d == 64, dlse=d == 128, tq=700 + d, tk=900) for d in (64, 128, 256)
    }
    cases["packed"] = replace(BASE, lengths=((500, 600), (77, 300), (900, 900)))
    for name, case in cases.items():
        call = build(case)
        first = run(call, "hopper", deterministic=True)
        other = 0
        for _ in range(count // len(cases)):
            again = run(call, "hopper", deterministic=True)
            other += not all(torch.equal(first[x], again[x]) for x in first)
        failed += other
        print(f"{name}: {other} of {count // len(cases)} repeats differ", flush=True)
    return failed


class Bound:
    """A call with all its buffers, as a training step holds them."""

    def __init__(self, call: Call, deterministic: bool = False) -> None:
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


def calls(count: int) -> int:
    """Random shapes in one stream; a kernel that waits for ever shows as a time that is never printed."""
    dice, began = random.Random(1), time.perf_counter()
    every = [spec for spec in specifications() if spec["d"] in (64, 128, 256)][:12]
    bound = []
    for n in range(200):
        spec = every[n % len(every)]
        bound.append(Bound(build(drawn(spec, dice, 2000), n), bool(spec["deterministic"])))
    torch.cuda.synchronize()
    for n in range(count // 2):
        one = bound[dice.randrange(len(bound))]
        one.forward()
        one.backward()
        if n % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    print(f"{count} calls, no hang, {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def _gradients(call: Call, o: Tensor, lse: Tensor, absent: str = "") -> dict[str, Tensor | None]:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="hopper", deterministic=True)
    scratch = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}
    grads = {
        name: None if name == absent else torch.full_like(x, float("nan"))
        for name, x in (("dq", q), ("dk", k), ("dv", v))
    }
    attention_bwd(
        q, k, v, o, lse, call.do, call.dlse, mask, **grads, scratch=scratch, kernel="hopper", deterministic=True
    )  # fmt: skip
    return grads


def _stays(d: int) -> bool:
    """The forward's share."""
    call = build(replace(BASE, d=d, dv=d, causal=False, lengths=((100, 70), (90, 200), (33, 77))))
    bound = Bound(call)
    bound.forward()
    o, lse = bound.o.clone(), bound.lse.clone()
    for x, rows in ((call.q, (100, 190)), (call.k, (70, 270)), (call.v, (70, 270))):
        x[slice(*rows)] = float("nan")
    bound.forward()
    others = [*range(100), *range(190, 223)]
    same = torch.equal(o[others], bound.o[others]) and torch.equal(lse[:, others], bound.lse[:, others])
    print(f"D{d} o and lse beside NaN: {'the same' if same else 'OTHER RESULTS'}", flush=True)
    return same


def neighbours(_: int) -> int:
    """What is NaN in one packed sequence leaves the others' results as they are to the bit, and so does a gradient that is
    not wanted."""
    failed = sum(not _stays(d) for d in (64, 128, 256))
    for d in (128, 256):
        case = replace(BASE, d=d, dv=d, causal=False, lengths=((100, 70), (90, 200), (33, 77)))
        call = build(case)
        exact = oracle(call)
        o, lse = exact["o"].to(case.dtype), exact["lse"].float()
        wanted = _gradients(call, o, lse)
        for absent in ("dq", "dk", "dv") if d == 128 else ():
            some = _gradients(call, o, lse, absent)
            same = all(torch.equal(x, wanted[name]) for name, x in some.items() if x is not None)  # type: ignore[arg-type]
            failed += not same
            print(f"D{d} without {absent}: {'the same' if same else 'OTHER RESULTS'}", flush=True)
        for x, rows in (
            (call.q, (100, 190)),
            (call.do, (100, 190)),
            (o, (100, 190)),
            (call.k, (70, 270)),
            (call.v, (70, 270)),
        ):
            x[slice(*rows)] = float("nan")
        lse[:, 100:190] = float("nan")
        got = _gradients(call, o, lse)
        for name, (begin, end) in {"dq": (100, 190), "dk": (70, 270), "dv": (70, 270)}.items():
            before, after = wanted[name], got[name]
            assert before is not None and after is not None
            same = torch.equal(before[:begin], after[:begin]) and torch.equal(before[end:], after[end:])
            failed += not same
            print(f"D{d} {name} beside NaN: {'the same' if same else 'OTHER RESULTS'}", flush=True)
    return failed


def _microseconds(run: Callable[[], None], count: int = 200) -> float:
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, 1e6 * (time.perf_counter() - began) / count)
    return best


def host(_: int) -> int:
    """The device is idle most of the time for so small a call, so that the time is Python's."""
    call = build(replace(BASE, b=1, hkv=2, group=1, tq=64, tk=64))
    bound = Bound(call)
    bound.forward()
    bound.backward()
    print(f"host: forward {_microseconds(bound.forward):.1f} µs, backward {_microseconds(bound.backward):.1f} µs")
    results = {**bound.grads, "o": bound.o, "lse": bound.lse}
    wanted = {name: x.clone() for name, x in results.items()}  # one tile of columns: dq too has one order
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    bound.forward()
    bound.backward()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.forward()
        bound.backward()
    for x in results.values():
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    same = all(torch.equal(x, results[name]) for name, x in wanted.items())
    print(f"{allocations} allocations in a call; captured and replayed: {'the same' if same else 'OTHER RESULTS'}")
    return allocations + (not same)


COMMANDS = {
    "shapes": shapes,
    "repeats": repeats,
    "calls": calls,
    "neighbours": neighbours,
    "host": host,
    "one-process": one_process,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("count", type=int, nargs="?", default=0)
    given = parser.parse_args()
    if given.count < 4 and given.command not in ("host", "neighbours"):
        parser.error(f"count: got {given.count}; accepted: at least 4")
    raise SystemExit(1 if COMMANDS[given.command](given.count) else 0)
