"""What memory a program needs, and when: as text, as data, and as a page. Either side of memory can show its timeline.

A `Span` is one value of a buffer, alive for first ≤ t < last in some unit of time. Spans of activations and managed
buffers are grouped by `BufferType`, spans of persistent roles by their role. `peak_bytes` is what is allocated, the sum
of all arenas; `max_live_bytes` is the most that holds a value at one op, and less by what the planner could not pack.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources

from ..types import BufferType
from .arena import MemoryPlan, plan_memory
from .trace import ROLES

_SERIES = (*(role for role in ROLES if role != "activations"), *(type.value for type in BufferType))
_LARGEST = 20


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    type: BufferType
    first: float
    last: float
    nbytes: int
    role: str = ""
    layer: str = ""

    @property
    def series(self) -> str:
        """The colour of the span: its type, or its role where it lives for the whole program."""
        return self.role if self.role in _SERIES else self.type.value


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: how many buffers, their bytes at the peak of the program, and the most at any moment."""

    name: str
    buffers: int
    at_peak_bytes: int
    at_most_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    title: str
    device: str
    peak_bytes: int
    max_live_bytes: int
    unshared_bytes: int  # what would be allocated if no two buffers shared an address
    ops: int
    peak_op: int
    peak_op_name: str
    roles: tuple[Row, ...]  # of a role, at_most_bytes is the size of its arena
    types: tuple[Row, ...]  # activations only: what else there is, the roles say
    layers: tuple[Row, ...]
    alive: tuple[Span, ...]  # at the peak, the largest first
    spans: tuple[Span, ...]

    @property
    def saved_bytes(self) -> int:
        return self.unshared_bytes - self.peak_bytes

    def table(self) -> str:
        """Plain text, aligned: human units beside exact bytes."""
        share = self.saved_bytes / self.unshared_bytes if self.unshared_bytes else 0.0
        return "\n".join(
            (
                self.title,
                "",
                f"allocated      {_exact(self.peak_bytes)} on {self.device}, the sum of {len(self.roles)} arenas",
                f"alive at most  {_exact(self.max_live_bytes)}, at {self._moment()}",
                f"sharing saves  {_exact(self.saved_bytes)}, {share:.1%} of {human(self.unshared_bytes)} without it",
                "",
                *_aligned(("role", "buffers", "at the peak", "allocated", "bytes"), self.roles),
                "",
                *_aligned(("activations", "buffers", "at the peak", "at most", "bytes"), self.types),
                "",
                *_aligned(("layer", "buffers", "at the peak", "at most", "bytes"), self.layers),
                "",
                f"largest of {len(self.alive)} buffers alive at the peak",
                *_aligned_spans(self.alive[:_LARGEST]),
            )
        )

    def json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "max_live_bytes": self.max_live_bytes,
            "unshared_bytes": self.unshared_bytes,
            "saved_bytes": self.saved_bytes,
            "ops": self.ops,
            "peak": {"op": self.peak_op, "name": self.peak_op_name, "alive": [_plain(span) for span in self.alive]},
            "roles": [asdict(row) for row in self.roles],
            "types": [asdict(row) for row in self.types],
            "layers": [asdict(row) for row in self.layers],
        }

    def html(self) -> str:
        facts = {
            "allocated": _exact(self.peak_bytes),
            "alive at most": _exact(self.max_live_bytes),
            "the peak": self._moment(),
            "sharing saves": f"{human(self.saved_bytes)} of {human(self.unshared_bytes)}",
            "buffers": f"{sum(row.buffers for row in self.roles):,}",
            "device": self.device,
        }
        return timeline_page(self.title, self.spans, unit="op", facts=facts)

    def _moment(self) -> str:
        return f"op {self.peak_op} of {self.ops}, {self.peak_op_name}"


def memory_report(memory: MemoryPlan, title: str) -> MemoryReport:
    """The report of a plan. Nothing is allocated."""
    trace = memory.trace
    spans = tuple(
        Span(handle.name, handle.type, first, last + 1, handle.nbytes, handle.role, handle.layer)
        for handle in trace.handles.values()
        for first, last in trace.live[handle.name]
    )
    moment, max_live_bytes = _peak(spans)
    alive = _alive(spans, moment)
    roles = {row.name: row for row in _rows(spans, alive, lambda span: span.role)}
    align = next((arena.align for arena in memory.arenas.values()), None)
    return MemoryReport(
        title=title,
        device=str(memory.device),
        peak_bytes=memory.peak_bytes,
        max_live_bytes=max_live_bytes,
        unshared_bytes=plan_memory(trace, align=align, share=False).peak_bytes,
        ops=len(trace.ops),
        peak_op=int(moment),
        peak_op_name=trace.ops[int(moment)] if trace.ops else "",
        roles=tuple(replace(roles[role], at_most_bytes=arena.arena_bytes) for role, arena in memory.arenas.items()),
        types=_rows(_activations(spans), _activations(alive), lambda span: span.type.value),
        layers=_rows(spans, alive, lambda span: span.layer or "(no layer)"),
        alive=alive,
        spans=spans,
    )


