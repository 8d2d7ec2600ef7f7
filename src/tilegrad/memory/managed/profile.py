"""What a tracked manager writes down: totals per type and per scope, and each buffer's life as a trace.

Times are nanoseconds of `time.perf_counter_ns`, from the moment the profile was made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ..types import BufferType

MAX_LIVES = 1_000_000


@dataclass(slots=True)
class ScopeStats:
    allocations: int = 0
    cache_hits: int = 0
    bytes_allocated: int = 0
    bytes_in_use: int = 0
    bytes_peak: int = 0

    def take(self, nbytes: int, *, hit: bool) -> None:
        self.allocations += 1
        self.cache_hits += hit
        self.bytes_allocated += nbytes
        self.bytes_in_use += nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_in_use)


@dataclass(slots=True)
class TypeProfile:
    """time_ns: spent inside allocate and deallocate; lifetime_ns: summed over the buffers that came back or died."""

    count: int = 0
    bytes: int = 0
    time_ns: int = 0
    ended: int = 0
    lifetime_ns: int = 0
    bytes_in_use: int = 0
    bytes_high_water: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """One buffer from its allocation to its end; `last_ns` is None while it is in use."""

    type: BufferType
    label: str
    scope: str
    strategy: str
    nbytes: int
    first_ns: int
    last_ns: int | None


class Profile:
    def __init__(self) -> None:
        self.start_ns = time.perf_counter_ns()
        self.types = {type: TypeProfile() for type in BufferType}
        self.lives_dropped = 0
        self._ended: list[Life] = []
        self._open: dict[object, Life] = {}

    def begin(self, slot: object, life: Life, *, began_ns: int) -> None:
        row = self.types[life.type]
        row.count += 1
        row.bytes += life.nbytes
        row.bytes_in_use += life.nbytes
        row.bytes_high_water = max(row.bytes_high_water, row.bytes_in_use)
        row.time_ns += self.now() - began_ns
        self._open[slot] = life

    def end(self, slot: object, *, began_ns: int | None) -> None:
        """The buffer came back (began_ns: when its deallocate was called) or its last holder dropped it (None)."""
        life = self._open.pop(slot)
        last = self.now()
        row = self.types[life.type]
        row.ended += 1
        row.bytes_in_use -= life.nbytes
        row.lifetime_ns += last - life.first_ns
        if began_ns is not None:
            row.time_ns += last - began_ns
        if len(self._ended) < MAX_LIVES:
            self._ended.append(Life(life.type, life.label, life.scope, life.strategy, life.nbytes, life.first_ns, last))
        else:
            self.lives_dropped += 1

    def now(self) -> int:
        return time.perf_counter_ns() - self.start_ns

    def lives(self) -> list[Life]:
        return sorted([*self._ended, *self._open.values()], key=lambda life: life.first_ns)

    def type_stats(self, type: BufferType) -> dict[str, Any]:
        row = self.types[type]
        return {
            "count": row.count,
            "bytes": row.bytes,
            "time_ms": row.time_ns / 1e6,
            "mean_lifetime_ms": row.lifetime_ns / row.ended / 1e6 if row.ended else 0.0,
            "high_water_bytes": row.bytes_high_water,
        }


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """The trace event format: one row per type with each buffer's life, and the bytes in use per type as counters."""
    now = profile.now()
    rows = {type: index for index, type in enumerate(BufferType, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": type.name}}
        for type, row in rows.items()
    ]
    steps: list[tuple[int, BufferType, int]] = []
    for number, life in enumerate(profile.lives()):
        last = now if life.last_ns is None else life.last_ns
        common = {"cat": "buffer", "name": life.label, "pid": 1, "tid": rows[life.type], "id": number}
        args = {"bytes": life.nbytes, "scope": life.scope, "strategy": life.strategy, "freed": life.last_ns is not None}
        events.append({**common, "ph": "b", "ts": life.first_ns / 1e3, "args": args})
        events.append({**common, "ph": "e", "ts": last / 1e3})
        steps.append((life.first_ns, life.type, life.nbytes))
        if life.last_ns is not None:
            steps.append((last, life.type, -life.nbytes))
    in_use = dict.fromkeys(rows, 0)
    for at, type, step in sorted(steps, key=lambda s: s[0]):
        in_use[type] += step
        events.append(
            {
                "ph": "C",
                "name": "bytes in use",
                "pid": 1,
                "ts": at / 1e3,
                "args": {t.name: n for t, n in in_use.items()},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"lives_dropped": profile.lives_dropped}}
