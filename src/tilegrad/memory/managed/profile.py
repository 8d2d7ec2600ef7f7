"""Reports of a manager: counts and bytes of its cache; with profiling also totals per type, and the life of each buffer as a
Chrome trace and as an HTML page.

Times are in nanoseconds since the profile was created, by `time.perf_counter_ns`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..page import Span, human, timeline_page
from ..types import BufferType
from .cache import BufferCache

MAX_LIVES = 1_000_000


class Scope(str):
    """The name of a scope. The object lives as long as the scope's `with` block."""


OpenScope: TypeAlias = "tuple[weakref.ref[Scope], OpenScope | None]"  # a scope and its enclosing scope


@dataclass(slots=True)
class ScopeStats:
    allocations: int = 0
    cache_hits: int = 0
    bytes_allocated: int = 0
    bytes_peak: int = 0

    def take(self, nbytes: int, in_use: int, *, hit: bool) -> None:
        self.allocations += 1
        self.cache_hits += hit
        self.bytes_allocated += nbytes
        self.bytes_peak = max(self.bytes_peak, in_use)


@dataclass(slots=True)
class TypeProfile:
    """time_ns: time in allocate and deallocate; lifetime_ns: sum of the lifetimes of buffers that were freed or dropped."""

    count: int = 0
    bytes: int = 0
    time_ns: int = 0
    ended: int = 0
    lifetime_ns: int = 0
    bytes_high_water: int = 0


@dataclass(frozen=True, slots=True)
class Life:
    """The life of one buffer, from its allocation to its end; `last_ns` is None while the buffer is in use."""

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
        self._open[slot] = life
        row.count += 1
        row.bytes += life.nbytes
        in_use = sum(other.nbytes for other in list(self._open.values()) if other.type is life.type)
        row.bytes_high_water = max(row.bytes_high_water, in_use)
        row.time_ns += self.now() - began_ns

    def end(self, slot: object, *, began_ns: int | None) -> None:
        """Ends the life of a buffer. began_ns: when the call of `deallocate` began; None: nothing referenced the buffer any
        more."""
        life = self._open.pop(slot, None)
        if life is None:  # an interrupted call ended it already
            return
        last = self.now()
        row = self.types[life.type]
        row.ended += 1
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
        return sorted([*self._ended, *list(self._open.values())], key=lambda life: life.first_ns)

    def type_stats(self, type: BufferType) -> dict[str, float]:
        row = self.types[type]
        return {
            "count": row.count,
            "bytes": row.bytes,
            "time_ms": row.time_ns / 1e6,
            "mean_lifetime_ms": row.lifetime_ns / row.ended / 1e6 if row.ended else 0.0,
            "high_water_bytes": row.bytes_high_water,
        }


def chrome_trace(profile: Profile) -> dict[str, object]:
    """The profile in the trace event format: one row per type with the lives of its buffers, and the bytes in use per type as
    counters."""
    now = profile.now()
    rows = {type: index for index, type in enumerate(BufferType, start=1)}
    events: list[dict[str, object]] = [
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


def lives_page(profile: Profile, stats: Mapping[str, Any]) -> str:
    """The life of every buffer as one self-contained HTML page."""
    now, lives = profile.now(), profile.lives()
    spans = [
        Span(
            name=life.label,
            type=life.type,
            first=life.first_ns / 1e6,
            last=(now if life.last_ns is None else life.last_ns) / 1e6,
            nbytes=life.nbytes,
            role=life.strategy,
            layer=life.scope,
            number=number,
        )
        for number, life in enumerate(lives)
    ]
    facts = {
        "buffers": f"{sum(row.count for row in profile.types.values()):,}",
        "cache hit rate": f"{stats['cache_hit_rate']:.1%}",
        "peak": human(stats["bytes_peak"]),
        "in use": human(stats["bytes_in_use"]),
        "cached": human(stats["bytes_cached"]),
        "quarantined": str(stats["quarantined"]),
    }
    if profile.lives_dropped:
        facts["not shown"] = f"{profile.lives_dropped:,} buffers"
    return timeline_page("Attention buffers", spans, unit="ms", facts=facts)


def cache_stats(cache: BufferCache, profile: Profile | None) -> dict[str, Any]:
    """Counts and bytes, in total and per type."""
    pools = list(cache.pools.values())
    in_use = cache.in_use()
    per_type = {str(type): _type_stats(cache, type, profile) for type in BufferType}
    hits, misses = sum(p.hits for p in pools), sum(p.misses for p in pools)
    return {
        "cache_hits": hits,
        "cache_misses": misses,
        "cache_hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "bytes_in_use": in_use,
        "bytes_live": in_use - cache.slack(),
        "bytes_cached": cache.cached,
        "bytes_reserved": cache.reserved(),
        "bytes_peak": cache.peak,
        "evictions": sum(p.evictions for p in pools),
        "quarantined": sum(p.quarantined for p in pools),
        "strategies": dict(cache.strategies.counts),
        "fragmentation": cache.strategies.fragmentation(),
        "pinned": any(p.pinned for p in pools),
        "cache_limits": {str(d): limit.max_bytes for d, limit in list(cache.limits.items())},
        "cached_buffers": sum(row["buffers_cached"] for row in per_type.values()),
        "preallocated_buffers": cache.preallocated,
        "per_type": per_type,
        "buffer_types": per_type,
    }


def _type_stats(cache: BufferCache, type: BufferType, profile: Profile | None) -> dict[str, float]:
    pools = [pool for pool in list(cache.pools.values()) if pool.type is type]
    in_use = [slot for slot in list(cache.slots.values()) if slot.pool.type is type]
    stats: dict[str, float] = {
        "allocations": sum(p.hits + p.misses for p in pools),
        "cache_hits": sum(p.hits for p in pools),
        "cache_misses": sum(p.misses for p in pools),
        "evictions": sum(p.evictions for p in pools),
        "quarantined": sum(p.quarantined for p in pools),
        "buffers_in_use": len(in_use),
        "buffers_cached": sum(len(p.free) for p in pools),
        "bytes_in_use": sum(slot.nbytes for slot in in_use),
        "bytes_cached": sum(slot.nbytes for p in pools for slot in list(p.free)),
        "pinned": any(p.pinned for p in pools),
    }
    return stats if profile is None else {**stats, **profile.type_stats(type)}