def timeline_page(title: str, spans: Sequence[Span], *, unit: str, facts: Mapping[str, str]) -> str:
    """A self-contained HTML page: bytes alive over time, stacked and coloured by type, with the peak marked, each
    buffer named under the pointer, totals by type, and the largest buffers alive at the peak."""
    moment, _ = _peak(spans)
    alive = _alive(spans, moment)
    when = f"op {moment:,.0f}" if unit == "op" else f"{moment:,.3f} {unit}"
    parts = {
        "title": html.escape(title),
        "facts": "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()),
        "legend": _legend(spans, alive),
        "largest_heading": html.escape(f"Largest at the peak, {when}" if alive else "Nothing was alive"),
        "largest": _largest(alive),
        "data": _data(spans, unit),
    }
    page = resources.files("tilegrad.memory.planned").joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():  # no text holds a placeholder: "<" is escaped in all of them
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


def _exact(nbytes: int) -> str:
    return f"{human(nbytes)} ({nbytes:,} bytes)"


def _peak(spans: Iterable[Span]) -> tuple[float, int]:
    """The first moment at which the most bytes are alive, and how many."""
    change: dict[float, int] = {}
    for span in spans:
        change[span.first] = change.get(span.first, 0) + span.nbytes
        change[span.last] = change.get(span.last, 0) - span.nbytes
    moment, most, total = 0.0, 0, 0
    for at in sorted(change):
        total += change[at]
        if total > most:
            moment, most = at, total
    return moment, most


def _alive(spans: Iterable[Span], moment: float) -> tuple[Span, ...]:
    found = [span for span in spans if span.first <= moment < span.last and span.nbytes]
    return tuple(sorted(found, key=lambda span: (-span.nbytes, span.name)))


def _activations(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.role == "activations"]


def _rows(spans: Iterable[Span], alive: Iterable[Span], group: Callable[[Span], str]) -> tuple[Row, ...]:
    """One row for each group of buffers, in the order in which the groups appear."""
    members: dict[str, list[Span]] = {}
    for span in spans:
        members.setdefault(group(span), []).append(span)
    at_peak = dict.fromkeys(members, 0)
    for span in alive:
        at_peak[group(span)] += span.nbytes
    return tuple(
        Row(name, len({span.name for span in of}), at_peak[name], _peak(of)[1]) for name, of in members.items()
    )


def _aligned(header: tuple[str, ...], rows: Iterable[Row]) -> list[str]:
    cells = [
        (r.name, f"{r.buffers:,}", human(r.at_peak_bytes), human(r.at_most_bytes), f"{r.at_most_bytes:,}") for r in rows
    ]
    return _columns([header, *cells], right=(False, True, True, True, True))


def _aligned_spans(spans: Iterable[Span]) -> list[str]:
    cells = [(s.name, s.type.value, s.role, s.layer, human(s.nbytes), f"{s.nbytes:,}") for s in spans]
    header = ("buffer", "type", "role", "layer", "size", "bytes")
    return _columns([header, *cells], right=(False, False, False, False, True, True))


def _columns(cells: Sequence[tuple[str, ...]], right: tuple[bool, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(right))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def _plain(span: Span) -> dict[str, object]:
    return asdict(span) | {"type": span.type.value}


def _legend(spans: Sequence[Span], alive: Iterable[Span]) -> str:
    rows = {row.name: row for row in _rows(spans, alive, lambda span: span.series)}
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
    for span in alive[:_LARGEST]:
        where = " · ".join(filter(None, (span.type.value, span.role, span.layer)))
        rows.append(
            f'<tr><td><div class="named"><span class="swatch" style="background:var(--{span.series})"></span>'
            f"<span>{html.escape(span.name)}<small>{html.escape(where)}</small></span></div>"
            f'<td class="number">{human(span.nbytes)}<small>{span.nbytes / total:.1%}</small></tr>'
        )
    rest = alive[_LARGEST:]
    if rest:
        rows.append(
            f'<tr><td>and {len(rest):,} smaller<td class="number">{human(sum(span.nbytes for span in rest))}</tr>'
        )
    return "".join(rows)


def _data(spans: Iterable[Span], unit: str) -> str:
    """The spans that can be seen, in the order in which they are stacked, column by column."""
    rank = {name: index for index, name in enumerate(_SERIES)}
    shown = [span for span in spans if span.nbytes and span.first < span.last]
    shown.sort(key=lambda span: (rank[span.series], span.first, -span.last, span.name))
    data = {
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
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
