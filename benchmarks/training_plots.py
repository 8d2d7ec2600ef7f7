"""Pictures of a training benchmark: speed and memory, the breakdown, loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from .breakdown import Breakdown
from .loss_curves import SEEDS, Curves, block_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .training import Row

Drawn: TypeAlias = "list[Row] | Mapping[str, Breakdown | Curves]"
_COLORS = {"ours": "#1f6f8b", "compiled": "#e07a3f", "eager": "#b8b8b8"}


def draw(found: Drawn, about: Mapping[str, object], path: Path) -> None:
    """Draw rows as bars, {case: Breakdown} as bars with floors, {case: Curves} as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if isinstance(found, list):
        figure = _bars(pyplot, found)
    else:
        breakdowns = {name: value for name, value in found.items() if isinstance(value, Breakdown)}
        curves = {name: value for name, value in found.items() if isinstance(value, Curves)}
        figure = _floors(pyplot, breakdowns) if breakdowns else _lines(pyplot, curves)
    figure.suptitle(
        f"{about['device']}, torch {about['torch']}, tilegrad {about['commit']}, {about['date']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(pyplot: ModuleType, rows: Sequence[Row]) -> Figure:
    names = [f"{row.case}\n{row.contender}" for row in rows]
    colors = [_COLORS[row.contender] for row in rows]
    figure: Figure
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6.0, 0.9 * len(rows)), 7), sharex=True)
    axes[0].bar(names, [(row.speed or 0.0) / 1e3 for row in rows], color=colors)
    axes[0].set_ylabel("thousand tokens/s, sustained")
    axes[1].bar(names, [(row.allocated_bytes or 0) / 2**30 for row in rows], color=colors)
    axes[1].set_ylabel("peak GiB allocated")
    axes[1].tick_params(axis="x", labelsize=7, rotation=45)
    return figure


def _floors(pyplot: ModuleType, found: Mapping[str, Breakdown]) -> Figure:
    figure: Figure
    figure, axes = pyplot.subplots(1, len(found), figsize=(7 * len(found), 6), squeeze=False)
    for axis, (name, breakdown) in zip(axes[0], found.items(), strict=True):
        groups = [(g.group, g.ms, g.floor_ms or 0.0) for g in breakdown.groups] + [("gaps", breakdown.gaps_ms, 0.0)]
        labels, ms, floors = zip(*reversed(groups), strict=True)
        axis.barh(labels, ms, color=_COLORS["ours"], label="measured")
        axis.barh(labels, floors, height=0.35, color=_COLORS["compiled"], label="floor")
        axis.set_xlabel(f"ms of a step of {breakdown.span_ms:.1f} ms ({name})")
        axis.legend()
    return figure


def _lines(pyplot: ModuleType, found: Mapping[str, Curves]) -> Figure:
    figure: Figure
    figure, axes = pyplot.subplots(1, len(found), figsize=(7 * len(found), 5), squeeze=False)
    for axis, (name, curves) in zip(axes[0], found.items(), strict=True):
        for kind, runs in (("ours", curves.ours), (curves.peer_name, curves.peer)):
            for seed, losses, style in zip(SEEDS, runs, ("-", "--"), strict=True):
                means = block_means(losses)
                steps = [len(losses) * (i + 0.5) / len(means) for i in range(len(means))]
                axis.plot(steps, means, style, color=_COLORS[kind], label=f"{kind}, seed {seed}")
        axis.set_xlabel(f"step ({name})")
        axis.set_ylabel("loss")
        axis.legend()
    return figure
