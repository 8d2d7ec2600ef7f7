"""The timeline page of planned and managed memory: bytes alive over time, by kind of buffer.

A `Span` is one value of a buffer. The value is alive at the times first ≤ t < last, in ops or ms. A span of activations
or of a managed buffer has the colour of its `BufferType`; a span of another role has the colour of the role.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from .types import ROLES, BufferType

_SERIES = (*(role for role in ROLES if role != "activations"), *(type.value for type in BufferType))
LARGEST = 20


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    type: BufferType
    first: float
    last: float
    nbytes: int
    role: str = ""
    layer: str = ""
    number: int = 0  # distinguishes buffers of the same name

    @property
    def series(self) -> str:
        """The name in the legend: the role of a persistent buffer, otherwise the type."""
        return self.role if self.role in _SERIES else self.type.value


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, for a group of buffers: their bytes at the peak of the program, and at the peak of the group."""

    name: str
    buffers: int
    at_peak_bytes: int
    at_most_bytes: int


def timeline_page(title: str, spans: Sequence[Span], *, unit: str, facts: Mapping[str, str]) -> str:
    """A self-contained HTML page: bytes alive over time, stacked and coloured by type, with a mark at the peak, the name of
    the buffer under the mouse pointer, totals by type, and the largest buffers alive at the peak."""
    moment, _ = peak_of(spans)
    alive = alive_at(spans, moment)
    when = f"op {moment:,.0f}" if unit == "op" else f"{moment:,.3f} {unit}"
    parts = {
        "legend": _legend(spans, alive),
        "largest_heading": html.escape(f"Largest at the peak, {when}" if alive else "Nothing was alive"),
        "largest": _largest(alive),
    }
    return filled_page("memory/page.html", title, facts, _data(spans, unit), parts)


def filled_page(template: str, title: str, facts: Mapping[str, str], data: object, parts: Mapping[str, str]) -> str:
    """A page of the package: a template with the head that all pages share, the title, the facts, the data as JSON, and other
    parts."""
    folder = resources.files("tilegrad")
    texts = {
        "head": folder.joinpath("memory/head.html").read_text(encoding="utf-8"),
        "title": html.escape(title),
        "facts": "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()),
        **parts,
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    page = folder.joinpath(template).read_text(encoding="utf-8")
    for name, text in texts.items():  # no text after the head contains a placeholder, because "<" is escaped
        page = page.replace(f"<!--{name}-->", text)
    return page


def human(nbytes: int) -> str:
    """1536 → 1.50 KiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def peak_of(spans: Iterable[Span]) -> tuple[float, int]:
    """(time, bytes): the first time at which the most bytes are alive, and the number of these bytes."""
    change: dict[float, int] = {}
    for span in spans:
        change[span.first] = change.get(span.first, 0) + span.nbytes
        change[span.last] = change.get(span.last, 0) - span.nbytes
    moment, most, total = 0.0, 0, 0
    for t in sorted(change):
        total += change[t]
        if total > most:
            moment, most = t, total
    return moment, most


def alive_at(spans: Iterable[Span], moment: float) -> tuple[Span, ...]:
    alive = [span for span in spans if span.first <= moment < span.last and span.nbytes]
    return tuple(sorted(alive, key=lambda span: (-span.nbytes, span.name)))


def by_group(spans: Iterable[Span], alive: Iterable[Span], group: Callable[[Span], str]) -> tuple[Row, ...]:
    """One row per group of buffers, in order of first appearance."""
    members: dict[str, list[Span]] = {}
    for span in spans:
        members.setdefault(group(span), []).append(span)
    at_peak = dict.fromkeys(members, 0)
    for span in alive:
        at_peak[group(span)] += span.nbytes
    return tuple(
        Row(name, len({(span.name, span.number) for span in group_spans}), at_peak[name], peak_of(group_spans)[1])
        for name, group_spans in members.items()
    )


def _legend(spans: Sequence[Span], alive: Iterable[Span]) -> str:
    rows = {row.name: row for row in by_group(spans, alive, lambda span: span.series)}
    return "".join(
        f'<tr><td><button type="button" aria-pressed="true" data-series="{name}">'
        f'<span class="swatch" style="background:var(--{name})"></span>{name}</button>'
        f'<td class="number">{human(row.at_peak_bytes)}<td class="number">{human(row.at_most_bytes)}'
        f'<td class="number">{row.buffers:,}</tr>'
        for name in reversed(_SERIES)
        if (row := rows.get(name))
    )


def _largest(alive: Sequence[Span]) -> str:
    total = sum(span.nbytes for span in alive)
    rows = []
    for span in alive[:LARGEST]:
        where = " · ".join(filter(None, (span.type.value, span.role, span.layer)))
        rows.append(
            f'<tr><td><div class="named"><span class="swatch" style="background:var(--{span.series})"></span>'
            f"<span>{html.escape(span.name)}<small>{html.escape(where)}</small></span></div>"
            f'<td class="number">{human(span.nbytes)}<small>{span.nbytes / total:.1%}</small></tr>'
        )
    rest = alive[LARGEST:]
    if rest:
        rows.append(
            f'<tr><td>and {len(rest):,} smaller<td class="number">{human(sum(span.nbytes for span in rest))}</tr>'
        )
    return "".join(rows)


def _data(spans: Iterable[Span], unit: str) -> dict[str, object]:
    """The spans that have bytes and a duration, in stacking order, with one list per column."""
    rank = {name: index for index, name in enumerate(_SERIES)}
    shown = [span for span in spans if span.nbytes and span.first < span.last]
    shown.sort(key=lambda span: (rank[span.series], span.first, -span.last, span.name))
    return {
        "unit": unit,
        "series": list(_SERIES),
        "of": [rank[span.series] for span in shown],
        "name": [span.name for span in shown],
        "type": [span.type.value for span in shown],
        "role": [span.role for span in shown],
        "layer": [span.layer for span in shown],
        "first": [span.first for span in shown],
        "last": [span.last for span in shown],
        "bytes": [span.nbytes for span in shown],
    }
