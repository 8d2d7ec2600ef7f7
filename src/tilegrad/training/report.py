"""The report of a run, as one self-contained page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TypeAlias

from ..memory.page import filled_page, human
from .config import RunConfig
from .log import Record
from .resident import Resident

_CHARTS = (  # name in the records, heading, unit, whether the axis begins at 0
    ("loss", "Loss", "nats per token", False),
    ("learning_rate", "Learning rate", "", True),
    ("gradient_norm", "Gradient norm", "before clipping", True),
    ("tokens_per_second", "Tokens per second", "", True),
    ("measured_bytes", "Memory measured", "MiB", True),
)
_SCALES = {"measured_bytes": 2.0**-20}
Curve: TypeAlias = dict[str, object]  # a curve in the form that report.html reads
Table = Sequence[tuple[str, ...]]  # rows, each of a name and its values
_MEANS = 60  # a running mean is over 1/_MEANS of the records


def run_report(
    title: str,
    records: Sequence[Record],
    *,
    facts: Mapping[str, str],
    sample: str,
    tables: Mapping[str, Table] = MappingProxyType({}),
    unigram_entropy: float | None = None,
    planned_bytes: int | None = None,
    memory_page: str = "",
) -> str:
    """A self-contained HTML page: curves of the loss (train, its running mean, validation, and the unigram entropy as a
    level), the learning rate, the gradient norm, the tokens per second and the measured memory (with the plan as a level);
    tables; the memory of a step; a sample.

    records       the result of `read_log`: the kinds "train" and "validation" are drawn; null is a gap in the curve
    tables        heading → table, from `run_tables`
    memory_page   the page of `memory_report(…).html()` or `timeline_page(…)`; "": none
    The pointer shows every value. If points share a column of pixels, the lowest and the highest are drawn.
    """
    charts = [
        {"from_zero": from_zero, "series": _series(records, name), "levels": []} for name, _, _, from_zero in _CHARTS
    ]
    if unigram_entropy is not None:
        charts[0]["levels"] = [{"name": "unigram entropy", "y": unigram_entropy}]
    if planned_bytes is not None:
        charts[-1]["levels"] = [{"name": "planned", "y": planned_bytes * _SCALES["measured_bytes"]}]
    parts = {
        "charts": _sections(),
        "tables": "".join(_table(heading, rows) for heading, rows in tables.items()),
        "memory": f'<iframe title="Memory of one step" srcdoc="{html.escape(memory_page)}"></iframe>'
        if memory_page
        else "",
        "sample": f"<section><h2>A sample of what it writes</h2><pre>{html.escape(sample)}</pre></section>"
        if sample
        else "",
    }
    return filled_page("training/report.html", title, facts, charts, parts)


def run_tables(
    run: RunConfig, records: Sequence[Record], environment: Mapping[str, object], measured: Resident
) -> dict[str, Table]:
    """Tables of every hyper-parameter, the record of the data in the log, the environment, and the memory by role."""
    plain = run.plain()
    data = next((record for record in reversed(records) if record["kind"] == "data"), {})
    counted = {name: value for name, value in data.items() if name not in ("step", "kind")}
    return {
        "Model": _rows(plain["model"]),
        "Training": _rows(plain["train"]),
        "Optimizer": _rows(plain["optimizer"]),
        "Data": _rows(plain["data"]),
        **({"Adapters": _rows(plain["lora"])} if "lora" in plain else {}),
        "Text": _rows(counted),
        "Environment": _rows(environment),
        "Memory by role": [
            ("", "resident"),
            *((role, human(nbytes)) for role, nbytes in measured.arenas.items()),
            ("the plan's arenas", human(sum(measured.arenas.values()))),
            ("planned", human(measured.planned_bytes)),
            (f"outside the plan: {measured.unplanned}", human(measured.unplanned_bytes)),
            ("not counted: code and text from files", human(measured.file_bytes)),
        ],
    }


def _rows(values: Mapping[str, object]) -> Table:
    return [(name, _text(value)) for name, value in values.items()]


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(heading: str, rows: Table) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}' for cell in row)}</tr>" for row in rows)
    return f"<section><h2>{html.escape(heading)}</h2><table>{lines}</table></section>"


def _series(records: Sequence[Record], name: str) -> list[Curve]:
    train, validation = (_points(records, kind, name) for kind in ("train", "validation"))
    width = math.ceil(len(train) / _MEANS)
    smooth = name == "loss" and width > 1
    series = [_curve("train" if name == "loss" else "", train, "first", faint=smooth)]
    if smooth:
        series.append(_curve(f"mean of {width}", _running_mean(train, width), "first"))
    if validation:
        series.append(_curve("validation", validation, "second", dots=True))
    return series


def _points(records: Sequence[Record], kind: str, name: str) -> list[tuple[int, float | None]]:
    """(step, value) of each record of this kind; if a step has several, of the last."""
    scale = _SCALES.get(name)
    values = {r["step"]: r[name] for r in records if r["kind"] == kind and name in r}
    return [(step, y if scale is None or y is None else y * scale) for step, y in sorted(values.items())]


def _running_mean(points: Sequence[tuple[int, float | None]], width: int) -> list[tuple[int, float | None]]:
    """The mean of the finite values among the `width` points around each point, fewer at the ends."""
    finite = [0, *accumulate(y is not None for _, y in points)]
    total = [0.0, *accumulate(y or 0.0 for _, y in points)]
    out: list[tuple[int, float | None]] = []
    for i, (step, _) in enumerate(points):
        first, last = max(0, i - width // 2), min(len(points), i - width // 2 + width)
        count = finite[last] - finite[first]
        out.append((step, (total[last] - total[first]) / count if count else None))
    return out


def _curve(
    name: str, points: Sequence[tuple[int, float | None]], colour: str, *, faint: bool = False, dots: bool = False
) -> Curve:
    x, y = [step for step, _ in points], [value for _, value in points]
    return {"name": name, "x": x, "y": y, "colour": colour, "faint": faint, "dots": dots}


def _sections() -> str:
    """The frames of the charts: the loss in a row of its own, the others side by side if there is room."""
    keys = '<p class="keys">Point at, tap or focus a chart: ← → step through the run in all of them.</p>'
    large, *small = (
        f'<section data-chart="{name}"{" class=large" if name == "loss" else ""}>'
        f"<h2>{heading}<small>{unit}</small></h2>"
        f'<div class="legend" aria-live="polite"></div>'
        f'<div class="chart" tabindex="0" role="application" aria-label="{heading} by step. Arrow keys move.">'
        f"<canvas></canvas><canvas></canvas></div>{keys if name == 'loss' else ''}</section>"
        for name, heading, unit, _ in _CHARTS
    )
    return f'{large}<div class="small">{"".join(small)}</div>'
