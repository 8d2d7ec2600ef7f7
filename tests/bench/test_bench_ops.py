"""`benchmarks.ops` counts the right bytes and runs every kernel."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.ops import FAMILIES, F, bench_ops, main


def test_every_kernel_that_takes_a_call_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--dtype", "float32", "--rows", "8", "--repeats", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for family in FAMILIES:
        for case in family(8, torch.float32, torch.device("cpu")):
            ran = {row["kernel"] for row in rows if (row["op"], row["columns"]) == (case.op, case.columns)}
            assert ran == {row.name for row in case.kernels.rows if row.refuses(case.problem) is None}, case.op
    by_op = {(row["op"], row["columns"], row["kernel"]): row for row in rows}
    assert len(by_op) == len(rows) and all(row["rows"] == 8 and row["of_a_copy"] > 0 for row in rows)
    gelu = by_op["gelu backward", F, "torch"]
    assert gelu["bytes_per_s"] * gelu["ms"] / 1e3 == pytest.approx(3 * 8 * F * 4)


def test_the_table_is_printed_and_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops(device="cpu", dtype="float32", rows=[4], repeats=1) == 0
    printed = capsys.readouterr().out
    assert "GB/s, read plus written" in printed and "4 × 3072" in printed and "of a copy" in printed
    with pytest.raises(ValueError, match="dtype: got 'int8'; accepted: 'bfloat16'"):
        bench_ops(dtype="int8")
    with pytest.raises(ValueError, match="repeats: got 0; accepted: at least 1"):
        bench_ops(repeats=0)
