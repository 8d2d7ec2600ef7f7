"""The caches of a call, and the one rule by which entries leave them: a full cache is emptied.

A cache is a dictionary of its module, read by `.get`; `remember` adds to it. With sizes that change at every call a cache then
holds a bounded amount of memory, and what a loop needs again is computed once more. A call of attention meets five:

    mask.py          masks without tensors, by their numbers
    attention/api    prepared calls, by the signature of a call
    eager.cpp        the same in C++, where it was built
    cuda_launch.py   launches bound to addresses and a stream (in eager.cpp where it runs the call)
    hopper, triton   compiled kernels, by what changes their code

Facts of a process or a device that never change (functools.cache) are no caches in this sense.
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
