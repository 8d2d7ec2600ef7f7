"""Stages of batch size, sequence length and window: their data, results, checkpoints, logs and errors."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3, batch, equal
from support.ranks import Ranks

from tilegrad import Engine, ModelConfig
from tilegrad.cli import main
from tilegrad.cli.progress import _message
from tilegrad.data.batches import Batches, Windows
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels.attention.qkv import qkv_attention_workspace
from tilegrad.model import attention
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint
from tilegrad.training.config import DataConfig, RunConfig, TrainConfig
from tilegrad.training.log import read_log
from tilegrad.training.run import train
from tilegrad.training.sections import resumed, run_from, with_steps
from tilegrad.training.stages import Stage, begins, stage_of

SIZES = [(3, 4), (3, 4), (2, 8), (1, 4), (3, 16), (2, 16), (2, 2)]  # batch_size, seq_len of each batch


def read(batches: Batches, sizes: list[tuple[int, int]]) -> list[list[Any]]:
    out = []
    for size in sizes:
        batches.resize(*size)
        tokens, targets, _ = batches.next()
        assert tokens.shape == targets.shape == size and torch.equal(tokens[targets >= 0] + 1, targets[targets >= 0])
        out.append([tokens.tolist(), targets.tolist()])
    return out


@pytest.mark.parametrize("count", [83, 90, 96, 97])
@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, 16), (2, 8), (1, 4), (2, 4), (1, 1), (3, 1)])
def test_pieces_of_windows_have_each_token_once_in_an_epoch(count: int, batch_size: int, seq_len: int) -> None:
    """The last window is whole or short. In a short window some pieces are empty, but no batch is."""
    batches = Batches(Windows(np.arange(count), 16), 2, seed=3)
    batches.resize(batch_size, seq_len)
    seen: list[int] = []
    while batches.position[0] == 0 and batches.position[1] < 6:
        targets = batches.next()[1]
        assert targets.shape == (batch_size, seq_len) and (targets >= 0).any()
        seen += targets[targets >= 0].tolist()
    assert sorted(seen) == list(range(1, count)) and batches.tokens_read == count - 1


def test_a_batch_of_pieces_has_one_of_each_window() -> None:
    batches = Batches(Windows(np.arange(97), 16), 3, seed=3)
    whole = batches.next()[0]
    again = Batches(Windows(np.arange(97), 16), 3, seed=3)
    again.resize(3, 4)
    assert torch.equal(torch.cat([again.next()[0] for _ in range(4)], 1), whole)


def test_a_position_between_pieces_is_restored_exactly() -> None:
    tokens, sizes = np.arange(90), [size for size in SIZES for _ in range(3)] * 2
    whole = Batches(Windows(tokens, 16), 3, seed=5)
    expected = read(whole, sizes)
    for begin in range(len(sizes)):
        part = Batches(Windows(tokens, 16), 3, seed=5)
        read(part, sizes[:begin])
        part.resize(*sizes[begin])
        state = json.loads(json.dumps(part.state()))
        again = Batches(Windows(tokens, 16), 3, seed=5)
        again.resize(*sizes[begin])
        again.restore(state)
        assert (again.position, again.tokens_read, again.state()) == (part.position, part.tokens_read, state)
        assert read(again, sizes[begin:]) == expected[begin:]
        assert again.tokens_read == whole.tokens_read
    targets = sum(sum(target >= 0 for row in y for target in row) for _, y in expected)
    assert whole.tokens_read == targets, "pieces that a change of sizes leaves out are not counted"


def test_older_states_without_stages_count_their_tokens() -> None:
    tokens = np.arange(90)
    batches = Batches(Windows(tokens, 16), 3, seed=5)
    for _ in range(5):
        batches.next()
    old: Any = {name: value for name, value in batches.state().items() if name not in ("piece", "tokens_read")}
    again = Batches(Windows(tokens, 16), 3, seed=5)
    again.restore(old)
    assert again.state() == batches.state() and again.tokens_read > 200
    with pytest.raises(ValueError, match="piece: got 1; accepted: 0 … 0, the pieces of a row at seq_len 16"):
        again.restore({**batches.state(), "piece": 1})
    with pytest.raises(ValueError, match="seq_len: got 5; accepted: 16, or for windows a divisor of it"):
        again.resize(3, 5)


# ── the engine ──

WINDOWS = {
    "no window": (CONFIG, (3, 7)),
    "a window": (replace(LLAMA, window=5), (2, None, 16)),
    "some blocks": (QWEN3, (2, None)),
    "some blocks, at first without": (replace(QWEN3, window=None), (2, 9)),
    "dropout": (replace(CONFIG, dropout=0.2), (3, 40)),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in WINDOWS), ("a window", torch.float64)])
def test_a_step_with_another_window_equals_that_of_a_model_with_that_window(name: str, dtype: torch.dtype) -> None:
    config, windows = WINDOWS[name]
    engine = Engine(config, 3, 16, dtype=dtype, windows=windows)
    plain = {window: Engine(replace(config, window=window), 3, 16, dtype=dtype) for window in (config.window, *windows)}
    losses = set()
    for i, window in enumerate((*windows, config.window, windows[0])):
        other = plain[window]
        for mine, its in zip(engine.tensors().values(), other.tensors().values(), strict=True):
            its.copy_(mine)
        other.draws = engine.draws
        engine.window = window
        x, y = batch(config, 3 - i % 2, 16 - 5 * (i % 3))
        loss = engine.step(x, y, 1e-2)
        assert loss == other.step(x, y, 1e-2) and equal(engine.tensors(), other.tensors())
        assert engine.evaluate(x, y) == plain_evaluation(plain[config.window], engine, x, y), "the model's own window"
        losses.add(engine.forward(x, y))
        assert engine.forward(x, y) == again(other, engine, x, y)
    assert len(losses) > len(windows)
    with pytest.raises(ValueError, match=r"window: got 99; accepted: .*, as planned"):
        engine.window = 99


def plain_evaluation(other: Engine, engine: Engine, x: torch.Tensor, y: torch.Tensor) -> float:
    for mine, its in zip(engine.tensors().values(), other.tensors().values(), strict=True):
        its.copy_(mine)
    return other.evaluate(x, y)


def again(other: Engine, engine: Engine, x: torch.Tensor, y: torch.Tensor) -> float:
    other.draws = engine.draws - 1
    return other.forward(x, y)


@pytest.mark.parametrize("windows", [3, (0,), ("none",), (True,), (1 << 31,)])
def test_bad_windows_of_an_engine_are_refused(windows: Any) -> None:
    with pytest.raises(ValueError, match=r"windows: got .*; accepted: a sequence of ints ≥ 1, or None for no window"):
        Engine(CONFIG, 2, 8, windows=windows)


def test_scratch_is_large_enough_for_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may need other buffers with one window than with another, as hopper does."""
    genuine = qkv_attention_workspace

    def workspace(*given: Any, **options: Any) -> Any:
        left = 99 if given[7].window is None else given[7].window[0] + 1
        return genuine(*given, **options) | {"wide": ((left,), torch.int32), f"only{left}": ((1,), torch.int32)}

    monkeypatch.setattr(attention, "qkv_attention_workspace", workspace)
    spec = StepSpec(QWEN3, 2, 8, torch.float32, torch.device("cpu"), windows=(2, 7))
    for window in ("model", 2, 7):
        plain, windowed = (block.attention.backward_scratch for block in spec.declare(window=window).blocks)
        assert plain["wide"].shape == (99,) and {"only99"} == {name for name in plain if name.startswith("only")}
        assert windowed["wide"].shape == (7,) and {"only2", "only7"} <= windowed.keys()
        assert ("only5" in windowed) == (window == "model"), "the plan has all of them"


