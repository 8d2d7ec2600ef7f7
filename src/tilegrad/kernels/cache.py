"""The caches of calls, with one eviction rule: a full cache is cleared.

A cache is a module-level dict, read by `.get`. `remember` adds an entry, and keeps memory bounded even if sizes change at every
call. After a clear, entries that are still in use are computed again. A call of attention uses these caches:

    mask.py          masks without tensors, by their numbers
    attention/api    prepared calls, by the signature of a call; calls whose tensors were found to be disjoint, by addresses
    fast_path.cpp    prepared calls in C++, if this file was built
    cuda_launch.py   launches bound to addresses and a stream; fast_path.cpp caches the launches of its own calls
    hopper, triton   compiled kernels, by the arguments that change their code

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
