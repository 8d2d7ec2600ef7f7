"""The oracle of dilated attention: whole T×T masks, one pair of loops over branches and heads, autograd for the gradients.

Positions are told by their number alone: t is in segment t div s at place t mod s, and place p is attended where
p mod r = offset mod r and p ≥ offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def covered(t: int, segment: int, rate: int, offset: int) -> Tensor:
    """Which of T positions a branch attends among, (T,) bool."""
    place = torch.arange(t) % min(segment, max(t, 1))
    return (place >= offset) & ((place - offset) % rate == 0)


def attended(t: int, segment: int, rate: int, offset: int, *, causal: bool) -> Tensor:
    """Which pairs attend, (T, T) bool."""
    position = torch.arange(t)
    at, number = covered(t, segment, rate, offset), position // min(segment, max(t, 1))
    pairs = (number[:, None] == number) & at[:, None] & at
    return pairs & (position[:, None] >= position) if causal else pairs


def dilated(
    q: Tensor, k: Tensor, v: Tensor, segment_lengths: Sequence[int], dilation_rates: Sequence[int], *, mode: str, causal: bool
) -> Tensor:  # fmt: skip
    """y (B, H, T, Dv) in q's dtype; float64 makes it the oracle."""
    b, h, t, d = q.shape
    n = len(segment_lengths)
    heads_of = [h // n + (g < h % n) for g in range(n)]
    y = []
    for head in range(h):
        s = q[:, head] @ k[:, head].mT * d**-0.5
        parts, lses = [], []
        for g, (segment, rate) in enumerate(zip(segment_lengths, dilation_rates, strict=True)):
            if mode == "head_groups" and not sum(heads_of[:g]) <= head < sum(heads_of[: g + 1]):
                continue
            offset = (g if mode == "head_groups" else head) % rate
            masked = s.masked_fill(~attended(t, segment, rate, offset, causal=causal).to(s.device), -torch.inf)
            at = covered(t, segment, rate, offset).to(s.device)
            p = torch.softmax(masked[:, at], -1)
            parts.append(v.new_zeros(b, t, v.shape[-1]).index_put((slice_of(b), at.nonzero()[:, 0]), p @ v[:, head]))
            lses.append(masked.new_full((b, t), -torch.inf).index_put((slice_of(b), at.nonzero()[:, 0]), masked[:, at].logsumexp(-1)))
        if mode == "head_groups":
            y.append(parts[0] / n)
            continue
        lse = torch.stack(lses)
        seen = (lse > -torch.inf).any(0)
        share = torch.softmax(lse.masked_fill(~seen, 0.0), 0)
        y.append((share[..., None] * torch.stack(parts)).sum(0) * seen[..., None])
    return torch.stack(y, 1)


def slice_of(b: int) -> Tensor:
    return torch.arange(b)[:, None]