def test_the_plan_with_only_the_models_window_is_the_plan_without_windows() -> None:
    for config, _ in WINDOWS.values():
        same = Engine(config, 2, 8, windows=[config.window]).plan
        assert same.peak_bytes == Engine(config, 2, 8).plan.peak_bytes


# ── runs ──

MODEL = ModelConfig(vocab_size=256, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.1, window=12)
STAGES: Any = (
    {"steps": 2, "batch_size": 2, "seq_len": 4, "window": 3},
    {"steps": 3, "seq_len": 8, "window": "none"},
    {"steps": 1, "batch_size": 1},
    {"window": 5},
)
SETTINGS = TrainConfig(
    steps=8, batch_size=3, seq_len=16, gradient_accumulation=2, warmup_steps=1, eval_interval=3, eval_batches=1,
    checkpoint_interval=0, keep_checkpoints=99, log_interval=1, sample_tokens=0, log="none", stages=STAGES,
    learning_rate=1e-2, schedule="wsd",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + i * i % 90) for i in range(449)), encoding="utf-8")
    return RunConfig(MODEL, SETTINGS, DataConfig(files=(str(text),)))


def last(folder: Path) -> Any:
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


def test_a_run_resumes_to_the_same_bits_within_each_stage_and_at_its_end(run: RunConfig, tmp_path: Path) -> None:
    events: list[tuple[str, Any]] = []
    run = replace(run, train=replace(run.train, checkpoint_interval=1))
    whole = train(run, tmp_path / "whole", show=lambda event, numbers: events.append((event, dict(numbers))))
    end = last(tmp_path / "whole")
    for step in (1, 2, 4):
        checkpoint = next((tmp_path / "whole" / "checkpoints").glob(f"*-step-{step}"))
        again = train({"train": {"checkpoint_interval": 0}}, None, resume=checkpoint)
        found = last(tmp_path / "whole")
        assert equal(found.tensors, end.tensors), checkpoint.name
        assert all(found.state[name] == end.state[name] for name in ("engine", "data", "train_loss", "validation_loss"))
        assert again.train_loss == whole.train_loss
    records = [r for r in read_log(tmp_path / "whole" / "log.jsonl") if r["kind"] == "stage"]
    assert [(r["step"], r["stage"], r["batch_size"], r["seq_len"], r["window"]) for r in records] == [
        (1, 1, 2, 4, 3),
        (3, 2, 3, 8, None),
        (6, 3, 1, 16, 12),
        (7, 4, 3, 16, 5),
    ]
    tokens = [numbers["tokens_seen"] for event, numbers in events if event == "train"]
    assert [b - a for a, b in zip([0, *tokens], tokens, strict=False)] == [16] * 2 + [48] * 3 + [32] + [96] * 2
    shown = [_message(event, numbers) for event, numbers in events if event == "stage"]
    assert shown[1] == "step      3  stage 2 of 4 begins: batches of 3 × 8 tokens, no window"
    assert shown[3] == "step      7  stage 4 of 4 begins: batches of 3 × 16 tokens, a window of 5"


