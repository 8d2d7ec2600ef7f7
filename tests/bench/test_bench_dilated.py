"""`benchmarks.dilated`: its peers agree with dilated_attention, its table has every call, and a wrong result is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import dilated as bench
from benchmarks.dilated import Row, bench_dilated, verdicts
from benchmarks.gathered import gathered
from tilegrad.functional.dilated.functional import dilated_attention
from tilegrad.functional.dilated.pattern import MODES

SMALL: dict[str, Any] = {
    "device": "cpu", "lengths": (32, 64), "segments": (8, 16, 32), "rates": (1, 2, 4), "heads": 4, "head_dim": 8, "repeats": 2,
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_peer_has_the_same_results(mode: Any, causal: bool) -> None:
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 32, 4, 8, generator=g).requires_grad_() for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    ours = dilated_attention(q, k, v, (8, 16), (1, 4), mode=mode, causal=causal).transpose(1, 2)
    theirs = gathered(leaves[0], leaves[1], leaves[2], (8, 16), (1, 4), mode=mode, causal=causal, backend="sdpa")
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=g)
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (ours, theirs)]
    for name, a, b in zip("qkv", *gradients, strict=True):
        if mode == "head_groups" or name == "v":  # no gradient goes through its mix
            torch.testing.assert_close(a, b)
        else:
            assert not torch.allclose(a, b)


def test_the_table_and_the_json_lines_have_every_call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "dilated.jsonl"
    assert bench_dilated(**SMALL, out=str(out)) == 0
    text = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {(row["mode"], row["t"], row["kernel"]) for row in rows} == {
        (mode, t, kernel) for mode in MODES for t in (32, 64) for kernel in ("ours", "managed", "gather sdpa")
    }
    assert all(row["ms"] > 0 and len(row["rounds_ms"]) == 2 and row["rates"] == [1, 2, 4] for row in rows)
    assert all(row["hit_rate"] == 1.0 for row in rows if row["kernel"] == "managed")
    for words in ("ns/token", "time per token within", "the fastest gather (at least 1.3)", "iteration: 100%"):
        assert words in text


def test_the_command_takes_modes_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--device cpu --lengths 32 --segments 8 16 --rates 1 2 --heads 2 --head-dim 8 --repeats 2 --mode longnet --peers"
    assert bench.main([*flags.split(), "--causal", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kernel"] for row in rows] == ["ours", "managed"] and rows[0]["causal"] is True


def test_canary_a_wrong_result_has_no_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "dilated_attention", lambda *a, **options: 1.01 * dilated_attention(*a, **options))
    assert bench_dilated(**SMALL) == 1
    assert "WRONG: o: " in capsys.readouterr().out


def test_verdicts_compare_with_the_fastest_and_the_smallest_gather() -> None:
    rows = [
        Row("longnet", t, kernel, ms, 1e6 * ms / t, nbytes, 1.0 if kernel == "managed" else None, (ms, ms))
        for t, scale in ((32, 1.0), (64, 2.2))
        for kernel, ms, nbytes in (("ours", scale, 100), ("managed", scale, 90), ("gather flash", 3 * scale, 400))
    ]
    lines = verdicts(rows)
    assert lines[0] == "longnet: time per token within 10% over all T (at most 20%)"
    replayed = [Row("longnet", t, "captured", ms, 1e6 * ms / t) for t, ms in ((32, 1.0), (64, 2.5))]
    assert verdicts(rows + replayed)[0] == lines[0] + ", captured 25%"
    assert (
        "T 64: 3.00× the fastest gather (at least 1.3), 0.25 of the least memory (at most 0.5), managed 1.00×"
        in lines[2]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"repeats": 1}, "repeats: got 1"),
        ({"peers": ["flash"]}, r"peers: got \['flash'\]; accepted: names among sdpa"),
        ({"modes": ["paper"]}, "mode: got 'paper'"),
    ],
)
def test_a_bad_argument_of_the_benchmark_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_dilated(**SMALL | changes)
