"""Live ranges → addresses: values that are alive together never overlap, and the arena is as small as the search finds.

A request is a buffer of `nbytes` that is alive during `live`, inclusive ranges of op indices. The buffer keeps one address for
all of these ranges. L = max over ops t of Σ nbytes alive at t (`lower_bound`): no arena is smaller than L. With several
ranges even the optimum may be larger than L: if a, b and c are alive in pairs, but never all three at once, they still need
three addresses. The optimum is NP-hard to find, so `plan` packs greedily in several orders and keeps the best result:

    pack      place each request, in the given order, into the lowest (or the tightest) gap between conflicting requests
    orders    six: by size, size × duration, breadth (`_Item`), first use, duration, and first use + duration. In each order,
              requests with a given offset come first
    repair    move a request at the arena's top, or a random request, earlier in the order; keep the result if it is not worse

The search stops at the bound L, or after a number of passes that follows from the requests, but never after a time. So the same
requests give the same plan on every machine. This module uses only the standard library.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, compress
from operator import or_, xor
from types import MappingProxyType

_WORK = 20_000_000  # the most work of one plan, in requests² summed over passes: about a second
_REPAIRS = 20  # passes of repair for each percent above the bound
_STRIDE = 64  # how many moments each precomputed union of live items covers
_BOOLS = bytes.maketrans(b"01", b"\0\1")


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    nbytes: int
    live: tuple[tuple[int, int], ...]  # ((first, last), …) in op order, both ends included
    offset: int | None = None  # a given address; None: `plan` chooses one


@dataclass(frozen=True, slots=True)
class Plan:
    """The offset of each request in an arena of `arena_bytes`; `lower_bound_bytes` is the most bytes alive at once."""

    offsets: Mapping[str, int]
    arena_bytes: int
    lower_bound_bytes: int
    align: int


def plan(requests: Iterable[Request], *, align: int = 64, share: bool = True) -> Plan:
    """Offsets, multiples of `align`, such that requests alive at the same op never overlap.

    `share=False` gives each request bytes of its own, in the given order, after the requests with a given offset. Buffers that
    live for the whole program have this layout. For activations this layout is the baseline.
    """
    requests = tuple(requests)
    _check(requests, align)
    if share:
        offsets = _search(requests, align)
    else:
        fixed_ends = [r.offset + r.nbytes for r in requests if r.offset is not None]
        offsets, end = [], _round_up(max(fixed_ends, default=0), align)
        for request in requests:
            if request.offset is not None:
                offsets.append(request.offset)
                continue
            offsets.append(end)
            end += _round_up(request.nbytes, align)
    return Plan(
        MappingProxyType({request.name: offset for request, offset in zip(requests, offsets, strict=True)}),
        max((offset + request.nbytes for request, offset in zip(requests, offsets, strict=True)), default=0),
        lower_bound(requests),
        align,
    )


def lower_bound(requests: Iterable[Request]) -> int:
    """The most bytes alive at one op: no arena can be smaller."""
    return max(_live_bytes((request.nbytes, request.live) for request in requests).values(), default=0)


def _live_bytes(values: Iterable[tuple[int, Sequence[tuple[int, int]]]]) -> dict[int, int]:
    """op → bytes alive from that op on, for each op at which a value begins or has ended."""
    change: dict[int, int] = {}
    for nbytes, live in values:
        for first, last in live:
            change[first] = change.get(first, 0) + nbytes
            change[last + 1] = change.get(last + 1, 0) - nbytes
    total, alive = 0, {}
    for op in sorted(change):
        total += change[op]
        alive[op] = total
    return alive


def _round_up(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align


def _check(requests: Sequence[Request], align: int) -> None:
    if align < 1:
        raise ValueError(f"align: got {align}; accepted: the alignment of every offset in bytes, at least 1")
    names: set[str] = set()
    for request in requests:
        if request.name in names:
            raise ValueError(f"two requests are named {request.name!r}: names must be unique in a plan, rename one")
        names.add(request.name)
        if request.nbytes < 0:
            raise ValueError(f"request {request.name!r} has nbytes={request.nbytes}; accepted: at least 0")
        if not request.live:
            raise ValueError(f"request {request.name!r} has live=(), so it is never alive; leave it out")
        previous = -1
        for first, last in request.live:
            if not previous < first <= last:
                raise ValueError(
                    f"request {request.name!r} has live={request.live}; accepted: ranges (first, last) with "
                    "0 <= first <= last, in order and disjoint"
                )
            previous = last
    end = 0
    for offset, nbytes, name in sorted((r.offset, r.nbytes, r.name) for r in requests if r.offset is not None):
        if offset < end or offset % align:
            raise ValueError(
                f"request {name!r} has offset={offset}; accepted: a multiple of {align} that is at least {end}, where the "
                "request before it ends"
            )
        end = offset + nbytes


@dataclass(frozen=True, slots=True)
class _Item:
    """A request in the form that `_pack` needs. Byte i of `conflicts` is 1 if item i is ever alive together with this item,
    otherwise 0. `size` is padded."""

    index: int
    size: int
    conflicts: bytes
    first: int
    duration: int
    breadth: int  # the most bytes of all items that are alive at one moment while this item is alive
    offset: int | None


@dataclass(frozen=True, slots=True)
class _Packing:
    top: int  # padded size of the arena
    offsets: list[int]  # by item index
    order: list[_Item]
    tightest: bool


def _search(requests: Sequence[Request], align: int) -> list[int]:
    items, bound = _items(requests, align)
    passes = max(1, _WORK // (len(items) ** 2 + 1))
    best: _Packing | None = None
    for order, tightest in _orders(items):
        packing = _pack(order, tightest=tightest, below=best.top if best else None)
        passes -= 1
        if packing and (best is None or packing.top < best.top):
            best = packing
        if passes == 0 or (best and best.top == bound):
            break
    assert best is not None
    if best.top > bound:
        best = _repair(best, bound, min(passes, 1 + _REPAIRS * 100 * (best.top - bound) // bound))
    return best.offsets


def _items(requests: Sequence[Request], align: int) -> tuple[list[_Item], int]:
    """The items to pack, and the most padded bytes alive at once. If two values are ever alive together, they are alive
    together when one of them begins, so only the moments at which a value begins are compared."""
    sizes = [_round_up(request.nbytes, align) for request in requests]
    begins = sorted({first for request in requests for first, _ in request.live})
    spans = [[(bisect_left(begins, first), bisect_right(begins, last)) for first, last in r.live] for r in requests]
    alive_bytes = _live_bytes((size, request.live) for size, request in zip(sizes, requests, strict=True))
    bytes_at = [alive_bytes[begin] for begin in begins]
    changes = [0] * (len(begins) + 1)
    for index, spans_of_one in enumerate(spans):
        for moment in chain.from_iterable(spans_of_one):
            changes[moment] ^= 1 << index
    alive = list(accumulate(changes, xor))  # the items alive at each moment
    alive_in = [reduce(or_, alive[at : at + _STRIDE]) for at in range(0, len(alive), _STRIDE)]
    items = []
    for index, (size, request) in enumerate(zip(sizes, requests, strict=True)):
        conflicts = duration = breadth = 0
        for (first, last), (low, high) in zip(request.live, spans[index], strict=True):
            a, b = -(-low // _STRIDE), high // _STRIDE
            if a < b:
                conflicts |= reduce(or_, (*alive[low : a * _STRIDE], *alive_in[a:b], *alive[b * _STRIDE : high]))
            else:
                conflicts |= reduce(or_, alive[low:high])
            duration += last - first + 1
            breadth = max(breadth, *bytes_at[low:high])
        by_index = f"{conflicts:0{len(requests)}b}"[::-1].encode().translate(_BOOLS)
        items.append(_Item(index, size, by_index, request.live[0][0], duration, breadth, request.offset))
    return items, max(bytes_at, default=0)


def _orders(items: Sequence[_Item]) -> Iterator[tuple[list[_Item], bool]]:
    """(order, tightest) to pack with, the most promising first: each order with the lowest and with the tightest gap."""
    for order in (
        sorted(items, key=lambda i: (-i.size, -i.duration, i.index)),
        sorted(items, key=lambda i: (-i.size * i.duration, -i.size, i.index)),
        sorted(items, key=lambda i: (-i.breadth, -i.size, i.index)),
        sorted(items, key=lambda i: (i.first, -i.size, i.index)),
        sorted(items, key=lambda i: (-i.duration, -i.size, i.index)),
        sorted(items, key=lambda i: (-i.first - i.duration, -i.size, i.index)),
    ):
        order.sort(key=lambda i: i.offset is None)
        yield order, False
        yield order, True


def _pack(order: list[_Item], *, tightest: bool, below: int | None = None) -> _Packing | None:
    """Places each item at its given offset, or in the lowest (or the tightest) gap that fits. None if the arena gets larger
    than `below`."""
    placed: list[tuple[int, int]] = []  # (offset, end), by offset
    indices: list[int] = []  # item indices, in the order of `placed`
    offsets = [0] * len(order)
    top = 0
    for item in order:
        size = item.size
        end_below, start, smallest = 0, -1, 0
        for offset, end in compress(placed, map(item.conflicts.__getitem__, indices)) if item.offset is None else ():
            gap = offset - end_below
            if gap >= size and (start < 0 or gap < smallest):
                start, smallest = end_below, gap
                if not tightest:
                    break
            if end > end_below:
                end_below = end
        if item.offset is not None:
            start = item.offset
        elif start < 0:
            start = end_below
        if start + size > top:
            top = start + size
            if below is not None and top > below:
                return None
        if size:
            place = bisect_right(placed, (start, start + size))
            placed.insert(place, (start, start + size))
            indices.insert(place, item.index)
        offsets[item.index] = start
    return _Packing(top, offsets, order, tightest)


def _repair(best: _Packing, bound: int, passes: int) -> _Packing:
    """Seeded local search over orders. Even passes move an item that ends at the arena's top earlier in the order, odd passes
    move a random item. Items with a given offset stay first."""
    chance, fixed = random.Random(0), sum(item.offset is not None for item in best.order)
    for iteration in range(passes):
        order = best.order.copy()
        highest = [i for i, item in enumerate(order) if i >= fixed and best.offsets[item.index] + item.size == best.top]
        if best.top == bound or not highest:
            break
        i = chance.choice(highest) if iteration % 2 == 0 else chance.randrange(fixed, len(order))
        item = order.pop(i)
        order.insert(chance.randrange(fixed, i + 1), item)
        best = _pack(order, tightest=best.tightest, below=best.top) or best
    return best