def test_the_window_of_a_stage_changes_its_losses(run: RunConfig, tmp_path: Path) -> None:
    losses = []
    for window in (1, 16):
        stages: Any = ({"steps": 1, "window": window}, {})
        settings = replace(run.train, steps=2, stages=stages, eval_interval=0, decay_steps=1)
        losses.append(train(replace(run, train=settings), tmp_path / str(window)).train_loss)
    assert losses[0] != losses[1]


def test_stages_that_change_nothing_change_no_bit(run: RunConfig, tmp_path: Path) -> None:
    same: Any = ({"steps": 3}, {"steps": 2, "window": "model"}, {})
    for name, stages in (("none", ()), ("same", same)):
        train(replace(run, train=replace(run.train, stages=stages, eval_interval=0)), tmp_path / name)
    a, b = last(tmp_path / "none"), last(tmp_path / "same")
    assert equal(a.tensors, b.tensors) and a.state["data"] == b.state["data"]


RANKS = replace(
    SETTINGS, dtype="float64", steps=6, gradient_accumulation=3, eval_interval=0, checkpoint_interval=3, decay_steps=2,
    stages=(*STAGES[:2], Stage(batch_size=1)),
)  # fmt: skip
ROPE = replace(MODEL, dropout=0.0, position="rope")


def of_two_ranks(mesh: Mesh, folder: str) -> None:
    """A run over ranks, resumed between the pieces of a row, three steps before its end."""
    run, home = RunConfig(ROPE, RANKS, DataConfig(files=(str(Path(folder, "text.txt")),))), Path(folder, "ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilegrad.training.run.Mesh", lambda _device, _timeout: mesh)
        patch.setattr(mesh, "watch", nullcontext)
        patch.setattr(mesh, "close", lambda: None)
        train(run, home)
        mesh.barrier()
        end, checkpoint = last(home), home / "checkpoints" / "000001-step-3"
        assert load_checkpoint(checkpoint).state["data"]["piece"] == 1
        mesh.barrier()
        train(None, None, resume=checkpoint)
        mesh.barrier()
        assert equal(last(home).tensors, end.tensors) and last(home).state["data"] == end.state["data"]


def test_ranks_resume_to_the_same_bits_within_a_stage(two_ranks: Ranks, run: RunConfig, tmp_path: Path) -> None:
    two_ranks.run(of_two_ranks, str(tmp_path))
    train(replace(run, model=ROPE, train=replace(RANKS, checkpoint_interval=0)), tmp_path / "one")
    many, one = last(tmp_path / "ranks"), last(tmp_path / "one")
    assert many.state["data"] == one.state["data"]
    for name, x in one.tensors.items():
        assert torch.allclose(many.tensors[name], x, rtol=1e-9, atol=1e-11), name


