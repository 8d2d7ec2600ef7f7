"""The vocabulary of both memory sides: what a buffer is for, and how that kind of buffer is used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Reuse = Literal["high", "medium", "low"]
Lifetime = Literal["ephemeral", "iteration", "persistent"]


class BufferType(Enum):
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    SCORES = "scores"
    WEIGHTS = "weights"
    TEMP = "temp"
    COMM = "comm"
    MASK = "mask"
    CACHE = "cache"


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """How one type of buffer is used; `AttentionBufferManager` picks its strategy from this."""

    typical_size_mb: float
    reuse_frequency: Reuse
    lifetime: Lifetime
    prefer_bucketed: bool = True
    prefer_numa: bool = False
    prefer_pinned: bool = False
    zero_init: bool = True
    alignment: int | None = None
