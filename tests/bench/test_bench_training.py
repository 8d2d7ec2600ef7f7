"""`tilegrad.bench.training`: the whole bench on a small model, and no speed-up without a green check."""

import json
import os

import pytest
import torch

from tilegrad.bench import training
from tilegrad.bench.training import TOLERANCE, Cell, bench_training, disagreement, measure_speed, report, row_of

TINY = Cell("tiny", "float32", 2, 32)
ALONE = {"step_ms": 1.0, "beyond_bytes": 100}


@pytest.mark.slow
def test_the_whole_bench(capsys, tmp_path):
    began = sum(os.times()[:4])  # the processor's own, children's too: a busy machine counts as a quiet one
    assert bench_training(preset="tiny", cells=[("float32", 2, 32)], repeats=2, json=True, out=tmp_path / "r.md") == 0
    took = sum(os.times()[:4]) - began
    about, cell = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"cpu", "cores", "torch", "python", "commit", "date", "command"} <= about.keys()
    assert cell["pairs"] == 2 and cell["notes"] == [] and not cell["wrong"]
    assert 0.05 < cell["speed_up"] < 20
    assert cell["q1"] <= cell["speed_up"] <= cell["q3"]
    assert cell["ours_beyond_bytes"] > 0 and cell["eager_beyond_bytes"] > 0
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "float32 B=2 T=32" in text and "speed-up" in text and about["command"] in text
    assert took < 90  # some 25 s of two cores: three processes that import torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_contenders_agree(dtype):
    speed = measure_speed(Cell("tiny", dtype, 2, 8), repeats=2, limit_s=60.0)
    assert speed.keys() == {"ms", "page_faults", "losses"}
    assert len(speed["ms"]["ours"]) == len(speed["ms"]["eager"]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["wpe.weight", "blocks.1.attn.qkv.weight", "blocks.3.ffn.down.bias", "ln_f.bias"])
def test_canary_a_wrong_gradient_has_no_speed_up(monkeypatch, dtype, name):
    class Broken(training.Ours):
        def gradients(self):
            loss, grads = super().gradients()
            g = grads[name]
            g[: len(g) // 8].mul_(0.5)
            return loss, grads

    monkeypatch.setattr(training, "Ours", Broken)
    cell = Cell("tiny", dtype, 2, 32)
    speed = measure_speed(cell, repeats=1, limit_s=60.0)
    assert speed.keys() == {"wrong"}
    assert f"tilegrad: gradient of {name} " in speed["wrong"]
    row = row_of(cell, ALONE, ALONE, speed)
    assert row.wrong and row.speed_up is None
    text = report([row])
    assert "WRONG" in text and name in text
    assert "met" not in text.splitlines()[2].split("≥")[1].split("≤")[0]


def test_canary_a_wrong_optimizer_has_no_speed_up(monkeypatch):
    monkeypatch.setattr(
        training.Ours, "step", lambda self: self.engine.step(self.tokens, self.targets, learning_rate=1e-2)
    )
    assert "after 4 steps the loss is" in measure_speed(TINY, repeats=3, limit_s=60.0)["wrong"]


def test_a_red_check_is_an_exit_code(monkeypatch, capsys):
    def answer(_cell, kind, _repeats, _limit_s):
        return {"wrong": "loss 2.0"} if kind == "speed" else ALONE

    monkeypatch.setattr(training, "_in_a_process", answer)
    assert bench_training(preset="tiny", cells=[("float32", 1, 8)]) == 1
    assert "WRONG, so there is no speed-up: loss 2.0" in capsys.readouterr().out


def test_disagreement():
    ref = {"a": torch.ones(4), "b": torch.full((4,), 1e-8)}
    assert disagreement(1.0, {"a": torch.ones(4), "b": torch.zeros(4)}, 1.0, ref, 1e-3) == ""
    assert "loss 1.1" in disagreement(1.1, ref, 1.0, ref, 1e-3)
    assert "loss nan" in disagreement(float("nan"), ref, 1.0, ref, 1e-3)
    assert "of a is off" in disagreement(1.0, ref | {"a": torch.tensor([1, 1, 1, torch.nan])}, 1.0, ref, 1e-3)
    assert "other parameters: b" in disagreement(1.0, {"a": ref["a"]}, 1.0, ref, 1e-3)


def test_a_contender_that_is_too_slow_is_named(monkeypatch, capsys):
    def answer(_cell, kind, _repeats, limit_s):
        assert kind != "speed", "a contender that was late alone is not paired"
        return {"late": limit_s} if kind == "eager" else ALONE

    monkeypatch.setattr(training, "_in_a_process", answer)
    assert bench_training(preset="tiny", cells=[("bfloat16", 1, 8)], limit_s=7.0) == 0
    text = capsys.readouterr().out
    assert "eager alone: ended after 7 s" in text and "there is no speed-up" in text


def test_a_malloc_that_does_not_obey_is_told():
    """Else most of a speed-up may be page faults."""
    speed = {
        "ms": {"ours": [1.0, 1.0], "eager": [2.0, 2.0]},
        "page_faults": {"ours": [3, 4], "eager": [100_000, 120_000]},
    }
    row = row_of(TINY, ALONE, ALONE, speed)
    assert row.speed_up == 2.0
    assert row.notes == ("eager takes 110000 page faults a step: malloc did not keep what was freed",)


def test_a_process_is_ended_at_its_limit():
    assert training._in_a_process(TINY, "ours", 1, 0.05) == {"late": 0.05}


def test_a_process_that_fails_says_why():
    answer = training._in_a_process(Cell("tiny", "float32", 1, 4096), "ours", 1, 60.0)
    assert "seq_len: got 4096" in answer["failed"]
    assert "failed" in report([row_of(TINY, answer, ALONE, None)])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="preset: got 'huge'"):
        bench_training(preset="huge")
    with pytest.raises(ValueError, match="repeats: got 0"):
        bench_training(repeats=0)
    with pytest.raises(ValueError, match="limit_s: got 0"):
        bench_training(limit_s=0)
    with pytest.raises(ValueError, match="dtype: got 'float16'; accepted: " + ", ".join(TOLERANCE)):
        bench_training(cells=[("float16", 1, 8)])
    with pytest.raises(ValueError, match="seq_len: got 129; accepted: 1 … 128"):
        bench_training(preset="tiny", cells=[("float32", 1, 129)])
