"""`python -m benchmarks.training --losses`: losses of ours and of the peer, from the same parameters, on a text.

Two seeds; a seed gives the initial parameters and the order of the text's windows, to both alike. Over blocks of BLOCK
steps, with a bar for a block's mean loss,

    gap(seed)   rms over blocks of ours̄(seed) − peer̄(seed)         spread   rms over blocks of peer̄(0) − peer̄(1)

The curves agree where both gaps are at most the spread: the curves do not show who trained. The peer has the
tanh GELU, as the engine does: else it is another function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tilegrad.text.table import table

from .cases import Case
from .contenders import Entry, Kind, Worker
from .peer import PeerForm

SEEDS = (0, 1)
BLOCK = 25


@dataclass(frozen=True, slots=True)
class Curves:
    """Losses by step, a tuple for each seed."""

    peer_name: str
    ours: tuple[tuple[float, ...], ...]
    peer: tuple[tuple[float, ...], ...]

    @property
    def gaps(self) -> tuple[float, ...]:
        return tuple(distance(a, b) for a, b in zip(self.ours, self.peer, strict=True))

    @property
    def spread(self) -> float:
        return distance(self.peer[0], self.peer[1])

    @property
    def agree(self) -> bool:
        return all(gap <= self.spread for gap in self.gaps)


def block_means(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[i : i + BLOCK]) for i in range(0, len(losses), BLOCK)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square over blocks of the difference of their means."""
    squares = [(x - y) ** 2 for x, y in zip(block_means(a), block_means(b), strict=True)]
    return math.sqrt(fmean(squares))


def measure_curves(case: Case, peer: Kind, limit_s: float, steps: int) -> Curves:
    """All four runs at once, each in its process: nothing is timed."""
    if steps < BLOCK:
        raise ValueError(f"steps: got {steps}; accepted: an int ≥ {BLOCK}, one block")
    form = PeerForm(gelu="tanh")
    kinds: tuple[Kind, ...] = ("ours", peer)
    workers = {(kind, seed): Worker(Entry(kind, case, form, seed, check_steps=0)) for kind in kinds for seed in SEEDS}
    try:
        for worker in workers.values():
            worker.ask("curve", steps)
        answers = {}
        for key, worker in workers.items():
            for _ in ("started", "curve"):
                answer = worker.answer(limit_s)
                if isinstance(answer, dict) and "failed" in answer:
                    raise RuntimeError(f"{case.name}: {worker.entry.name}, seed {key[1]}: {answer['failed']}")
            answers[key] = tuple(answer)
    finally:
        for worker in workers.values():
            worker.close()
    ours, theirs = (tuple(answers[kind, seed] for seed in SEEDS) for kind in kinds)
    return Curves(peer, ours, theirs)


def report(curves: Curves) -> str:
    columns = [block_means(losses) for losses in (*curves.ours, *curves.peer)]
    steps = len(curves.ours[0])
    rows = [
        [f"{i * BLOCK} … {min((i + 1) * BLOCK, steps) - 1}", *(f"{value:.4f}" for value in values)]
        for i, values in enumerate(zip(*columns, strict=True))
    ]
    names = [f"{name}, seed {seed}" for name in ("ours", curves.peer_name) for seed in SEEDS]
    gaps = " and ".join(f"{gap:.4f}" for gap in curves.gaps)
    verdict = "agree" if curves.agree else "DO NOT agree"
    return (
        f"losses of {steps} steps, means of {BLOCK}\n{table(('steps', *names), rows)}\n"
        f"The curves {verdict}: ours and the {curves.peer_name} peer's differ by {gaps} (rms over blocks, per seed); the "
        f"peer's two seeds differ by {curves.spread:.4f}."
    )
