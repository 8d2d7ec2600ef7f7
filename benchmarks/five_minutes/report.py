"""The report on several runs: a table with a row for each contender, and the two goals.

bits per byte     the mean over seeds at the end; the spread is the largest minus the smallest. One seed has no spread, and does
                  not decide the goal that needs one
seconds to …      the time at which a curve, linear between its points, reaches `nanogpt`'s mean at the end; mean over seeds
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from .contenders import CONTENDERS
from .training import Point, Run

BASELINE, RIVAL = "nanogpt", "nanochat"
GOAL_S = 150.0
_GIB = 1 << 30
HEADER = ("contender", "bits per byte", "spread", "seeds", "seconds to nanogpt's", "tokens", "tokens/s", "peak GiB")


def to_json(run: Run) -> str:
    return json.dumps(asdict(run))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of these files. Lines of other kinds, such as the environment's, are skipped."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "curve" in row:
                found.append(Run(**row | {"curve": tuple(Point(**point) for point in row["curve"])}))
    return found


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs with different data, sizes or limits, and two runs of a contender with one seed."""
    for name in ("data_sha256", "size", "limit"):
        values = sorted({getattr(run, name) for run in runs})
        if len(values) > 1:
            raise ValueError(f"runs: got {name} {values[0]} and {values[1]}; accepted: runs that agree in it")
    keys = [(run.contender, run.seed) for run in runs]
    for contender, seed in keys:
        if keys.count((contender, seed)) > 1:
            raise ValueError(f"runs: got {contender} with seed {seed} twice; accepted: once")


def by_contender(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each contender, in the order of CONTENDERS."""
    return {name: own_runs for name in CONTENDERS if (own_runs := [run for run in runs if run.contender == name])}


def seconds_to(bits_per_byte: float, run: Run) -> float | None:
    """The time at which the curve first reaches this value; None if it never does."""
    for a, b in zip(run.curve, run.curve[1:], strict=False):
        if b.bits_per_byte <= bits_per_byte:
            fall = a.bits_per_byte - b.bits_per_byte
            share = (a.bits_per_byte - bits_per_byte) / fall if fall > 0 else 0.0
            return a.seconds + max(0.0, share) * (b.seconds - a.seconds)
    return None


def spread(runs: Sequence[Run]) -> float | None:
    values = [run.bits_per_byte for run in runs]
    return max(values) - min(values) if len(values) > 1 else None


def report(runs: Sequence[Run]) -> str:
    check_comparable(runs)
    groups = by_contender(runs)
    baseline = fmean(run.bits_per_byte for run in groups[BASELINE]) if BASELINE in groups else None
    rows = []
    for name, own_runs in groups.items():
        speed = sum(run.tokens for run in own_runs) / sum(run.seconds for run in own_runs)
        tokens, peak = fmean(run.tokens for run in own_runs), max(run.peak_bytes for run in own_runs)
        rows.append(
            [
                name, f"{fmean(run.bits_per_byte for run in own_runs):.4f}", _spread(own_runs), str(len(own_runs)),
                _seconds(_mean_seconds(own_runs, baseline)), f"{tokens:,.0f}", f"{speed:,.0f}", f"{peak / _GIB:.2f}",
            ]
        )  # fmt: skip
    lines = [" | ".join(row) for row in (HEADER, ["---", *["---:"] * (len(HEADER) - 1)], *rows)]
    return "\n".join([*(f"| {line} |" for line in lines), *_goals(groups, baseline)])


def _mean_seconds(runs: Sequence[Run], target: float | None) -> float | None:
    found = [] if target is None else [seconds_to(target, run) for run in runs]
    reached = [value for value in found if value is not None]
    return fmean(reached) if reached and len(reached) == len(found) else None


def _spread(runs: Sequence[Run]) -> str:
    return "–" if (value := spread(runs)) is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _goals(groups: dict[str, list[Run]], baseline: float | None) -> list[str]:
    """A line for each goal that these runs can decide."""
    lines = []
    for name in ("muon", "muon-fp8"):
        if name not in groups:
            continue
        own_runs = groups[name]
        if RIVAL in groups:
            ahead = fmean(run.bits_per_byte for run in groups[RIVAL]) - fmean(run.bits_per_byte for run in own_runs)
            spreads = [each for each in (spread(own_runs), spread(groups[RIVAL])) if each is not None]
            goal = "more than the spread, which needs two seeds of each"
            if len(spreads) == 2:
                goal = f"more than {max(spreads):.4f}, {'met' if ahead > max(spreads) else 'missed'}"
            lines.append(f"{name}: {ahead:+.4f} bits per byte below {RIVAL}; goal: {goal}")
        if baseline is not None:
            took = _mean_seconds(own_runs, baseline)
            verdict = "met" if took is not None and took <= GOAL_S else "missed"
            lines.append(f"{name}: {_seconds(took)} s to {BASELINE}'s {baseline:.4f}; goal: ≤ {GOAL_S:g} s, {verdict}")
    return ["", *lines] if lines else []
