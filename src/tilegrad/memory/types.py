"""Types of buffers in planned and managed memory, and how a buffer of each type is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, get_args

Reuse = Literal["high", "medium", "low"]
Lifetime = Literal["ephemeral", "iteration", "persistent"]
Role = Literal["params", "frozen", "grads", "optimizer", "cache", "inputs", "activations"]
ROLES: tuple[Role, ...] = ("params", "frozen", "grads", "optimizer", "cache", "inputs", "activations")


class BufferType(StrEnum):
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


class BufferStateError(RuntimeError):
    """Misuse of a buffer. For example, it was freed twice or written after it was freed, is not from this manager, has another
    type, or is part of an autograd graph."""


@dataclass(frozen=True, slots=True)
class BufferConfig:
    """How buffers of one type are used. `AttentionBufferManager` chooses their allocation strategy by these values.

    typical_size_mb   in MiB; requests for more than twice this size use the best-fit slab, unless size classes or NUMA apply
    reuse_frequency   the most buffers that are cached per (type, device): high 10, medium and low 5. With high and
                      prefer_bucketed, requests below 1 MiB are rounded to size classes
    lifetime          how long a buffer is in use; this is documentation only, and has no effect
    alignment         a power of two in bytes; None: at least 64
    """

    typical_size_mb: float
    reuse_frequency: Reuse
    lifetime: Lifetime
    prefer_bucketed: bool = True
    prefer_numa: bool = False
    prefer_pinned: bool = False
    zero_init: bool = True
    alignment: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.typical_size_mb < float("inf"):
            raise ValueError(
                f"typical_size_mb: got {self.typical_size_mb!r}; accepted: a positive, finite number of MiB"
            )
        if self.reuse_frequency not in get_args(Reuse):
            raise ValueError(f"reuse_frequency: got {self.reuse_frequency!r}; accepted: {', '.join(get_args(Reuse))}")
        if self.lifetime not in get_args(Lifetime):
            raise ValueError(f"lifetime: got {self.lifetime!r}; accepted: {', '.join(get_args(Lifetime))}")
        for name in ("prefer_bucketed", "prefer_numa", "prefer_pinned", "zero_init"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {getattr(self, name)!r}; accepted: True or False")
        a = self.alignment
        if a is not None and (not isinstance(a, int) or isinstance(a, bool) or a < 1 or a & (a - 1)):
            raise ValueError(f"alignment: got {a!r}; accepted: None or a power of two, in bytes")


_STREAM = BufferConfig(1.0, "high", "iteration", zero_init=False)

DEFAULT_CONFIGS: Mapping[BufferType, BufferConfig] = MappingProxyType(
    {
        BufferType.QUERY: _STREAM,
        BufferType.KEY: _STREAM,
        BufferType.VALUE: _STREAM,
        BufferType.OUTPUT: BufferConfig(1.0, "high", "iteration", zero_init=True),
        BufferType.SCORES: BufferConfig(
            4.0, "medium", "ephemeral", prefer_bucketed=False, prefer_numa=True, zero_init=False
        ),
        BufferType.WEIGHTS: BufferConfig(
            4.0, "low", "ephemeral", prefer_bucketed=False, prefer_numa=True, zero_init=False
        ),
        BufferType.TEMP: BufferConfig(0.5, "high", "ephemeral", zero_init=False),
        BufferType.COMM: BufferConfig(2.0, "high", "persistent", prefer_pinned=True, zero_init=False),
        BufferType.MASK: BufferConfig(0.1, "high", "persistent", zero_init=False, alignment=64),
        BufferType.CACHE: BufferConfig(
            8.0, "medium", "persistent", prefer_bucketed=False, prefer_numa=True, zero_init=True
        ),
    }
)
