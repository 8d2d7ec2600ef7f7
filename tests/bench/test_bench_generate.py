"""`tilegrad bench generate` on the smallest preset."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tilegrad.bench import generate
from tilegrad.bench.generate import result
from tilegrad.cli import main
from tilegrad.engine.decoder import Decoder
from tilegrad.engine.scorer import Scorer

SMALL = ["bench", "generate", "--preset", "tiny", "--max-tokens", "3", "--repeats", "2", "--dtype", "float32"]


def test_every_batch_size_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    more = ["--batch-size", "1", "2", "--prefill", "9", "--no-peers", "--json", "--out", str(out)]
    arguments = [*SMALL, "--device", "cpu", *more]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert out.read_text(encoding="utf-8") == printed
    one, two, prefill, forward = map(json.loads, printed.splitlines())
    assert (one["batch_size"], two["batch_size"]) == (1, 2)
    assert one["contender"] == "tilegrad" and one["ours_times_as_fast"] == 1.0
    assert one["share_of_bound"] > 0 and two["share_of_bound"] is None
    assert (prefill["contender"], forward["contender"]) == ("tilegrad", "training's forward")
    assert (prefill["prompts"], prefill["length"]) == (8, 9) and forward["tokens_per_second"] > 0


def test_with_invariant_both_tables_have_both_forms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms: list[bool] = []

    def recorded(of: Callable[..., Decoder | Scorer]) -> Callable[..., Decoder | Scorer]:
        def build(*given: object, **options: object) -> Decoder | Scorer:
            built = of(*given, **options)
            forms.append(built.spec.invariant)
            return built

        return build

    monkeypatch.setattr(generate, "Decoder", recorded(Decoder))
    monkeypatch.setattr(generate, "Scorer", recorded(Scorer))
    more = ["--device", "cpu", "--no-peers", "--invariant", "--prefill", "9"]
    assert main([*SMALL, *more, "--json"]) == 0
    names = [json.loads(line)["contender"] for line in capsys.readouterr().out.splitlines()]
    prefills = ["tilegrad", "training's forward", "tilegrad, invariant", "training's forward, invariant"]
    assert names == ["tilegrad", "tilegrad, invariant", *prefills]
    assert forms == [name.endswith(", invariant") for name in names]


def test_transformers_is_measured_in_the_same_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    assert main([*SMALL, "--device", "cpu"]) == 0
    assert "transformers, static cache" in capsys.readouterr().out


def test_rates_and_ratios_are_medians_over_the_rounds() -> None:
    times = {"tilegrad": [10.0, 20.0, 10.0], "other": [20.0, 20.0, 40.0]}
    found = result("other", times, tokens=4, bound=400.0)
    assert (found["tokens_per_second"], found["ours_times_as_fast"], found["share_of_bound"]) == (200.0, 2.0, 0.5)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--preset", "none"], "preset: got 'none'; accepted: tiny, gpt2"),
        (["--max-tokens", "0"], "max_tokens: got 0; accepted: 1 … 96, because block_size is 128"),
        (["--max-tokens", "97"], "max_tokens: got 97; accepted: 1 … 96"),
        (["--repeats", "1"], "repeats: got 1; accepted: at least 2"),
        (["--batch-size", "0"], "batch_size: got 0"),
        (["--prefill", "129"], "prefill: got 129; accepted: 0 (none) … 128"),
    ],
)
def test_a_bad_argument_of_bench_generate_is_refused(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--no-peers", *more]) == 2
    assert words in capsys.readouterr().err
