"""The caches of calls, with one eviction rule: a full cache is cleared.

A cache is a module-level dict, read by `.get`; `remember` adds to it. If sizes change at every call, memory stays bounded.
Entries still in use are computed again after a clear. A call of attention uses five caches:

    mask.py          masks without tensors, by their numbers
    attention/api    prepared calls, by the signature of a call
    eager.cpp        the same in C++, if it was built
    cuda_launch.py   launches bound to addresses and a stream (in eager.cpp if that runs the call)
    hopper, triton   compiled kernels, by what changes their code

Constants of a process or a device (functools.cache) do not count as caches here.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_ENTRIES = 4096


def remember(cache: dict[K, V], key: K, value: V) -> V:
    """cache[key] = value. Clears a full cache first."""
    if len(cache) >= MOST_ENTRIES:
        cache.clear()
    cache[key] = value
    return value
