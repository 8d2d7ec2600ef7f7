"""Scratch and the tables of kernels: names that never collide, one validator, selection with reasons."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tilegrad.cli import main
from tilegrad.kernels.scratch import (
    Form,
    Layout,
    Shapes,
    accumulation_dtype,
    below,
    blocks,
    larger,
    new_scratch,
    of,
    rows_of,
    rows_per_block,
    views,
)
from tilegrad.kernels.table import Kernel, Table, takes_all


class Problem(NamedTuple):
    x: Any


def refuses_many_rows(problem: Problem) -> str | None:
    return "takes up to 8 rows" if problem.x.shape[0] > 8 else None


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Two kernels whose buffers have the same name: one has float32 rows, the other integers."""
    for name, dtype in (("few", torch.float32), ("many", torch.int64)):
        module = ModuleType(f"tilegrad.kernels.test_{name}")
        module.workspace = lambda x, *, backward, dtype=dtype: {"work": ((x.shape[0],), dtype)} if backward else {}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rows = (Kernel("few", "test_few", refuses_many_rows), Kernel("many", "test_many", takes_all))
    return Table("test", (*rows, Kernel("oracle", "test_many", takes_all, by_name_only="slow: only by name")))


def form(n: int) -> Problem:
    return Problem(Form((n, 4), torch.float32, torch.device("cpu")))


def test_canary_two_kernels_with_one_name_do_not_share_a_buffer(table: Table) -> None:
    shapes = table.workspace(form(4), form(100), backward=True)
    assert shapes == {"few.work": ((4,), torch.float32), "many.work": ((100,), torch.int64)}
    scratch = new_scratch(shapes, "cpu")
    for name in ("few", "many"):
        (row,) = (row for row in table.rows if row.name == name)
        needed = row.load().workspace(form(3).x, backward=True)
        mine = views(scratch, needed, torch.device("cpu"), "test", kernel=name)
        assert mine["work"].data_ptr() == scratch[f"{name}.work"].data_ptr() and mine["work"].shape == (3,)


def test_the_scratch_of_several_problems_serves_each_of_them(table: Table) -> None:
    for order in ((2, 7), (7, 2)):
        assert table.workspace(*map(form, order), backward=True) == {"few.work": ((7,), torch.float32)}
    assert table.workspace(form(2), form(100), backward=False) == {}
    assert table.workspace(form(2), kernel="many", backward=True) == {"many.work": ((2,), torch.int64)}
    with pytest.raises(ValueError, match=r"scratch\['a'\]: got torch.int64 and torch.int8; accepted: one dtype"):
        larger({"a": ((1,), torch.int64)}, {"a": ((2,), torch.int8)})


def test_the_first_row_that_takes_a_problem_runs_and_a_name_runs_or_raises(table: Table) -> None:
    assert [table.select(form(n)).name for n in (8, 9)] == ["few", "many"]
    assert [table.select(form(8), name).name for name in ("few", "many", "oracle")] == ["few", "many", "oracle"]
    with pytest.raises(ValueError, match="got 'few', which can't run this call: takes up to 8 rows; accepted: 'many'"):
        table.select(form(9), "few")
    with pytest.raises(ValueError, match="kernel: got 'none'; accepted: None or one of 'few', 'many', 'oracle'"):
        table.select(form(9), "none")
    told = table.explain(form(9))
    assert (
        told.kernel == "many" and told.reasons["few"] == "takes up to 8 rows" and told.reasons["oracle"][:4] == "slow"
    )


def test_names_get_an_owner_and_lose_it_again() -> None:
    assert below("linear", {"x": 1, "native.y": 2}) == {"linear.x": 1, "linear.native.y": 2}
    assert of("linear", {"linear.x": 1, "linear.native.y": 2, "linear_2.x": 3, "x": 4}) == {"x": 1, "native.y": 2}


def test_a_buffer_may_be_larger_but_not_smaller_strided_or_of_another_dtype() -> None:
    needed: Shapes = {"a": ((2, 3), torch.float32)}
    cpu = torch.device("cpu")
    large = torch.arange(10.0)
    assert torch.equal(views({"a": large}, needed, cpu, "test")["a"], large[:6].view(2, 3))
    exactly = torch.empty(6)
    assert views({"a": exactly}, needed, cpu, "test")["a"].data_ptr() == exactly.data_ptr()
    for wrong in (torch.empty(5), torch.empty(10, dtype=torch.int32), torch.empty(10, 2)[:, 0]):
        with pytest.raises(
            ValueError, match=r"scratch\['k.a'\]: test got .*accepted: a contiguous torch.float32 tensor of"
        ):
            views({"k.a": wrong}, needed, cpu, "test", kernel="k")
    for nothing in (None, {}, {"a": large}):
        with pytest.raises(ValueError, match=r"scratch: test got no 'k.a'; accepted: .*test_workspace\(…\) lists all"):
            views(nothing, needed, cpu, "test", kernel="k")


def test_rows_per_block_follow_from_the_size_of_a_row() -> None:
    sizes = {"cpu": 100}
    got = [
        rows_per_block(Form(shape, torch.float32, torch.device("cpu")), sizes)
        for shape in ((7, 10), (70, 10), (70, 101), (0, 0), (200, 1), (200, 0))
    ]
    assert got == [7, 10, 1, 1, 100, 100]


def test_blocks_cover_all_rows_once_and_a_single_block_is_not_indexed() -> None:
    assert list(blocks(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)] and not list(blocks(0, 3))
    x = torch.arange(4)
    assert rows_of(x, slice(0, 4)) is x
    assert rows_of(x, slice(0, 3)).tolist() == [0, 1, 2] and rows_of(x, slice(1, 4)).tolist() == [1, 2, 3]


def test_union_takes_the_larger_buffer_of_a_name_and_those_of_one_side() -> None:
    a: Shapes = {"x": ((2, 3), torch.int8), "a": ((1,), torch.int8)}
    b: Shapes = {"x": ((7,), torch.int8), "b": ((1,), torch.int64)}
    assert larger(a, b) == {"x": ((7,), torch.int8), "a": a["a"], "b": b["b"]} == larger(b, a)
    assert larger(a, {"x": ((5, 1), torch.int8)})["x"] == a["x"]


def test_buffers_follow_each_other_at_any_start() -> None:
    layout = Layout({"x": ((2, 3), torch.float32), "y": ((5,), torch.int8)})
    whole = torch.zeros(3 * 256, dtype=torch.uint8)
    found = layout.of(whole[256:])
    assert layout.nbytes == 2 * 256 and found["x"].shape == (2, 3) and found["x"].is_contiguous()
    assert [x.data_ptr() - whole.data_ptr() for x in found.values()] == [256, 512]


def test_sums_are_computed_in_float32_or_float64() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    assert [accumulation_dtype(x) for x in dtypes] == [torch.float64, *3 * [torch.float32]]


def test_doctor_shows_the_table_of_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--kernels"]) == 0
    out = capsys.readouterr().out
    for op in ("attention", "norm", "activation", "linear", "column_sum"):
        assert f"{op}: " in out and f"\n{op}, bfloat16 on cpu\n" in out
    assert re.search("tiled +is for bfloat16 on a CPU", out) and "runs: the first of the table" in out
    assert "OpenMP" in out
