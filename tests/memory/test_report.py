"""The report has the numbers of the plan, and its page needs no other file."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
from support.page import Page, check_alone
from support.tanh_stack import declare

from tilegrad.kernels.op import observe
from tilegrad.memory.page import Span, human, timeline_page
from tilegrad.memory.planned.arena import MemoryPlan, plan_memory
from tilegrad.memory.planned.report import MemoryReport, memory_report
from tilegrad.memory.planned.trace import Handle, Trace, trace
from tilegrad.memory.types import BufferType


@pytest.fixture(scope="module")
def memory() -> MemoryPlan:
    stack = declare()
    return plan_memory(trace(stack.step, observe, stack))


@pytest.fixture(scope="module")
def report(memory: MemoryPlan) -> MemoryReport:
    return memory_report(memory, "six layers")


def live_at(found: Trace, op: int) -> dict[str, int]:
    return {h.name: h.nbytes for h in found.handles.values() for p, q in found.live[h.name] if p <= op <= q}


def test_totals_are_those_of_the_plan(memory: MemoryPlan, report: MemoryReport) -> None:
    totals = [sum(live_at(memory.trace, op).values()) for op in range(len(memory.trace.ops))]
    assert report.peak_bytes == memory.peak_bytes == sum(arena.arena_bytes for arena in memory.arenas.values())
    assert report.max_live_bytes == max(totals)
    assert report.peak_op == totals.index(max(totals))
    assert report.peak_op_name == memory.trace.ops[report.peak_op]
    assert report.unshared_bytes == plan_memory(memory.trace, share=False).peak_bytes
    assert report.saved_bytes == report.unshared_bytes - report.peak_bytes > 0


def test_tables_have_the_layers_roles_and_largest_buffers(memory: MemoryPlan, report: MemoryReport) -> None:
    alive = live_at(memory.trace, report.peak_op)
    assert {span.name: span.nbytes for span in report.alive} == alive
    assert [row.name for row in report.roles] == ["params", "grads", "inputs", "activations"]
    assert sum(row.at_most_bytes for row in report.roles) == report.peak_bytes
    assert sum(row.buffers for row in report.roles) == len(memory.trace.handles)
    assert sum(row.at_peak_bytes for row in report.roles) == report.max_live_bytes
    assert sum(row.at_peak_bytes for row in report.layers) == report.max_live_bytes
    activations = next(row for row in report.roles if row.name == "activations")
    assert sum(row.at_peak_bytes for row in report.types) == activations.at_peak_bytes
    assert {row.name for row in report.layers} == {"(no layer)", *(f"layer {n}" for n in range(6))}
    temp = next(row for row in report.types if row.name == "temp")
    assert temp.at_peak_bytes == sum(
        s.nbytes for s in report.alive if s.role == "activations" and s.type is BufferType.TEMP
    )
    assert temp.at_most_bytes >= temp.at_peak_bytes


def test_the_text_has_the_numbers_of_the_report(report: MemoryReport) -> None:
    text = report.table()
    assert f"allocated      {human(report.peak_bytes)} ({report.peak_bytes:,} bytes) on cpu" in text
    assert f"{report.max_live_bytes:,} bytes), at op {report.peak_op} of {report.ops}, {report.peak_op_name}" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    header, *rows = text.split("\n\n")[2].splitlines()
    assert header.split() == ["role", "buffers", "at", "the", "peak", "allocated", "bytes"]
    assert {len(row) for row in rows} == {len(header)}


def test_columns_of_numbers_are_aligned_with_their_headers() -> None:
    handles = {
        name: Handle(name, (n,), torch.float32, BufferType.SCORES, layer="layer 0")
        for name, n in (("a", 5), ("b", 10**9))
    }
    found = Trace(("op",) * 100, handles, {"a": ((0, 99),), "b": ((0, 99),)})
    text = memory_report(plan_memory(found), "two").table()
    *tables, largest = [table.splitlines() for table in text.split("\n\n")[2:]]
    assert len(tables) == 3 and largest[0].startswith("largest of")
    for words, lines in (*((1, table) for table in tables), (4, largest[1:])):
        head, *rows = [[cell.span() for cell in re.finditer(r"\S+(?: \S+)*", line)] for line in lines]
        for row in rows:
            assert [start for start, _ in row[:words]] == [start for start, _ in head[:words]]
            assert [end for _, end in row[words:]] == [end for _, end in head[words:]]


def test_the_json_equals_the_data(report: MemoryReport) -> None:
    data = json.loads(json.dumps(report.json()))
    assert data["peak_bytes"] == report.peak_bytes
    assert data["peak"]["op"] == report.peak_op
    assert data["peak"]["alive"][0]["type"] in {type.value for type in BufferType}
    assert sum(row["at_most_bytes"] for row in data["roles"]) == data["peak_bytes"]


def test_planning_allocates_nothing() -> None:
    huge = Handle("x", (1 << 20, 1 << 20), torch.float32, BufferType.SCORES)
    found = memory_report(plan_memory(Trace(("op",), {"x": huge}, {"x": ((0, 0),)})), "huge")
    assert found.peak_bytes == 4 << 40
    assert "4.00 TiB (4,398,046,511,104 bytes)" in found.table()


def test_an_empty_program_has_a_report() -> None:
    found = memory_report(plan_memory(trace(lambda: None, observe)), "empty")
    assert found.peak_bytes == found.max_live_bytes == 0
    assert "allocated      0 B" in found.table()
    assert "<h1>empty</h1>" in found.html()


def test_bytes_are_printed_with_units() -> None:
    assert [human(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 30)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "5.00 MiB", "3.00 GiB",
    ]  # fmt: skip


class MemoryPage(Page):
    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text["script"][0])
        return found


SPANS = (
    Span("long", BufferType.QUERY, 0.0, 3.0, 100),
    Span("first", BufferType.SCORES, 0.0, 1.0, 4000, layer="attention"),
    Span("second", BufferType.SCORES, 1.0, 2.0, 5000),
    Span("nothing", BufferType.MASK, 1.0, 1.0, 9999),
    Span("w", BufferType.CACHE, 0.0, 3.0, 50, role="params"),
)


def test_the_page_has_the_data_and_tables_of_the_report() -> None:
    page = MemoryPage(timeline_page("a run", SPANS, unit="ms", facts={"device": "cpu"}))
    assert page.text["h1"] == ["a run"]
    assert "cpu" in page.text["dd"]
    # in stacking order; a buffer without a lifetime has no area
    assert page.data["name"] == ["w", "long", "first", "second"]
    assert page.data["unit"] == "ms"
    assert [page.data["series"][s] for s in page.data["of"]] == ["params", "query", "scores", "scores"]
    assert page.data["bytes"] == [50, 100, 4000, 5000]
    assert "Largest at the peak, 1.000 ms" in page.text["h2"]
    assert page.text["td"].count("4.88 KiB") == 3  # scores at the peak, the maximum, and "second" in the largest
    assert "first" not in page.text["span"]  # it is freed before "second" is allocated


def test_the_page_needs_no_network(report: MemoryReport) -> None:
    text = report.html()
    page = MemoryPage(text)
    check_alone(text)
    assert len(page.data["name"]) == sum(span.nbytes > 0 for span in report.spans)


def test_the_page_escapes_all_text() -> None:
    evil = '</script><img src=x onerror="alert(1)"><!--legend-->&'
    spans = (Span(evil, BufferType.TEMP, 0, 1, 64, role=evil, layer=evil),)
    clean = MemoryPage(
        timeline_page("a", (Span("a", BufferType.TEMP, 0, 1, 64, "a", "a"),), unit="a", facts={"a": "a"})
    )
    page = MemoryPage(timeline_page(evil, spans, unit=evil, facts={evil: evil}))
    assert page.tags == clean.tags
    assert page.data["name"] == [evil]
    assert page.text["h1"] == [evil]


def test_a_page_of_fifty_thousand_spans_is_made_quickly() -> None:
    types = tuple(BufferType)
    spans = [Span(f"layer{i % 48}.buffer{i}", types[i % 10], i / 7, i / 7 + 30, 4096 + i) for i in range(50_000)]
    begin = time.process_time()
    text = timeline_page("large", spans, unit="ms", facts={})
    assert time.process_time() - begin < 5
    assert len(text) < 8_000_000
