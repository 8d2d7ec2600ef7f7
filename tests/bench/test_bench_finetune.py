"""`benchmarks.finetune` on a CPU with a small model and without the peer."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.forked import CONTEXT

from benchmarks import finetune
from benchmarks.breakdown import Launch, break_down, products_of
from benchmarks.step_cost import adapter_count, step_demands
from tilegrad.engine.spec import StepSpec
from tilegrad.text.atomic import check_replaceable


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
        (["--breakdown", "--only", "ours", "peer"], "only: got 'peer' with breakdown; accepted: 'ours'"),
        (["--device", "cuda", "--budget", "0.03"], "budget: got 0.03; accepted: more than 0.0391 GiB"),
    ],
)
def test_bad_numbers_are_refused(arguments: list[str], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        finetune.main([*arguments, "--tiny", "--no-peer"])


def test_no_dated_results_are_taken_for_a_file_to_replace() -> None:
    dated = sorted(Path(finetune.__file__).parent.glob("2026-*finetune*.md"))
    for path in dated:
        with pytest.raises(ValueError, match="got a file that tilegrad did not write"):
            check_replaceable(path, finetune.TITLE)
    assert dated


def test_the_budget_of_every_shape_leaves_bytes_to_plan_on_a_gpu() -> None:
    assert all(shape.checkpointed_gib * 2**30 > finetune.UNPLANNED_BYTES for shape in finetune.SHAPES.values())


# ── the breakdown ──


TN, NN = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
FORWARD = [
    "adapters forward", "GEMM forward", *["adapters forward"] * 3,  # u, y and u B' of q, k and v
    "adapters forward", "GEMM forward", "adapters forward",  # u, y and u B' of the output projection
    "adapters forward", "GEMM forward",  # up and gate, joined: u, and [x, u] [W, B]'
    "adapters forward", "GEMM forward", "adapters forward",  # down
]  # fmt: skip
BACKWARD = [
    "GEMM dgrad",  # down, joined: [dy, du] [W; A]
    "GEMM dgrad", "adapters backward",  # up and gate: dy W, then du A
    "GEMM dgrad", "adapters backward",  # the output projection
    "GEMM dgrad", "adapters backward",  # q, k and v
]  # fmt: skip


class InThreads:
    """A context of multiprocessing that runs each process as a thread, which sees the patches of a test."""

    Pipe = staticmethod(multiprocessing.Pipe)

    @staticmethod
    def Process(target: Callable[..., None], args: tuple[Any, ...], *, daemon: bool) -> Thread:
        pipe, *rest = args
        own = Connection(os.dup(pipe.fileno()))

        def run() -> None:
            with own:  # a process closes its end too, however it ends
                target(own, *rest)

        return Thread(target=run, daemon=daemon)


def step_of_tiny() -> StepSpec:
    """In float32, whose products are joined like those of bfloat16 on a GPU. With one head of k and v, q, k and v are not twice
    as wide as x, so they are not joined."""
    shape, device = finetune.SHAPES["tiny"], torch.device("cpu")
    config = replace(shape.config(), n_kv_head=1)
    return StepSpec(
        config, shape.batch_size, shape.seq_len, torch.float32, device, lora=finetune.LORA, accumulate=False
    )


def recorded(steps: int = 1) -> list[Launch]:
    """The kernels of steps with adapters, as a GPU would name them: 2 µs for each GEMM and 1 µs for each other kernel."""
    forward, head, backward = (
        [TN] * len(FORWARD),
        [TN, "_softmax_kernel", NN],
        ["_low_rank_kernel", *[NN] * len(BACKWARD)],
    )
    split = "void cublasLt::splitKreduce_kernel<32, 16, int>"
    names = ["indexSelectLargeIndex", *forward * 2, *head, *backward * 2, split, "FusedAdam"] * steps
    times = [2.0 if name in (TN, NN) else 1.0 for name in names]
    return [Launch(name, sum(times[:i]), us) for i, (name, us) in enumerate(zip(names, times, strict=True))]


def test_the_products_of_a_step_with_adapters_are_listed_in_order() -> None:
    assert products_of(step_of_tiny().declare().step) == FORWARD * 2 + BACKWARD * 2


def test_gemms_of_adapters_are_told_apart_by_their_order() -> None:
    found = break_down(recorded(steps=3), {}, steps=3, products=FORWARD * 2 + BACKWARD * 2)
    ms = {group.group: group.ms for group in found.groups}
    assert not found.note
    assert ms["adapters forward"] == pytest.approx(2e-3 * 18) and ms["GEMM forward"] == pytest.approx(2e-3 * 8)
    # six GEMMs, two kernels of low_rank, and the split-K reduction of the last GEMM
    assert ms["adapters backward"] == pytest.approx(2e-3 * 6 + 1e-3 * 3)
    assert ms["GEMM dgrad"] == pytest.approx(2e-3 * 8) and ms["head forward"] == ms["head dgrad"] == pytest.approx(2e-3)
    assert sum(ms.values()) == pytest.approx(1e-3 * sum(launch.us for launch in recorded()))


def test_another_number_of_gemms_than_of_products_is_reported() -> None:
    found = break_down(recorded(), {}, products=FORWARD)
    ms = {group.group: group.ms for group in found.groups}
    assert found.note.startswith("40 GEMMs in a step, but its ops have 13 products")
    assert ms["GEMM forward"] == pytest.approx(2e-3 * 26) and "adapters forward" not in ms


def test_floors_of_a_step_with_adapters() -> None:
    """Qwen2.5-0.5B, 16 × 1024 tokens: 24 blocks with C = 896, F = 4864, q k v of 896 + 128 + 128, rank 16."""
    ours, weights = (finetune.floors_of(name, finetune.SHAPES["0.5B"]) for name in ("ours", "ours, weights"))
    n, blocks, rate = 16384, 24, 690e12
    assert "GEMM wgrad" not in ours and "head wgrad" not in ours and ours["GEMM forward"] == weights["GEMM forward"]
    of_qkv = 1e3 * 2 * n * 896 * 1152 / rate
    assert weights["GEMM dgrad"] - ours["GEMM dgrad"] == pytest.approx(of_qkv)
    inputs, widths, columns = (896, 896, 896, 4864), (1152, 896, 2 * 4864, 896), (48, 16, 32, 16)
    read = 2 * n * sum(inputs) / 4.3e12  # u reads x
    assert 1e3 * blocks * read < ours["adapters forward"] < 1.25 * 1e3 * blocks * read
    both = read + 2 * n * sum(widths) / 4.3e12  # du and dB read dy, dA reads x
    assert 1e3 * blocks * both < ours["adapters backward"] < 1.25 * 1e3 * blocks * both
    trained = blocks * sum(i * r + 16 * w for i, w, r in zip(inputs, widths, columns, strict=True))
    assert adapter_count(finetune.SHAPES["0.5B"].config(), finetune.LORA) == trained == 8_798_208
    assert ours["optimizer"] == pytest.approx(1e3 * 34 * trained / 4.3e12)
    assert ours["embeddings"] < weights["embeddings"] and ours["norms backward"] < weights["norms backward"]
    config = finetune.SHAPES["0.5B"].config()
    with pytest.raises(ValueError, match="accepted: adapters on all layers, without dropout"):
        step_demands(config, 16, 1024, 2, trained, replace(finetune.LORA, dropout=0.1))


def test_a_breakdown_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the recorded kernels of a GPU instead of the profiler's, and a step on a CPU."""
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": InThreads}.__getitem__)
    monkeypatch.setattr(finetune, "launches_of", lambda _step, steps: recorded(steps))
    monkeypatch.setattr(finetune, "WARM_SECONDS", 0.01)
    out = tmp_path / "breakdown.md"
    given = ["--tiny", "--device", "cpu", "--breakdown", "--out", str(out)]
    assert finetune.main(given) == 0
    told = capsys.readouterr().out
    assert "tiny, ours: one step" in told and "tiny, ours, weights: one step" in told and "adapters forward" in told
    written = out.read_text(encoding="utf-8")
    assert written.startswith(finetune.TITLE) and told.strip() in written
    assert "- command: python -m benchmarks.finetune --tiny --device cpu --breakdown\n" in written
    rows = json.loads(written.split("```json\n")[1].split("```")[0])
    assert [row["contender"] for row in rows] == ["ours", "ours, weights"]
    assert {"adapters forward", "optimizer"} <= {group["group"] for group in rows[0]["groups"]}
    assert finetune.main(given) == 0  # the file is replaced
    out.write_text("notes", encoding="utf-8")
    with pytest.raises(ValueError, match="got a file that tilegrad did not write"):
        finetune.main(given)


def test_a_breakdown_without_a_gpu_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": InThreads}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(finetune, "WARM_SECONDS", 0.01)
    assert finetune.main(["--tiny", "--device", "cpu", "--breakdown", "--only", "ours"]) == 1
    assert "tiny, ours:" in (told := capsys.readouterr().err) and "breakdown: got a machine without a GPU" in told


def test_a_process_that_ends_without_an_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": InThreads}.__getitem__)
    monkeypatch.setattr(finetune, "serve", lambda pipe, *_given: pipe.close())
    started: list[object] = []
    given = (finetune.SHAPES["tiny"], "cpu", ["ours"], 1.0)
    thread = Thread(target=lambda: started.append(finetune.start(*given)), daemon=True)
    thread.start()
    thread.join(20)
    assert started == [({}, {"ours": "the process ended without an answer"})]
