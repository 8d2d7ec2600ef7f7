"""Random shapes of the Triton kernels on a GPU, as a program:

    python tests/triton_on_gpu.py 2000
    compute-sanitizer --tool racecheck python tests/triton_on_gpu.py 20 --one-process

Each specification of triton_specs.py has a process of its own, which compiles it and runs its share of the shapes: all
cores compile, and one that faults spoils no other. A sanitizer watches one process, with T ≤ 96 and the oracle on the CPU:
it would take its time with every kernel of the oracle's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from typing import NamedTuple

import torch
from support.cases import build, check_call, run
from support.triton_specs import Spec, specs

SANITIZED_T = 96


class Verdict(NamedTuple):
    """Of one specification: which shapes were red and why, and how often each kernel was specialised."""

    number: int
    shapes: int
    red: list[str]
    specialised: Counter[str]
    seconds: float


def check_spec(number: int, seeds: list[int], t: int = 300, oracle_on: str = "cuda") -> Verdict:
    from tilegrad.kernels.attention.triton import launch as triton_attention

    torch.set_num_threads(1)
    spec, red, before, began = specs()[number], [], set(triton_attention.fits), time.perf_counter()
    for seed in seeds:
        case = spec.case(random.Random(seed), "cuda", t=t)
        call, same = build(case, seed), build(replace(case, device=oracle_on), seed)
        try:
            check_call(same, {name: x.to(oracle_on) for name, x in run(call, "triton").items()})
        except (AssertionError, RuntimeError, ValueError) as error:
            red.append(f"specification {number}, seed {seed}: {type(error).__name__}: {str(error)[:200]}; {case}")
    new = [fit.kernel for key, fit in triton_attention.fits.items() if key not in before]
    return Verdict(number, len(seeds), red, Counter(new), time.perf_counter() - began)


def _work(number: int) -> int:
    """Roughly how long it takes to compile: the longest start first."""
    of = dict(specs()[number].values)
    return max(of["dims"]) * (4 if of["dtype"] == torch.float32 else 1) * (2 if of["bias"] else 1)  # type: ignore[call-overload]


def random_shapes(count: int) -> list[Verdict]:
    every = specs()
    numbers = sorted(range(len(every)), key=_work, reverse=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(check_spec, n, list(range(n, count, len(every)))) for n in numbers]
        return [_shown(future.result()) for future in as_completed(futures)]


def one_process(count: int) -> list[Verdict]:
    """Specifications in even steps, one shape each."""
    every: list[Spec] = specs()
    return [_shown(check_spec(n * len(every) // count, [n], SANITIZED_T, "cpu")) for n in range(count)]


def _shown(verdict: Verdict) -> Verdict:
    """Printed as it comes: a run that is cut off has said what it found."""
    passed = f"{verdict.shapes - len(verdict.red)} of {verdict.shapes} in {verdict.seconds:.0f} s"
    print(*verdict.red, f"specification {verdict.number}: {passed}", sep="\n", flush=True)
    return verdict


def report(verdicts: list[Verdict], seconds: float) -> int:
    """Prints the sums; 1 if anything was red."""
    red = [line for verdict in verdicts for line in verdict.red]
    specialised: Counter[str] = sum((verdict.specialised for verdict in verdicts), Counter())
    print(
        f"{sum(v.shapes for v in verdicts) - len(red)} of {sum(v.shapes for v in verdicts)} random shapes of "
        f"{len({v.number for v in verdicts})} specifications pass, in {seconds:.0f} s; specialised: "
        + ", ".join(f"{name} {n}" for name, n in sorted(specialised.items()))
    )
    print("slowest:", *(f"{v.number} {v.seconds:.0f} s" for v in sorted(verdicts, key=lambda v: -v.seconds)[:5]))
    return 1 if red else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--one-process", action="store_true")
    given = parser.parse_args()
    start = time.perf_counter()
    found = one_process(given.count) if given.one_process else random_shapes(given.count)
    sys.exit(report(found, time.perf_counter() - start))
