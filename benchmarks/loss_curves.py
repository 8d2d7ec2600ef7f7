"""`python -m benchmarks.training --losses`: the losses of tilegrad and of a peer, from the same parameters, on a text.

There are two seeds. A seed determines the initial parameters and the order of the windows of the text, for both contenders. Let
ours̄ and peer̄ be the mean losses over blocks of BLOCK steps.

    gap(seed)   rms over blocks of ours̄(seed) − peer̄(seed)         spread   rms over blocks of peer̄(0) − peer̄(1)

The curves agree if both gaps are at most the spread: another contender then changes the losses no more than another seed. The
peer uses the tanh GELU of the engine, because with another GELU the model would be another function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

from tilegrad.text.table import table

from .cases import Case
from .contenders import Entry, Kind, Worker
from .peer import PeerForm

SEEDS = (0, 1)
BLOCK = 25


@dataclass(frozen=True, slots=True)
class Curves:
    """The losses of all steps, a tuple for each seed."""

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
    """The root mean square over blocks of the difference of the block means."""
    squares = [(x - y) ** 2 for x, y in zip(block_means(a), block_means(b), strict=True)]
    return math.sqrt(fmean(squares))


def measure_curves(
    cases: Sequence[Case], peer: Kind | Case, limit_s: float, steps: int, tokens: Path | None = None
) -> dict[str, Curves]:
    """The curves of each case, and of a peer or another case of tilegrad, each with two seeds. All runs have processes of their
    own and take place at once, because nothing is timed. tokens: a file of tokens; None: the shipped text."""
    if steps < BLOCK:
        raise ValueError(f"steps: got {steps}; accepted: an int ≥ {BLOCK}, one block")
    form, other = PeerForm(gelu="tanh"), peer if isinstance(peer, Case) else cases[0]
    kind: Kind = "ours" if isinstance(peer, Case) else peer
    contenders: list[tuple[Kind, Case]] = [(kind, other), *(("ours", case) for case in cases)]
    workers = [[Worker(Entry(*who, form, seed, check_steps=0)) for seed in SEEDS] for who in contenders]
    try:
        for worker in chain.from_iterable(workers):
            worker.ask("curve", steps, tokens)
        reference, *found = [tuple(_curve_of(worker, limit_s) for worker in both) for both in workers]
    finally:
        for worker in chain.from_iterable(workers):
            worker.close()
    name = other.name if isinstance(peer, Case) else peer
    return {case.name: Curves(name, ours, reference) for case, ours in zip(cases, found, strict=True)}


def _curve_of(worker: Worker, limit_s: float) -> tuple[float, ...]:
    for _ in ("started", "curve"):
        answer = worker.answer(limit_s)
        if isinstance(answer, dict) and "failed" in answer:
            entry = worker.entry
            raise RuntimeError(f"{entry.case.name}: {entry.name}, seed {entry.seed}: {answer['failed']}")
    return tuple(answer)


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
