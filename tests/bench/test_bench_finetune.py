"""`benchmarks.finetune` on a CPU with a small model and without the peer."""

from __future__ import annotations

import json
import multiprocessing

import pytest
from support.forked import CONTEXT

from benchmarks import finetune


def test_a_small_shape_runs_without_the_peer_and_a_contender_that_fails_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": CONTEXT}.__getitem__)  # its processes begin sooner
    tiny = ["--tiny", "--device", "cpu", "--no-peer", "--json", "--budget", "0.00001"]
    assert finetune.main([*tiny, "--only", "ours", "ours, budget", "ours, lean", "peer"]) == 1
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert [row["contender"] for row in rows] == ["ours", "ours, lean"]
    assert all(row["tokens_per_s"] > 0 and row["ratio"] is None for row in rows)
    assert "tiny, ours, budget:" in told.err and "memory_budget: got" in told.err


def test_a_ratio_compares_calls_of_the_same_round() -> None:
    found = {"ours": [(30.0, 5), (40.0, 5)], "peer": [(10.0, 9), (20.0, 8)], "ours, budget": [(1.0, 1), (1.0, 1)]}
    rows = {row["contender"]: row for row in finetune.rows_of("0.5B", found)}
    assert rows["ours"]["ratio"] == 2.5 and rows["peer"]["ratio"] is None and rows["ours, budget"]["ratio"] is None
    assert rows["peer"]["peak_bytes"] == 9 and rows["ours"]["tokens_per_s"] == 35.0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--rounds", "0"], "rounds: got 0; accepted: at least 1"),
        (["--seconds", "0"], "seconds: got 0.0; accepted: a number > 0"),
        (["--device", "cuda", "--budget", "0.03"], "budget: got 0.03; accepted: more than 0.0391 GiB"),
    ],
)
def test_bad_numbers_are_refused(arguments: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        finetune.main([*arguments, "--tiny", "--no-peer"])


def test_the_budget_of_every_shape_leaves_bytes_to_plan_on_a_gpu() -> None:
    assert all(shape.checkpointed_gib * 2**30 > finetune.UNPLANNED_BYTES for shape in finetune.SHAPES.values())
