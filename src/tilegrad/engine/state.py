"""The state of an engine that a run saves and loads: `Engine.tensors`, counters, and the slices of the tensors on each rank.
`averaged` is a context in which the engine computes with the average of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .engine import Engine
from .parallel.alone import Run


def counters(engine: Engine) -> dict[str, int]:
    """Seed, draws and steps. Waits for submitted steps; `finished` still returns their results."""
    engine._results.collect(wait=True)
    return {"seed": engine.seed, "draws": engine.draws, **engine.optimizer.state()}


def restore_counters(engine: Engine, counters: dict[str, int]) -> None:
    """Restore what `counters` returned. Results of submitted steps are dropped."""
    engine._results.drop()
    engine.seed, engine.draws, engine.steps = (int(counters[name]) for name in ("seed", "draws", "steps"))
    engine.optimizer.restore(counters)
    engine.optimizer.set_seed(engine.seed)
    engine.ranks.step = engine.steps


def owned_pieces(engine: Engine, *, shared: bool = False) -> dict[str, Run]:
    """The slices that this rank saves and loads instead of `Engine.tensors`: name → (slice of the flattened tensor, its offset,
    length of the whole tensor). If every rank has the whole tensor, the slice is all of it or, with `shared`, an equal part."""
    engine._settle()
    engine._begin_average()
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


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """In this context, the weights of the engine are their average (Engine(ema=…)), and a step is refused. Afterwards the
    weights have the same bits as before, even after an error. All ranks enter and leave together. After an error with several
    ranks the weights stay the average and steps are refused, because a rank that fails alone cannot send its weights.

    >>> import tilegrad, torch
    >>> from tilegrad.engine.state import averaged
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=1, seq_len=4, ema=0.9)
    >>> x, y = torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]])
    >>> losses = [engine.step(x, y, learning_rate=1e-2) for _ in range(9)]
    >>> with averaged(engine):
    ...     loss = engine.evaluate(x, y)
    >>> engine.evaluate(x, y) < loss < losses[0]  # the average changes later than the weights
    True
    """
    if not engine.spec.ema:
        raise ValueError(
            "ema: got 0.0, which keeps no average of the weights; accepted: an engine with a decay above 0"
        )
    counters(engine)  # waits for submitted steps
    engine._settle()
    engine._begin_average()
    _swap(engine)
    try:
        yield
    except BaseException:
        if engine.ranks.mesh.world == 1:
            _swap(engine)
        raise
    _swap(engine)


def _swap(engine: Engine) -> None:
    engine._pending, engine._averaged = None, not engine._averaged
    with engine._on_stream():
        engine.optimizer.swap_average()
    publish_pieces(engine)
