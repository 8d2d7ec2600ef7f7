"""A report of how much memory a planned program needs at each moment: as text, as data, and as an HTML page.

`peak_bytes` is the sum of the sizes of all arenas, which are allocated. `max_live_bytes` is the largest number of bytes that
have a live value at one op. The difference is lost to alignment and packing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from ..page import LARGEST, Row, Span, alive_at, by_group, human, peak_of, timeline_page
from .arena import MemoryPlan, plan_memory

_SHARED = "in the memory of the activations"


@dataclass(frozen=True, slots=True)
class MemoryReport:
    title: str
    device: str
    peak_bytes: int
    max_live_bytes: int
    unshared_bytes: int  # the sum of the sizes of all arenas if no two buffers shared an address
    ops: int
    peak_op: int
    peak_op_name: str
    roles: tuple[Row, ...]  # at_most_bytes is the size of the arena of the role
    types: tuple[Row, ...]  # types of activations only
    layers: tuple[Row, ...]
    alive: tuple[Span, ...]  # the buffers alive at the peak, the largest first
    spans: tuple[Span, ...]
    shared_gradients_bytes: int = 0  # the bytes of gradients that share memory with activations
    unplanned: tuple[tuple[str, int], ...] = ()  # (library, bytes that it allocates outside the arenas)

    @property
    def saved_bytes(self) -> int:
        return self.unshared_bytes - self.peak_bytes

    def table(self) -> str:
        """Plain text in aligned columns, with sizes in human units and in bytes."""
        share = self.saved_bytes / self.unshared_bytes if self.unshared_bytes else 0.0
        return "\n".join(
            (
                self.title,
                "",
                f"allocated      {_exact(self.peak_bytes)} on {self.device}, the sum of {len(self.roles)} arenas",
                *(f"outside them   {_exact(nbytes)}, {name}" for name, nbytes in self.unplanned),
                f"alive at most  {_exact(self.max_live_bytes)}, at {self._peak_moment()}",
                f"sharing saves  {_exact(self.saved_bytes)}, {share:.1%} of {human(self.unshared_bytes)} without it",
                *(
                    [f"gradients      {_exact(self.shared_gradients_bytes)}, {_SHARED}"]
                    if self.shared_gradients_bytes
                    else []
                ),
                "",
                *_aligned(("role", "buffers", "at the peak", "allocated", "bytes"), self.roles),
                "",
                *_aligned(("activations", "buffers", "at the peak", "at most", "bytes"), self.types),
                "",
                *_aligned(("layer", "buffers", "at the peak", "at most", "bytes"), self.layers),
                "",
                f"largest of {len(self.alive)} buffers alive at the peak",
                *_aligned_spans(self.alive[:LARGEST]),
            )
        )

    def json(self) -> dict[str, object]:
        return {
            "title": self.title,
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "beside": dict(self.unplanned),
            "max_live_bytes": self.max_live_bytes,
            "unshared_bytes": self.unshared_bytes,
            "saved_bytes": self.saved_bytes,
            "shared_gradients_bytes": self.shared_gradients_bytes,
            "ops": self.ops,
            "peak": {"op": self.peak_op, "name": self.peak_op_name, "alive": [_as_json(span) for span in self.alive]},
            "roles": [asdict(row) for row in self.roles],
            "types": [asdict(row) for row in self.types],
            "layers": [asdict(row) for row in self.layers],
        }

    def html(self) -> str:
        facts = {
            "allocated": _exact(self.peak_bytes),
            **{f"outside the arenas: {name}": _exact(nbytes) for name, nbytes in self.unplanned},
            "alive at most": _exact(self.max_live_bytes),
            "the peak": self._peak_moment(),
            "sharing saves": f"{human(self.saved_bytes)} of {human(self.unshared_bytes)}",
            **(
                {"gradients": f"{human(self.shared_gradients_bytes)}, {_SHARED}"} if self.shared_gradients_bytes else {}
            ),
            "buffers": f"{sum(row.buffers for row in self.roles):,}",
            "device": self.device,
        }
        return timeline_page(self.title, self.spans, unit="op", facts=facts)

    def _peak_moment(self) -> str:
        return f"op {self.peak_op} of {self.ops}, {self.peak_op_name}"


def memory_report(memory: MemoryPlan, title: str) -> MemoryReport:
    """The report of a plan. Nothing is allocated."""
    trace = memory.trace
    spans = tuple(
        Span(handle.name, handle.type, first, last + 1, handle.nbytes, handle.role, handle.layer)
        for handle in trace.handles.values()
        for first, last in trace.live[handle.name]
    )
    moment, max_live_bytes = peak_of(spans)
    alive = alive_at(spans, moment)
    roles = {row.name: row for row in by_group(spans, alive, lambda span: span.role)}
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
        types=by_group(_activations(spans), _activations(alive), lambda span: span.type.value),
        layers=by_group(spans, alive, lambda span: span.layer or "(no layer)"),
        alive=alive,
        spans=spans,
        shared_gradients_bytes=sum(trace.handles[name].nbytes for name in trace.places),
    )


def _exact(nbytes: int) -> str:
    return f"{human(nbytes)} ({nbytes:,} bytes)"


def _activations(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.role == "activations"]


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


def _as_json(span: Span) -> dict[str, object]:
    return asdict(span) | {"type": span.type.value}
