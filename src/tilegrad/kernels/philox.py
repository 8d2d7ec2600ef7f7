"""The dropout mask that every kernel draws: Philox4×32-10 as a pure function of (seed, b, h, i, j).

    word(b, h, i, j) = first word of Philox4×32-10(counter = (j, i, h, b), key = (seed mod 2³², seed div 2³²))
    keep(b, h, i, j) = word ≥ floor(p · 2³²)          dropped = not kept

One round maps the counter (c0, c1, c2, c3) under the key (k0, k1) to
    (hi(M1·c2) ^ c1 ^ k0,  lo(M1·c2),  hi(M0·c0) ^ c3 ^ k1,  lo(M0·c0)),
and the key advances by the Weyl constants. 32-bit words are in int64 tensors: a product wraps modulo 2⁶⁴, and both of its
32-bit halves are still correct. Until the last round c1 and c3 are whole products, because the next round only adds (^) their
low halves to words that are then cut to 32 bits. `philox` converts its constants to 0-d tensors, because torch would
convert a number in every op. It does so in each call, because an import under FakeTensorMode would make fake tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10
NO_SEQUENCE = 0xFFFFFFFF  # b of masks outside attention
WORK_BUFFERS = 6  # int64 buffers of the mask's size that `drop_mask` needs

Key = int | Tensor
Keys = list[tuple[Key, Key]]


def threshold(dropout_p: float) -> int:
    """floor(p · 2³²): words below it are dropped."""
    return math.floor(dropout_p * 2**32)


def signed(seed: int) -> int:
    """The 64 bits of a seed as a signed integer: seeds from 2⁶³ on become negative."""
    return seed - 2**64 if seed >= 2**63 else seed


def round_keys(seed: int | Tensor) -> Keys:
    """The ten round keys. A seed tensor on the CPU is read here. On a device it stays a tensor, for captured steps."""
    if isinstance(seed, Tensor) and seed.device.type == "cpu":
        seed = int(seed)
    k0: Key = seed & _LOW
    k1: Key = (seed >> 32) & _LOW
    keys = []
    for _ in range(_ROUNDS):
        keys.append((k0, k1))
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return keys


def round_keys_of_rows(seeds: Tensor, *, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The ten round keys of each row's seed, one after the other in `keys`.       seeds (N,), keys (2, N) int64"""
    k0, k1 = keys[:, :, None]
    k0.copy_(seeds[:, None]).bitwise_and_(_LOW)
    k1.copy_(seeds[:, None]).bitwise_right_shift_(32).bitwise_and_(_LOW)
    for _ in range(_ROUNDS):
        yield k0, k1
        k0.add_(_W0).bitwise_and_(_LOW)
        k1.add_(_W1).bitwise_and_(_LOW)


def philox(counter: Sequence[Tensor], keys: Iterable[tuple[Key, Key]], work: Sequence[Tensor]) -> None:
    """Ten rounds in place. `counter` is four int64 tensors of one shape, `work` two more. A key is an int or has a shape that
    broadcasts to the counter's shape."""
    c0, c1, c2, c3 = counter
    low, high = work
    m0, m1, mask, shift = (torch.tensor(x, device="cpu") for x in (_M0, _M1, _LOW, 32))
    for k0, k1 in keys:
        torch.mul(c0, m0, out=low)
        torch.mul(c2, m1, out=high)
        torch.bitwise_right_shift(high, shift, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(mask)
        torch.bitwise_right_shift(low, shift, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(mask)
        c1, c3, low, high = high, low, c3, c1
    for words in counter[1], counter[3]:  # after an even number of swaps c1 and c3 are in their own buffers
        words.bitwise_and_(mask)


def drop_mask(
    keys: Keys,
    dropout_p: float,
    batch: Tensor,
    heads: Tensor,
    rows: Tensor,
    cols: Tensor,
    *,
    dropped: Tensor,
    work: Tensor,
) -> None:
    """Fills dropped[b, h, i, j] from int64 index vectors.   dropped (B, H, M, N) bool   work (6, B, H, M, N) int64"""
    c0, c1, c2, c3, low, high = work
    c0.copy_(cols)
    c1.copy_(rows[:, None])
    c2.copy_(heads[:, None, None])
    c3.copy_(batch[:, None, None, None])
    philox((c0, c1, c2, c3), keys, (low, high))
    torch.lt(c0, threshold(dropout_p), out=dropped)
