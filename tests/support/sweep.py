"""Compares a GPU kernel with the oracle for random shapes. Each specification has a process of its own.

A process compiles its specification and runs its share of the shapes: all cores compile, and a specification that faults
stops no other.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Verdict:
    """The result of a specification: which of its shapes failed and why, and what the kernels were specialised for."""

    specification: int
    shapes: int
    failures: list[str] = field(default_factory=list)
    specialised: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


Check = Callable[[int, int], None]  # (specification, seed); raises if a result is wrong
Shapes = Callable[[int, list[int]], Verdict]


def check_shapes(check: Check, specification: int, seeds: list[int]) -> Verdict:
    torch.set_num_threads(1)
    verdict, began = Verdict(specification, len(seeds)), time.perf_counter()
    for seed in seeds:
        try:
            check(specification, seed)
        except (AssertionError, RuntimeError, ValueError) as error:
            verdict.failures.append(f"specification {specification}, seed {seed}: {type(error).__name__}: {error}")
    verdict.seconds = time.perf_counter() - began
    return verdict


def sweep(check: Shapes, order: list[int], shapes: int) -> Iterator[Verdict]:
    """Spreads `shapes` shapes over the specifications `order`, slowest to compile first. Yields each verdict when it is there.

    `check` is a module's function: it is sent to new processes."""
    context = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), len(order))
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(check, n, list(range(n, shapes, len(order)))) for n in order]
        for future in as_completed(futures):
            yield future.result()


def _plain(verdict: Verdict) -> dict[str, object]:
    """A value for JSON. (`asdict` turns a Counter into a Counter of pairs.)"""
    return vars(verdict) | {"specialised": dict(verdict.specialised)}


def report(kernel: str, verdicts: list[Verdict], folder: Path | None) -> str:
    """Returns one line of sums and writes everything to `folder`/`kernel`.json."""
    failures = [line for verdict in verdicts for line in verdict.failures]
    shapes = sum(verdict.shapes for verdict in verdicts)
    specialised = sum((verdict.specialised for verdict in verdicts), Counter[str]())
    if folder is not None:
        found = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "shapes": shapes,
            "passed": shapes - len(failures),
            "specifications": [_plain(verdict) for verdict in sorted(verdicts, key=lambda v: v.specification)],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{kernel}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return (
        f"{kernel}: {shapes - len(failures)} of {shapes} random shapes of {len(verdicts)} specifications pass; "
        f"specialised {dict(specialised)}; failures: {failures[:5]}"
    )
