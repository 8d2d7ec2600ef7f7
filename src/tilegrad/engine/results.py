"""The results of submitted steps, until `Engine.finished` returns them."""

from __future__ import annotations

from .capture import StepQueue
from .optimizer import NonFiniteError, Optimizer, StepResult


class Results:
    def __init__(self, optimizer: Optimizer, queue: StepQueue | None) -> None:
        self._optimizer, self._queue = optimizer, queue
        self._kept: list[StepResult] = []

    def collect(self, *, wait: bool) -> None:
        if self._queue is not None:
            self.record(self._queue.finished(wait=wait))

    def record(self, results: list[StepResult]) -> None:
        """Keep results for `take`, which returns them even if counting them raises."""
        self._kept.extend(results)
        self.count(results)

    def count(self, results: list[StepResult]) -> None:
        """Count steps. After ten skipped steps in a row, the steps still in flight are skipped too. Then the guard is reset, so
        that training can continue, and NonFiniteError is raised."""
        try:
            for result in results:
                self._optimizer.count(result)
        except NonFiniteError:
            if self._queue is not None:
                self._queue.finished(wait=True)
            self._optimizer.in_a_row.zero_()
            raise

    def take(self) -> list[StepResult]:
        """The results, oldest first, each once."""
        results, self._kept = self._kept, []
        return results

    def take_last(self) -> StepResult:
        """The result of the step that was submitted last, after waiting for it."""
        self.collect(wait=True)
        return self._kept.pop()

    def drop(self) -> None:
        """Forget all results, including those of steps in flight."""
        if self._queue is not None:
            self._queue.finished(wait=True)
        self._kept = []