def test_steps_of_a_wsd_run_may_grow_without_changing_its_past(run: RunConfig, tmp_path: Path) -> None:
    """A run without a decay, continued by one: the same bits as a run that knew all of its steps."""
    settings = replace(run.train, stages=(), eval_interval=0, decay_steps=3, steps=9)
    train(replace(run, train=settings), tmp_path / "whole")
    train(replace(run, train=replace(settings, steps=5, decay_steps=0)), tmp_path / "part")
    train({"train": {"steps": 9, "decay_steps": 3}}, None, resume=tmp_path / "part")
    a, b = last(tmp_path / "whole"), last(tmp_path / "part")
    assert equal(a.tensors, b.tensors)
    rates = [r["learning_rate"] for r in read_log(tmp_path / "part" / "log.jsonl") if r["kind"] == "train"]
    assert rates[:6] == [1e-2] * 6 and rates[8] == 1e-4 < rates[7] < rates[6] < 1e-2


def test_a_resumed_run_keeps_its_stages_and_schedule(run: RunConfig) -> None:
    own = run.plain()["train"]["stages"]
    assert resumed(run, {"train": {"stages": own, "decay_steps": -1}}) == run
    assert resumed(run, {"train": {"stages": [dict(stage) for stage in STAGES]}}) == run
    assert run_from(json.loads(json.dumps(run.plain())), "run").train == run.train
    with pytest.raises(ValueError, match=r"^stages: got .*; accepted: the run's value, .*, when resuming"):
        resumed(run, {"train": {"stages": []}})
    with pytest.raises(ValueError, match=r"^schedule: got 'linear'; accepted: the run's value, 'wsd', when resuming"):
        resumed(run, {"train": {"schedule": "linear"}})
    with pytest.raises(ValueError, match="stages: got 6 steps before the last stage; accepted: fewer than steps, 6"):
        resumed(run, {"train": {"steps": 6}})


def test_a_resumed_run_may_have_more_steps_if_its_last_stage_had_a_number(run: RunConfig) -> None:
    ended = (*STAGES[:-1], Stage(2, batch_size=3))
    own = replace(run, train=replace(run.train, stages=ended))
    for same in ({}, {"stages": [dict(stage) for stage in own.plain()["train"]["stages"]]}):
        more = resumed(own, {"train": {"steps": 11, **same}}).train
        assert (more.steps, begins(more.stages), more.stages[-1].steps) == (11, [0, 2, 5, 6], None)
    assert resumed(own, {"train": {"stages": list(ended)}}) == own
    longer = [*STAGES[:-1], Stage(5, batch_size=3)]  # a file whose steps and last stage were edited
    assert resumed(own, {"train": {"stages": longer, "steps": 11}}) == resumed(own, {"train": {"steps": 11}})
    with pytest.raises(ValueError, match="stages: got 11 steps in all; accepted: steps, 12, or a last stage without"):
        resumed(own, {"train": {"stages": longer, "steps": 12}})


def test_each_step_belongs_to_its_stage() -> None:
    stages = [Stage(2), Stage(3), Stage(None)]
    assert begins(stages) == [0, 2, 5]
    assert [stage_of(stages, step) for step in range(7)] == [0, 0, 1, 1, 1, 2, 2]


