"""The pattern of allocations in one iteration, learned from earlier iterations.

An iteration is a sequence of events (key, +1) and (key, −1). Two numbers per key matter for the next iteration: how
many buffers were taken, and the most that were in use at once, not counting those in use at the start:

    peak(key) = max over time of Σ ±1

Iterations are alike if both numbers agree for every key. After `ALIKE` such iterations, peak(key) buffers are cached.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

ALIKE = 3


def demand(events: Iterable[tuple[Key, int]]) -> dict[Key, tuple[int, int]]:
    """key → (taken, peak), for the keys that were taken at least once."""
    taken: dict[Key, int] = {}
    in_use: dict[Key, int] = {}
    peak: dict[Key, int] = {}
    for key, step in events:
        in_use[key] = in_use.get(key, 0) + step
        if step > 0:
            taken[key] = taken.get(key, 0) + 1
            peak[key] = max(peak.get(key, 0), in_use[key])
    return {key: (count, peak[key]) for key, count in taken.items()}


class PatternLearner(Generic[Key]):
    """`plan` maps each key to the number of buffers to cache in advance. It is {} until enough iterations in a row were
    alike."""

    def __init__(self) -> None:
        self.alike = 0
        self.broken = 0
        self.plan: dict[Key, int] = {}
        self._last: dict[Key, tuple[int, int]] = {}

    def observe(self, seen: dict[Key, tuple[int, int]]) -> None:
        """Adds the `demand` of one iteration. {} breaks any pattern."""
        if seen and seen == self._last:
            self.alike += 1
        else:
            self.broken += bool(self.plan)
            self.alike = 1 if seen else 0
            self.plan = {}
        self._last = seen
        if self.alike >= ALIKE and not self.plan:
            self.plan = {key: peak for key, (_, peak) in seen.items() if peak > 0}
