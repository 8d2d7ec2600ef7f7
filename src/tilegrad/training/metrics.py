"""The records and events of a run's steps, and the count of steps that were skipped because they were not finite."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import NamedTuple

from ..data.batches import BatchesState
from ..data.documents import Numbers, Show, quiet
from ..text.atomic import named
from .log import RunLog


class Position(NamedTuple):
    """The state of a run without weights and moments, which a skipped step does not change."""

    engine: dict[str, int]
    data: BatchesState
    train_loss: float


class InFlight(NamedTuple):
    """A submitted step whose result is not read yet."""

    step: int  # steps done before it
    draws: int
    data: BatchesState
    learning_rate: float
    tokens: int  # tokens that all ranks read for this step, padding not counted
    tokens_seen: int  # tokens that were read for this step and all steps before it


class SkippedSteps:
    """Counts the steps that were skipped because they were not finite. `last_finite_state` is the position before the current
    sequence of skipped steps; after ten in a row the run returns to it."""

    def __init__(self, total: int, in_a_row: int, position: Position) -> None:
        self.total, self.in_a_row, self.last_finite_state = total, in_a_row, position

    def count(self, norm: float, before: InFlight, seed: int, train_loss: float) -> None:
        """Count a step by its gradient norm."""
        if math.isfinite(norm):
            self.in_a_row = 0
            return
        if not self.in_a_row:
            counters = {"steps": before.step, "skipped": self.total, "skipped_in_a_row": 0}
            self.last_finite_state = Position(
                {"seed": seed, "draws": before.draws, **counters}, before.data, train_loss
            )
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1


class Metrics:
    """Writes a run's records to its log and shows its events. `stopped` gets a signal's name if the output is closed."""

    def __init__(self, show: Show, log: RunLog | None, stopped: list[str]) -> None:
        self._show, self._log, self._stopped = show, log, stopped

    def log(self, step: int, kind: str, numbers: Numbers) -> None:
        if self._log is not None:
            self._log.append(step, kind, numbers)

    def emit(self, event: str, numbers: Numbers) -> None:
        try:
            self._show(event, numbers)
        except OSError as error:
            self._show = quiet
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise named(error, Path("output")) from error
            self._stopped.append("SIGPIPE" if error.errno == errno.EPIPE else "SIGHUP")