def test_epochs_give_the_steps_of_the_last_stage(run: RunConfig) -> None:
    """Rows of 16 tokens: 2 steps of 2 micro-batches of 2 pieces of 4 tokens read 1 group of 2 rows, and so on."""
    asked = replace(run, train=replace(run.train, epochs=2, decay_steps=-1))
    found = with_steps(asked, lambda epochs: 20 * epochs).train
    assert (found.steps, found.decay_steps) == (6 + -(-(40 - 2 - 9 - 2) // 6), 3)
    with pytest.raises(ValueError, match="stages: got 4 stages, and the epochs end in stage 2; accepted: fewer steps"):
        with_steps(asked, lambda epochs: 5 * epochs)
    ended = (*STAGES[:-1], {"steps": 2})
    with pytest.raises(
        ValueError, match="stages: got steps 2 in the last stage with epochs; accepted: a last stage wi"
    ):
        replace(run, train=replace(run.train, epochs=2, decay_steps=-1, stages=ended))


def test_a_run_of_epochs_and_stages_reads_each_token_once_per_epoch(run: RunConfig, tmp_path: Path) -> None:
    stages: Any = ({"steps": 4, "seq_len": 4}, {"batch_size": 1, "window": 2})
    settings = replace(SETTINGS, epochs=2, stages=stages, gradient_accumulation=1, eval_interval=0)
    result = train(replace(run, train=settings), tmp_path / "run")
    state = last(tmp_path / "run").state
    assert result.steps == state["run"]["train"]["steps"] == 4 + (2 * state["data"]["index"] - 3)
    assert (state["data"]["epoch"], state["data"]["piece"]) == (1, 0)


REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ("3", "got '3'; accepted: a list of at most 1,024 tables"),
    "too many": ([{"steps": 1}] * 1025, "got 1,025 stages; accepted: a list of at most 1,024 tables"),
    "no table": ([3], "got 3 as stage 1; accepted: a table of steps, batch_size, seq_len, window"),
    "a key": ([{"step": 3}], "got 'step' in stage 1 (did you mean 'steps'?); accepted: steps, batch_size, seq_len, window"),
    "no steps": ([{}, {}], "got steps None in stage 1; accepted: an int ≥ 1; only the last stage may leave it out"),
    "0 steps": ([{"steps": 0}, {}], "got steps 0 in stage 1; accepted: an int ≥ 1, at most 1,000,000,000"),
    "a large batch": ([{"batch_size": 4}], "got batch_size 4 in stage 1; accepted: an int ≥ 1, at most the run's value, 3"),
    "half a batch": ([{"batch_size": 0.5}], "got batch_size 0.5 in stage 1; accepted: an int ≥ 1"),
    "long rows": ([{"seq_len": 32}], "got seq_len 32 in stage 1; accepted: an int ≥ 1, at most the run's value, 16"),
    "no divisor": ([{"seq_len": 6}], "got seq_len 6 in stage 1; accepted: a divisor of the run's value, 16"),
    "a window": ([{"window": 17}], "got window 17 in stage 1; accepted: 'none', 'model', or an int ≥ 1, at most block_size"),
    "true": ([{"window": True}], "got window True in stage 1; accepted: 'none', 'model', or an int ≥ 1, at most block"),
    "too long": ([{"steps": 8}, {}], "got 8 steps before the last stage; accepted: fewer than steps, 8"),
    "too short": ([{"steps": 3}, {"steps": 4}], "got 7 steps in all; accepted: steps, 8, or a last stage without steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_stages_are_refused(run: RunConfig, name: str) -> None:
    stages, words = REFUSED[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"stages: {words}")):
        replace(run, train=replace(run.train, stages=stages))


def test_a_stage_may_have_any_window_of_a_model(run: RunConfig) -> None:
    wide = RunConfig(replace(MODEL, window=40), SETTINGS)
    assert [stage.window for stage in wide.train.stages] == [3, None, 40, 5] and wide.windows == (3, None, 40, 5)
    assert run_from(json.loads(json.dumps(wide.plain())), "run") == wide
    with pytest.raises(ValueError, match="stages: got window True in stage 1"):
        replace(run, model=replace(MODEL, window=1), train=replace(SETTINGS, stages=(Stage(window=True),)))


def test_windows_and_rows_that_stages_cannot_change_are_refused(run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="stages: got window 3 in stage 1; accepted: none of its own, because window_lay"
    ):
        replace(run, model=replace(MODEL, window_layers=()))
    packed = replace(run.data, packing=True)
    with pytest.raises(
        ValueError, match="stages: got seq_len 4 with rows of documents; accepted: the run's value, 16, beca"
    ):
        replace(run, data=packed)
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    chat = DataConfig(files=(str(tmp_path / "chat.jsonl"),))
    with pytest.raises(ValueError, match="stages: got seq_len 4 with rows of documents"):
        train(replace(run, data=chat), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    stages: Any = ({"steps": 3, "batch_size": 1, "window": 2}, {})
    train(replace(run, data=packed, train=replace(run.train, stages=stages)), tmp_path / "run")


def test_stages_can_be_given_on_the_command_line(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--model.n_layer", "1", "--model.n_embd", "16", "--steps", "5", "--seq-len", "16", "--batch-size", "2"]
    stages = ["--train.stages", '[{steps = 2, batch_size = 1, seq_len = 8, window = 3}, {window = "none"}]']
    peaks = []
    for flags in (small, [*small, *stages]):
        assert main(["plan", "--json", *flags]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[1] >= peaks[0] > 0
    flags = [*small, *stages, "--train.schedule", "trapezoid", "--train.decay_steps", "2", "--log", "none"]
    assert main(["train", "--data", *run.data.files, "--out", "run", *flags]) == 0
    assert "step      3  stage 2 of 2 begins: batches of 2 × 16 tokens, no window" in capsys.readouterr().out
    assert main(["plan", "--train.stages", "[{steps = 2, batch = 1}]"]) == 2
    assert "stages: got 'batch' in stage 1" in capsys.readouterr().err
