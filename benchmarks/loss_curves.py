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


def measure_curves(case: Case, peer: Kind | Case, limit_s: float, steps: int) -> Curves:
    """Runs two contenders with two seeds each, all four at once in processes of their own, because nothing is timed. peer: a
    peer, or another case of tilegrad."""
    if steps < BLOCK:
        raise ValueError(f"steps: got {steps}; accepted: an int ≥ {BLOCK}, one block")
    form = PeerForm(gelu="tanh")
    other: Kind = "ours" if isinstance(peer, Case) else peer
    of_other = peer if isinstance(peer, Case) else case
    name = of_other.name if isinstance(peer, Case) else peer
    pairs: dict[str, tuple[Kind, Case]] = {"": ("ours", case), name: (other, of_other)}
    workers = {
        (key, seed): Worker(Entry(kind, of_kind, form, seed, check_steps=0))
        for key, (kind, of_kind) in pairs.items()
        for seed in SEEDS
    }
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
    ours, theirs = (tuple(answers[key, seed] for seed in SEEDS) for key in pairs)
    return Curves(name, ours, theirs)


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
