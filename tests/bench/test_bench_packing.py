"""`benchmarks.packing`: its rows and table are right, and a wrong loss is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import packing as bench
from benchmarks.packing import Contender, batch_of, bench_packing

SMALL: dict[str, Any] = {"device": "cpu", "batch_size": 2, "seq_len": 16, "documents": 5, "seconds": 0.01, "rounds": 1}


def test_rows_have_conversations_end_to_end_and_then_padding() -> None:
    tokens, targets, ends = batch_of([[torch.arange(3), torch.arange(2)], [torch.arange(6)]], 6)
    assert ends is not None and ends.tolist() == [0, 3, 5, 6, 12] and tokens[0].tolist() == [0, 1, 2, 0, 1, 0]
    assert targets.tolist() == [[1, 2, -1, 1, -1, -1], [1, 2, 3, 4, 5, -1]]


def test_the_bench_prints_a_line_for_each_kind_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_packing(**SMALL, json=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == ["padded", "packed", "whole"]
    assert rows[0]["speed"] == 1.0 and rows[1]["fill"] > 2 * rows[0]["fill"] and rows[2]["fill"] == 1.0
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds: got 0; accepted: at least 1"):
        bench_packing(**SMALL | {"rounds": 0})


def test_canary_a_packed_loss_that_differs_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench.contenders

    def wrong(*given: Any) -> list[Contender]:
        made = right(*given)
        ends = torch.tensor([0, 16, 32], dtype=torch.int32)  # without the ends of conversations
        evaluate = made[1].engine.evaluate
        monkeypatch.setattr(made[1].engine, "evaluate", lambda x, y, **_: evaluate(x, y, cu_seqlens=ends))
        return made

    monkeypatch.setattr(bench, "contenders", wrong)
    assert bench_packing(**SMALL) == 1 and "WRONG: the packed loss is" in capsys.readouterr().out
