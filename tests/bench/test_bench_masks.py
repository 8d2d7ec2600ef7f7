"""`benchmarks.masks`: every problem runs and is checked, all contenders have the same mask, and a wrong result is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegrad
from benchmarks import masks as bench
from benchmarks.masks import NAMES, Row, bench_masks, goal_of, report

# SDPA's backends warn, and so does FlexAttention, because it is not compiled
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DIRECTIONS = {"forward", "backward", "forward + backward"}
SMALL: dict[str, Any] = {"device": "cpu", "tokens": 64, "heads": 2, "head_dim": 32, "repeats": 2}


def test_every_call_of_a_problem_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "masks.jsonl"
    assert bench_masks(**SMALL, out=str(out)) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {row["problem"] for row in rows} == set(NAMES)
    timed = {(row["problem"], row["call"]) for row in rows if row["ms"]}
    assert timed >= {(name, "sdpa-bool") for name in NAMES[:-1]} | {("documents", "packed"), ("causal", "causal")}
    assert ("wide", "sdpa-math") in timed and {row["direction"] for row in rows if row["ms"]} == DIRECTIONS
    assert {row["d"] for row in rows} == {32, 512} and {row["t"] for row in rows if row["d"] == 512} == {8, 32}
    assert all(row["goal"] == goal_of(row["problem"], row["call"], "cpu") for row in rows if row["ratio"])
    assert all(row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] for row in rows if row["ratio"])
    assert "shared question" in capsys.readouterr().out


def test_one_round_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats: got 1; accepted: at least 2, because the report has quartiles"):
        bench.main(["--device", "cpu", "--repeats", "1"])


@pytest.mark.parametrize(("size", "least"), [({"tokens": 7}, 8), ({"heads": 0}, 1), ({"head_dim": 0}, 1)])
def test_a_size_that_is_too_small_is_refused(size: dict[str, int], least: int) -> None:
    ((name, given),) = size.items()
    with pytest.raises(ValueError, match=f"{name}: got {given}; accepted: at least {least}"):
        bench_masks(**SMALL | size)


def test_only_what_can_be_reached_has_a_goal() -> None:
    goals = {name: goal_of(name, "sdpa-bool", "cpu") for name in NAMES[:-1]}
    assert goals == dict.fromkeys(NAMES[:-1]) | {"documents": 3.0}
    assert goal_of("wide", "sdpa-flash", "cpu") == 1.0 and goal_of("wide", "sdpa-flash", "cuda") == 1.5


def test_the_table_says_whether_a_goal_is_met_or_missed() -> None:
    row = ("causal", 64, 128, "causal", "forward", 1.0)
    assert "0.9 met" in report([Row(*row, 0.9, None, 0.9)]) and "0.9 missed" in report([Row(*row, 0.89, None, 0.9)])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_all_contenders_have_the_same_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(torch, "compile", lambda f, **_options: f)
    made = flex.create_block_mask
    monkeypatch.setattr(flex, "create_block_mask", lambda *a, _compile, **options: made(*a, **options))
    problem, cpu = bench.Problem(name, 1, 2, 64, 16), torch.device("cpu")
    q, k, v, _ = problem.tensors(torch.float32, cpu)
    peers = bench.theirs(problem, cpu)
    if name in ("prefix", "shared question"):
        peers["flex"] = bench._flex(problem, cpu)
    assert "sdpa-bool" in peers
    for attend in peers.values():
        torch.testing.assert_close(attend(q, k, v), bench.ours(problem, cpu)(q, k, v))


def test_canary_a_wrong_attention_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tilegrad.attention

    def wrong(*a: Any, **options: Any) -> Any:
        found = right(*a, **options)
        return (1.01 * found[0], found[1]) if isinstance(found, tuple) else found

    monkeypatch.setattr(tilegrad, "attention", wrong)
    assert bench_masks(**SMALL, names=["causal"]) == 1
