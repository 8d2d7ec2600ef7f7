"""The validation loss, over the same held-out windows each time."""

from __future__ import annotations

from ..data.batches import batches_in_order
from ..engine.batch import Batch, count_targets
from ..engine.engine import Engine
from .config import TrainConfig
from .dataset import Dataset
from .ranks import Ranks


class Evaluator:
    def __init__(self, dataset: Dataset, engine: Engine, ranks: Ranks, settings: TrainConfig) -> None:
        self._dataset, self._engine, self._ranks, self._settings = dataset, engine, ranks, settings
        self.loss: float | None = None  # of the last evaluation

    def run(self) -> float | None:
        """The mean loss; None if no window is held out. Each rank evaluates its share, and the losses are summed."""
        t, dataset, engine, mesh = self._settings, self._dataset, self._engine, self._ranks.mesh
        if not len(dataset.windows) or not t.eval_batches:
            return None
        dataset.file.check_length()
        batches = batches_in_order(
            dataset.held_out,
            t.batch_size,
            t.seq_len,
            most=t.eval_batches,
            windows=dataset.windows,
            rank=self._ranks.group,
            world=self._ranks.groups,
        )
        total, count = 0.0, 0.0
        for tokens, targets, cu_seqlens in engine.ranks.padded([Batch(*given) for given in batches]):
            mesh.at(f"step {engine.steps}: evaluating")
            n = count_targets(targets)
            total += engine.evaluate(tokens, targets, cu_seqlens=cu_seqlens) * n
            count += n
        if mesh.world > 1:
            total, count = mesh.sum(total, count)
        self.loss = total / count
        return self.loss
