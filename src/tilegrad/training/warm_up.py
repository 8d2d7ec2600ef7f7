"""Compilation of a run's kernels before the run, into Triton's cache on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..engine.dist.mesh import Mesh
from ..engine.machine import check_device
from ..engine.spec import BUCKET_BYTES
from .config import RunConfig
from .generation import draw
from .loop import engine_of
from .ranks import Ranks
from .stages import Stage

ShowKernel = Callable[[str, float, bool], None]  # (name of a kernel, seconds, whether it was in the cache)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How many kernels Triton compiled, how many it found in its cache, and the seconds of the whole warm-up."""

    compiled: int
    cached: int
    seconds: float


def warm_up(config: RunConfig, show: ShowKernel) -> WarmUp:
    """Runs a step and an evaluation of every stage of a run on zeros, and generates a token: Triton then has all kernels of the
    run in its cache. Reads no data or weights, writes no other file, runs in one process, and needs the memory of the run."""
    t = config.train
    check_device(t.device)
    if torch.device(t.device).type != "cuda":
        raise ValueError(f"device: got {t.device!r}; accepted: a CUDA device, because nothing is compiled for others")
    import triton

    cache_hits: list[bool] = []

    def on_compile(*, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        cache_hits.append(cache_hit)
        show(src.name, times.total / 1e6, cache_hit)

    start, before = time.perf_counter(), triton.knobs.compilation.listener
    triton.knobs.compilation.listener = on_compile
    try:
        run_on_zeros(config)
    finally:
        triton.knobs.compilation.listener = before
    return WarmUp(cache_hits.count(False), cache_hits.count(True), time.perf_counter() - start)


def run_on_zeros(config: RunConfig) -> None:
    """Run the programs of a run: a step (two micro-batches if it accumulates), an evaluation and a sample."""
    t = config.train
    engine = engine_of(
        config, Ranks(Mesh(t.device, alone=True), {"shard": "optimizer", "bucket_bytes": BUCKET_BYTES, "context": 1})
    )
    for stage in t.stages or (Stage(None, t.batch_size, t.seq_len, config.model.window),):
        engine.window = cast(int | None, stage.window)
        zeros = torch.zeros(stage.batch_size, stage.seq_len, dtype=torch.int64)
        batches = [zeros] * min(2, t.gradient_accumulation)
        engine.step(batches, batches, t.learning_rate)
        engine.evaluate(zeros, zeros)
    for _token in draw(config.model, engine.params, [0], 2, lora=config.lora, temperature=0.8, top_k=50):
        pass
