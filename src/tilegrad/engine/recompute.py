"""What to recompute so that a model's memory plan fits a budget.

Three things may be computed anew in the backward instead of being kept: the outputs of the norms, the activation of the
feed-forward, a whole block. Their price in FLOPs per block, N rows of C channels and F hidden ones:

    norm         ≈ 2 · 8·N·C          activation   ≈ 15·N·F          block   ≈ the block's forward, 2·N·C·(4C + 2F) and more

Without a budget nothing is recomputed while that fits into a quarter of the memory that a model has anyway (parameters,
gradients, moments); beyond, the activations are, a quarter of a block's memory for one elementwise pass; and on CUDA the norms
too, where the backward that reads their input writes their output in the same pass.
With one: a norm costs the least for each byte it frees, a block by far the most. So as few whole blocks as will do; then as few
activations; then as few norms. Earlier blocks are chosen first: what they keep lives longest, and they are
recomputed when the later ones are gone. Whatever is chosen, gradients have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..model.block import Recomputed
from ..model.config import ModelConfig
from .planning import Recompute, beside, plan_model

_SMALL = 1 / 4


class OverBudget(ValueError):
    """No choice of what to recompute keeps a plan within its budget."""


def _choice(n_layer: int, norms: int, activations: int, blocks: int) -> Recompute:
    """The first blocks recompute: `blocks` of them everything, the next their activations and norms as counted."""

    def of(i: int) -> frozenset[Recomputed]:
        if i < blocks:
            return frozenset({"block"})
        counts: dict[Recomputed, int] = {"norm": norms, "activation": activations}
        return frozenset(name for name, count in counts.items() if i - blocks < count)

    return tuple(of(i) for i in range(n_layer))


def choose_recompute(
    config: ModelConfig, batch_size: int, seq_len: int, dtype: torch.dtype, device: torch.device, budget: int | None,
    **options: Any,
) -> Recompute:  # fmt: skip
    """The cheapest choice whose plan is at most `budget` bytes, or an error that says how many would do; None: the usual.
    `options` are plan_model's."""
    n = config.n_layer
    if budget is None:
        everything = plan_model(config, batch_size, seq_len, dtype, device, **options)
        kept = everything.arenas["activations"].arena_bytes
        small = kept <= _SMALL * (everything.peak_bytes - kept)
        if small:
            return _choice(n, norms=0, activations=0, blocks=0)
        return _choice(n, norms=n if device.type == "cuda" else 0, activations=n, blocks=0)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise ValueError(f"memory_budget: got {budget!r}; accepted: None or a number of bytes ≥ 1")

    @functools.cache
    def peak(norms: int, activations: int, blocks: int) -> int:
        choice = _choice(n, norms, activations, blocks)
        sizes = (config, batch_size, seq_len, dtype, device)
        return plan_model(*sizes, choice, **options).peak_bytes

    if peak(n, n, n) > budget:
        smallest, blocks = min((peak(n, n, blocks), -blocks) for blocks in range(n + 1))
        if smallest > budget:
            what = "all" if -blocks == n else f"{-blocks} of {n} blocks, and the norms and activations of the others,"
            raise OverBudget(
                f"memory_budget: got {budget:,} bytes; accepted: at least {smallest:,}, with {what} recomputed"
            )
    blocks = _fewest(n, lambda k: peak(n, n, k) <= budget)
    activations = _fewest(n - blocks, lambda k: peak(n, k, blocks) <= budget)
    norms = _fewest(n - blocks, lambda k: peak(k, activations, blocks) <= budget)
    return _choice(n, norms, activations, blocks)


def largest_batch(
    config: ModelConfig, seq_len: int, dtype: torch.dtype, device: torch.device, budget: int | None, limit: int,
    **options: Any,
) -> tuple[int, int] | None:  # fmt: skip
    """(batch_size, bytes) of the largest micro-batch whose plan, chosen as `train` does with this budget, takes at most `limit`
    bytes; None where that of one sequence takes more.

    A larger batch takes more memory, but for one place: without a budget activations are recomputed from some size on, and the
    first batch that does so takes less than the one before it. So the search goes on above a batch that recomputes nothing.
    With one, a batch fits where all blocks recomputed, or all but the last, fit: no other choice was ever the smallest. A
    budget above `limit` recomputes nothing that only `limit` needs.
    """
    n = config.n_layer

    def nbytes(batch_size: int, choice: Recompute) -> int:
        plan = plan_model(config, batch_size, seq_len, dtype, device, choice, **options)
        return plan.peak_bytes + sum(beside(device, batch_size, seq_len).values())

    def chosen(batch_size: int) -> Recompute:
        return choose_recompute(config, batch_size, seq_len, dtype, device, budget, **options)

    @functools.cache
    def usual(batch_size: int) -> tuple[bool, bool]:
        """Whether it fits, and whether something is recomputed."""
        choice = chosen(batch_size)
        return nbytes(batch_size, choice) <= limit, any(choice)

    if budget is not None and budget > limit:
        found = _most(lambda b: nbytes(b, ()) <= limit)
    elif budget is not None:
        found = _most(lambda b: any(nbytes(b, _choice(n, n, n, blocks)) <= budget for blocks in (n, n - 1)))
    else:
        found = _most(lambda b: usual(b)[0] or not usual(b)[1])
        found = found if found and usual(found)[0] else _most(lambda b: usual(b)[0])
    return (found, nbytes(found, chosen(found))) if found else None


def _most(holds: Callable[[int], bool]) -> int:
    """The largest n ≥ 1 of which it holds, by doubling and bisection, as if it held of every smaller one; 0 where of none."""
    high = 1
    while holds(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fewest(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest k ≤ most that fits, by bisection, as if more always did. Rarely `most` itself does not, for a block's
    own recomputation takes memory too; then every k is tried. At least one fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low if fits(low) else next(k for k in range(most) if fits(k))
