"""The results of `bench attention`: a table, ratios, and a plot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import quantiles
from typing import NamedTuple

import torch

from ..text.table import table
from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the result."""

    shape: Shape
    direction: str
    kernel: str
    ms: float | None  # the median over rounds; None if the kernel did not run, and `note` says why
    p20_ms: float | None = None
    p80_ms: float | None = None
    note: str = ""
    rounds_ms: tuple[float, ...] = ()  # the time of each round

    @property
    def tflops(self) -> float | None:
        return None if self.ms is None else self.shape.flops(backward=self.direction == "backward") / self.ms / 1e9


class Ratio(NamedTuple):
    """Quartiles, over rounds, of the ratio between the times of two kernels."""

    median: float
    q1: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:.3f}× [{self.q1:.2f} {self.q3:.2f}]"


def speedups(rows: Sequence[Row], kernel: str, peer: str, direction: str) -> dict[Shape, Ratio]:
    """shape → (time of `peer`) / (time of `kernel`), as quartiles over the rounds, for the shapes that both kernels ran.
    Quartiles are interpolated between logarithms, so exchanging `kernel` and `peer` inverts the median."""
    times = {(row.shape, row.kernel): row.rounds_ms for row in rows if row.direction == direction and row.rounds_ms}
    ratios_of = {}
    for (shape, name), ours in times.items():
        theirs = times.get((shape, peer))
        if name == kernel and theirs is not None:
            ratios = [log(b / a) for a, b in zip(ours, theirs, strict=True)]
            q1, median, q3 = map(exp, quantiles(ratios, n=4, method="inclusive"))
            ratios_of[shape] = Ratio(median, q1, q3)
    return ratios_of


def packed_rates(rows: Sequence[Row], kernel: str, direction: str) -> list[float]:
    """TFLOP/s of packed sequences divided by TFLOP/s of the dense shape that follows them. shapes.py makes these pairs."""
    rates = {row.shape: row.tflops for row in rows if (row.kernel, row.direction) == (kernel, direction) and row.tflops}
    pairs = itertools.pairwise(rates)
    return [rates[a] / rates[b] for a, b in pairs if a.lengths and not b.lengths]


def _geometric_mean(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).log().mean().exp())


def report(rows: Sequence[Row], kernels: Sequence[str], peers: Sequence[str]) -> str:
    lines = [
        [
            str(row.shape),
            row.direction,
            row.kernel,
            f"{row.ms:.3f}",
            f"{row.p20_ms:.3f}",
            f"{row.p80_ms:.3f}",
            f"{row.tflops:.3g}",
        ]
        for row in rows
        if row.ms is not None
    ]
    text = [table(("shape", "pass", "kernel", "ms", "p20", "p80", "TFLOP/s"), lines)]
    directions = ("forward", "backward")
    shapes = list(dict.fromkeys(row.shape for row in rows))
    opponents = (*(k for k in kernels if len(kernels) > 1), *peers)
    gains = {
        (kernel, peer, direction): ratios
        for kernel in kernels
        for peer in opponents
        for direction in directions
        if kernel != peer and (ratios := speedups(rows, kernel, peer, direction))
    }
    if gains:
        pairs = list(dict.fromkeys((kernel, peer) for kernel, peer, _ in gains))
        cells = [
            [str(shape), direction]
            + [
                str(gains[kernel, peer, direction][shape]) if shape in gains.get((kernel, peer, direction), {}) else "–"
                for kernel, peer in pairs
            ]
            for direction in directions
            for shape in shapes
            if any(shape in ratios for (_, _, d), ratios in gains.items() if d == direction)
        ]
        text += ["", table(("shape", "pass", *(f"{kernel} / {peer}" for kernel, peer in pairs)), cells)]
        medians = {names: [ratio.median for ratio in ratios.values()] for names, ratios in gains.items()}
        means = [
            [*names, f"{_geometric_mean(ratios):.3f}×", f"{min(ratios):.3f}×", str(len(ratios))]
            for names, ratios in medians.items()
        ]
        text += ["", table(("kernel", "faster than", "pass", "geometric mean", "least", "shapes"), means)]
    for kernel in kernels:
        for direction in directions:
            if rates := packed_rates(rows, kernel, direction):
                text += [
                    "",
                    f"{kernel}, {direction}: packed at {', '.join(f'{x:.2f}' for x in rates)} of the dense rate",
                ]
    notes = sorted({f"{row.kernel}: {row.note}" for row in rows if row.note})
    return "\n".join([*text, "", *notes])


def plot_bars(rows: Sequence[Row], about: dict[str, object], path: str) -> None:
    """Draw bars of TFLOP/s, one group for each shape, forward above backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.kernel for row in rows if row.ms is not None))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(8, 1.2 * len(shapes)), 8), sharex=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for n, name in enumerate(names):
            speed = {row.shape: row.tflops for row in rows if row.kernel == name and row.direction == direction}
            x = [i + (n - len(names) / 2) * 0.8 / len(names) for i in range(len(shapes))]
            axis.bar(x, [speed.get(shape) or 0.0 for shape in shapes], 0.8 / len(names), label=name, align="edge")
        axis.set_ylabel(f"{direction}, TFLOP/s")
        axis.legend(ncols=len(names), fontsize=8)
    axes[1].set_xticks(range(len(shapes)), [str(shape).replace(" ", "\n", 2) for shape in shapes], fontsize=7)
    axes[0].set_title(f"attention, {about['dtype']}, {about['device']}, torch {about['torch']}, {about['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
