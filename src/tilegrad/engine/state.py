"""What a run saves of an engine and loads into it: `Engine.tensors`, counters, and what each rank owns of the tensors."""

from __future__ import annotations

from torch import Tensor

from .engine import Engine
from .parallel.alone import Run


def counters(engine: Engine) -> dict[str, int]:
    """Seed, draws and steps. Waits for submitted steps; `finished` still returns their results."""
    engine._collect(wait=True)
    return {"seed": engine.seed, "draws": engine.draws, **engine.optimizer.state()}


def restore_counters(engine: Engine, counters: dict[str, int]) -> None:
    """Set what `counters` returned. Results of submitted steps are dropped."""
    if engine._queue is not None:
        engine._queue.finished(wait=True)
    engine._results = []
    engine.seed, engine.draws, engine.steps = (int(counters[name]) for name in ("seed", "draws", "steps"))
    engine.optimizer.restore(counters)
    engine.ranks.step = engine.steps


def owned_pieces(engine: Engine, *, shared: bool = False) -> dict[str, Run]:
    """What this rank saves and loads instead of `Engine.tensors`: name → (run of the flattened tensor, offset, whole length).
    The runs are what this rank owns. Where every rank has a whole tensor, the run is all of it or, with `shared`, this rank's
    share."""
    engine._settle()
    return engine.ranks.pieces(shared=shared)


def publish_pieces(engine: Engine) -> None:
    """The runs of `owned_pieces` were written: send them to the other ranks."""
    with engine._on_stream():
        engine.ranks.spread()
    engine._rounded = -1


def write_param(engine: Engine, name: str, value: Tensor) -> None:
    """Write a parameter from a tensor of any dtype and device, on every rank."""
    engine._settle()
    engine.ranks.write_param(name, value)
