"""The GPU tests of the Triton kernels, and speed, as one program, for machines without pytest or hypothesis:

    python tests/triton_on_gpu.py [folder for results] [seconds for random shapes] [bench presets …]

Prints a verdict for every specification (in a process of its own, so that one that faults spoils no other), then for
random shapes, repeats and tensors beyond 2³¹ elements; then `tilegrad bench attention` against every peer.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import torch  # noqa: E402


class _Absent(types.ModuleType):
    """Stands for pytest or hypothesis where only their decorators are named."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __or__(self, other: Any) -> Any:
        return self


for _name in ("pytest", "hypothesis", "hypothesis.strategies"):
    try:
        __import__(_name)
    except ImportError:
        sys.modules[_name] = _Absent(_name)

import test_triton  # noqa: E402
from triton_specs import specs  # noqa: E402


def verdict(number: int) -> str:
    try:
        for seed in (number, number + 1000):
            test_triton.check(specs()[number].case(random.Random(seed), "cuda"), seed)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{number}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def main(folder: Path, seconds: float, presets: list[str]) -> int:
    failed = 0
    count = len(specs())
    with ProcessPoolExecutor(16, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        bad = [line for line in pool.map(verdict, range(count)) if line]
    print(f"{count - len(bad)} of {count} specifications pass", *bad, sep="\n", flush=True)
    broken = {int(line.split(":")[0]) for line in bad}
    failed += len(bad)
    began, shapes = time.perf_counter(), 0
    for n in range(2000):
        if time.perf_counter() - began > seconds:
            break
        if n % count in broken:
            continue
        shapes += 1
        try:
            test_triton.check(specs()[n % count].case(random.Random(n), "cuda"), n)
        except AssertionError as error:
            failed += 1
            print(f"shape {n}: {error}", flush=True)
    print(f"{shapes} random shapes", flush=True)
    for test in (test_triton.test_200_repeats_are_bit_equal, test_triton.test_more_than_2_to_the_31_elements):
        try:
            test()
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{test.__name__}: {type(error).__name__} {str(error)[:200]}", flush=True)
        else:
            print(f"{test.__name__}: ok", flush=True)
    from tilegrad.bench.attention import bench_attention

    for preset in presets:
        failed += bench_attention(device="cuda", preset=preset, repeats=15, out=str(folder / "attention.jsonl"))
    return 1 if failed else 0


if __name__ == "__main__":
    torch.manual_seed(0)
    given = sys.argv[1:]
    sys.exit(main(Path((*given, ".")[0]), float((*given[1:], "60")[0]), given[2:] or ["window", "training"]))
