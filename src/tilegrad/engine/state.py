"""The state of an engine that a run saves and loads: `Engine.tensors`, counters, and each rank's slices of the tensors."""

from __future__ import annotations

from torch import Tensor

from .engine import Engine
from .parallel.alone import Run


def counters(engine: Engine) -> dict[str, int]:
    """Seed, draws and steps. Waits for submitted steps; `finished` still returns their results."""
    engine._collect(wait=True)
    return {"seed": engine.seed, "draws": engine.draws, **engine.optimizer.state()}


def restore_counters(engine: Engine, counters: dict[str, int]) -> None:
    """Restore what `counters` returned. Results of submitted steps are dropped."""
    if engine._queue is not None:
        engine._queue.finished(wait=True)
    engine._results = []
    engine.seed, engine.draws, engine.steps = (int(counters[name]) for name in ("seed", "draws", "steps"))
    engine.optimizer.restore(counters)
    engine.ranks.step = engine.steps


def owned_pieces(engine: Engine, *, shared: bool = False) -> dict[str, Run]:
    """The slices that this rank saves and loads instead of `Engine.tensors`: name → (slice of the flattened tensor, its offset,
    the tensor's length). If every rank has the whole tensor, the slice is all of it or, with `shared`, 1/world of it."""
    engine._settle()
    return engine.ranks.pieces(shared=shared)


def publish_pieces(engine: Engine) -> None:
    """Send the slices of `owned_pieces`, which were just written, to the other ranks."""
    with engine._on_stream():
        engine.ranks.spread()
    engine._rounded = -1


def write_param(engine: Engine, name: str, value: Tensor) -> None:
    """Write a parameter from a tensor of any dtype and device, on every rank."""
    engine._settle()
    engine.ranks.write_param(name, value)
