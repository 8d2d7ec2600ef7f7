"""Chooses the results that the backward recomputes, so that the memory plan of a model fits a budget.

The backward may recompute the outputs of the norms, the activation of the feed-forward, or a whole block, which are then not
saved. The costs in FLOPs for each block, with N rows of C channels and F hidden channels:

    norm         ≈ 2 · 8·N·C          activation   ≈ 15·N·F          block   ≈ the block's forward, 2·N·C·(4C + 2F) and more

Without a budget nothing is recomputed if the activations take at most a quarter of the memory of parameters, gradients and
moments. Otherwise the feed-forward's activation is recomputed: one elementwise pass frees a quarter of a block's memory. On
CUDA the norms are recomputed too, because the backward of a norm reads its input and can write its output in the same pass.
With a budget, as few whole blocks as possible are recomputed, then as few activations, then as few norms. A block costs by far
the most FLOPs for each byte that it frees, and a norm the fewest. Earlier blocks are chosen first, because their activations
live longest, and the backward recomputes them when it is done with later blocks. No choice changes the bits of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ..kernels.checks import is_count
from ..memory.planned.arena import MemoryPlan
from ..model.block import Recomputed
from .planning import plan_model, unplanned_bytes
from .spec import Recompute, StepSpec

_SMALL = 1 / 4


class OverBudget(ValueError):
    """Even the smallest plan is larger than the budget."""


def _choice(n_layer: int, norms: int, activations: int, blocks: int) -> Recompute:
    """The first `blocks` blocks recompute everything. Among the others, the first `activations` blocks recompute the
    activation, and the first `norms` blocks recompute the norms."""

    def of(i: int) -> frozenset[Recomputed]:
        if i < blocks:
            return frozenset({"block"})
        counts: dict[Recomputed, int] = {"norm": norms, "activation": activations}
        return frozenset(name for name, count in counts.items() if i - blocks < count)

    return tuple(of(i) for i in range(n_layer))


def choose_recompute(spec: StepSpec, budget: int | None) -> tuple[Recompute, MemoryPlan]:
    """The cheapest choice whose plan takes at most `budget` bytes, and this plan; or an error that says how many bytes are
    needed. budget=None applies the rule without a budget. `spec.recompute` is ignored."""
    n = spec.config.n_layer

    @functools.cache
    def planned(norms: int, activations: int, blocks: int) -> MemoryPlan:
        return plan_model(replace(spec, recompute=_choice(n, norms, activations, blocks)))

    def chosen(norms: int, activations: int, blocks: int) -> tuple[Recompute, MemoryPlan]:
        return _choice(n, norms, activations, blocks), planned(norms, activations, blocks)

    if budget is None:
        plan = planned(0, 0, 0) if spec.accumulate else plan_model(replace(spec, recompute=(), accumulate=True))
        activations_bytes = plan.arenas["activations"].arena_bytes
        if activations_bytes <= _SMALL * (plan.peak_bytes - activations_bytes):
            return chosen(0, 0, 0)
        return chosen(n if spec.device.type == "cuda" else 0, n, 0)
    if not is_count(budget):
        raise ValueError(f"memory_budget: got {budget!r}; accepted: None or a number of bytes ≥ 1")

    def peak(norms: int, activations: int, blocks: int) -> int:
        return planned(norms, activations, blocks).peak_bytes

    if peak(n, n, n) > budget:
        smallest, blocks = min((peak(n, n, blocks), -blocks) for blocks in range(n + 1))
        if smallest > budget:
            parts = "all" if -blocks == n else f"{-blocks} of {n} blocks, and the norms and activations of the others,"
            raise OverBudget(
                f"memory_budget: got {budget:,} bytes; accepted: at least {smallest:,}, with {parts} recomputed"
            )
    blocks = _fewest(n, lambda k: peak(n, n, k) <= budget)
    activations = _fewest(n - blocks, lambda k: peak(n, k, blocks) <= budget)
    norms = _fewest(n - blocks, lambda k: peak(k, activations, blocks) <= budget)
    return chosen(norms, activations, blocks)


def largest_batch(spec: StepSpec, budget: int | None, limit: int) -> tuple[int, int] | None:
    """(batch_size, bytes) of the largest micro-batch whose plan takes at most `limit` bytes if it is chosen as in `train` with
    this budget; None if even one sequence takes more. The batch size of `spec` is ignored.

    A larger batch takes more memory, with one exception: without a budget, activations are recomputed from some batch size on,
    which takes less memory than the batch size before. So the search continues above a batch size that recomputes nothing. With
    a budget, a batch fits if it fits with all blocks recomputed or with all blocks but the last, because no other choice was
    ever the smallest. `train` recomputes to meet the budget, not `limit`: with a budget above `limit` nothing is recomputed.
    """
    n = spec.config.n_layer

    def nbytes(batch_size: int, choice: Recompute) -> int:
        form = replace(spec, batch_size=batch_size, recompute=choice)
        return plan_model(form).peak_bytes + sum(unplanned_bytes(form).values())

    @functools.cache
    def chosen(batch_size: int) -> tuple[int, bool]:
        """(bytes of the plan, whether something is recomputed)"""
        form = replace(spec, batch_size=batch_size)
        choice, plan = choose_recompute(form, budget)
        return plan.peak_bytes + sum(unplanned_bytes(form).values()), any(choice)

    if budget is not None and budget > limit:
        largest = most(lambda b: nbytes(b, ()) <= limit)
    elif budget is not None:
        largest = most(lambda b: any(nbytes(b, _choice(n, n, n, blocks)) <= budget for blocks in (n, n - 1)))
    else:
        largest = most(lambda b: chosen(b)[0] <= limit or not chosen(b)[1])
        largest = largest if largest and chosen(largest)[0] <= limit else most(lambda b: chosen(b)[0] <= limit)
    return (largest, chosen(largest)[0]) if largest else None


def most(holds: Callable[[int], bool]) -> int:
    """The largest n ≥ 1 for which `holds` is true, or 0 if there is none. `holds` must be true for every smaller n ≥ 1."""
    high = 1
    while holds(high):
        high *= 2
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _fewest(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest k ≤ most that fits. Bisection assumes that every larger k fits too. In rare cases `most` does not fit,
    because recomputing a block needs memory; then every k is tried. At least one k must fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low if fits(low) else next(k for k in range(most) if fits(k))
