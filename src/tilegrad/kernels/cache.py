"""Caches of what a call worked out, under a key of all that it depends on: one rule for every one of them.

A cache is a dictionary of its module, looked up by `.get`. `remember` bounds it: a full cache is emptied. Sizes that change
with every call then hold no memory, and those of a loop are worked out once more.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_ENTRIES = 4096


def remember(cache: dict[K, V], key: K, value: V) -> V:
    """cache[key] = value."""
    if len(cache) >= MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value
