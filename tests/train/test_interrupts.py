"""A run that is stopped by a signal, a closed output, a full disk or a loss that is not finite keeps its progress."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from support.forked import python
from support.models import small_run
from support.native import needs_library
from support.signals import hangups_heard, hear_interrupts

from tilegrad.cli import main, progress
from tilegrad.engine.engine import Engine
from tilegrad.text import atomic
from tilegrad.training import loop, sections
from tilegrad.training.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from tilegrad.training.config import DataConfig, RunEnded
from tilegrad.training.log import read_log
from tilegrad.training.run import train

TOML = """
[model]
vocab_size = 256
block_size = 16
n_layer = 1
n_head = 2
n_embd = 16
[train]
steps = 100000
batch_size = 2
seq_len = 12
log_interval = 1
eval_batches = 1
sample_tokens = 4
[data]
files = ["text.txt"]
"""
RUN = small_run(steps=12, warmup_steps=2, eval_interval=0, checkpoint_interval=4, sample_tokens=4)
Show = Callable[[str, dict[str, Any]], None]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    Path("run.toml").write_text(TOML, encoding="utf-8")
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """SIGHUP is not ignored, also where nohup runs the tests."""
    with hangups_heard():
        yield


def newest(folder: str = "run") -> Checkpoint:
    path = latest_checkpoint(Path(folder) / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


def at_step(step: int, act: Callable[[], object]) -> Show:
    def show(event: str, numbers: dict[str, Any]) -> None:
        if event == "train" and numbers["step"] == step:
            act()

    return show


def watched_by(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def watch() -> Iterator[Show]:
        yield show

    monkeypatch.setattr(progress, "watch", watch)


def send(*numbers: signal.Signals) -> Callable[[], None]:
    def all_of_them() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return all_of_them


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_prints_the_command_that_resumes(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watched_by(at_step(3, send(number)), monkeypatch)
    assert main(["train", "run.toml", "--out", "my run"]) == code
    error = capsys.readouterr().err
    assert error == f"tilegrad: stopped by {number.name}; resume with: tilegrad train --resume 'my run'\n"
    assert newest("my run").step == 3 and Path("my run/report.html").exists()
    assert signal.getsignal(number) != signal.SIG_IGN and not Path("my run/run.lock").exists()
    for file in ("run.toml", "text.txt"):
        Path(file).unlink()
    watched_by(at_step(5, send(number)), monkeypatch)
    program, *arguments = shlex.split(error.partition("resume with: ")[2])
    assert program == "tilegrad" and main(arguments) == code
    assert newest("my run").step == 5
    assert main(["generate", "my run", "--prompt", "the", "--max-tokens", "2"]) == 0


def test_stopped_ranks_end_with_0_so_that_torchrun_does_not_restart_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_two(*arguments: Any, **options: Any) -> Any:
        result = train(*arguments, **options)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return result

    watched_by(at_step(2, send(signal.SIGINT)), monkeypatch)
    monkeypatch.setattr("tilegrad.training.run.train", of_two)
    assert main(["train", "run.toml", "--out", "run"]) == 0
    assert newest().step == 2


def test_a_run_interrupted_twice_has_the_bits_of_an_uninterrupted_one() -> None:
    train(RUN, Path("whole"))
    train(RUN, Path("run"), show=at_step(3, send(signal.SIGHUP)))
    train(None, Path("run"), resume=True, show=at_step(6, send(signal.SIGINT)))
    assert train(None, Path("run"), resume=True).stopped_by is None
    a, b = newest("whole").tensors, newest().tensors
    assert all(torch.equal(a[name], b[name]) for name in a)
    losses = [[r["loss"] for r in read_log(Path(f) / "log.jsonl") if r["kind"] == "train"] for f in ("whole", "run")]
    assert losses[0] == losses[1] and len(losses[0]) == 12


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = train(RUN, Path("run"), show=at_step(3, send(signal.SIGHUP)))
        assert (result.steps, result.stopped_by, signal.getsignal(signal.SIGHUP)) == (12, None, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_after_the_last_step_ends_a_finished_run() -> None:
    def show(event: str, _numbers: dict[str, Any]) -> None:
        if event == "validation":
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(RUN, Path("run"), show=show).stopped_by is None
    assert train(None, Path("run"), resume=True).steps == 12


def interrupted_save(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends `times` more Ctrl-C while the tensors are written."""

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        send(*[signal.SIGINT] * times)()
        save_file(tensors, path)

    monkeypatch.setattr(atomic, "save_file", save)


def test_a_second_ctrl_c_during_the_save_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watched_by(at_step(3, send(signal.SIGINT)), monkeypatch)
    interrupted_save(1, monkeypatch)
    assert main(["train", "run.toml", "--out", "run"]) == 130
    assert "saving; a third Ctrl-C ends at once and loses what was not saved" in capfd.readouterr().err
    assert newest().step == 3 and Path("run/report.html").exists()


def test_a_third_ctrl_c_ends_the_run_at_once_and_keeps_the_last_good_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(replace(RUN, train=replace(RUN.train, steps=4)), Path("run"))
    watched_by(at_step(7, send(signal.SIGINT)), monkeypatch)
    interrupted_save(2, monkeypatch)
    assert main(["train", "--resume", "run", "--steps", "90"]) == 130
    assert newest().step == 4 and not Path("run/run.lock").exists()
    monkeypatch.undo()


BEGIN = """
import fcntl, os, pty, runpy, signal, sys, termios
def begin(attach):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        attach()
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # as a new process has them
        sys.argv = ["tilegrad", "train", "run.toml", "--out", "run"]
        runpy.run_module("tilegrad", run_name="__main__")
    return child
def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
CLOSED_PIPE = f"""{BEGIN}
here, there = os.pipe()
def attach():
    os.close(here)
    os.dup2(there, 1)
child = begin(attach)
os.close(there)
with open(here, encoding="utf-8") as lines:
    next(line for line in lines if line.startswith("step      3"))
print(ended(child))
"""
CLOSED_TERMINAL = f"""{BEGIN}
master, slave = pty.openpty()
def attach():
    os.setsid()
    os.close(master)
    for stream in range(3):
        os.dup2(slave, stream)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
child = begin(attach)
os.close(slave)
seen = b""
while b"tok/s" not in seen:
    seen += os.read(master, 4096)
os.close(master)
print(ended(child))
"""
FULL_DISK = f"""{BEGIN}
print(ended(begin(lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1))))
"""


@needs_library  # without it there is a warning on stderr
def test_a_run_saves_when_its_pipe_is_closed() -> None:
    done = python(CLOSED_PIPE)
    assert done.stdout == "141\n", done.stderr
    assert done.stderr == "tilegrad: stopped by SIGPIPE; resume with: tilegrad train --resume run\n"
    assert newest().step >= 3 and Path("run/report.html").exists()


def test_a_run_saves_when_its_terminal_is_closed() -> None:
    done = python(CLOSED_TERMINAL)
    assert done.stdout == "129\n", done.stderr
    assert newest().step >= 1 and Path("run/report.html").exists()


def test_a_run_saves_when_the_disk_of_its_output_is_full() -> None:
    done = python(FULL_DISK)
    assert done.stdout == "1\n" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        "tilegrad: output: No space left on device; the report: run/report.html; saved: run/check"
    )
    assert newest().step == 0


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def no_limit_afterwards() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("no_limit_afterwards")
def test_a_full_disk_keeps_the_last_good_checkpoint() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    fill = at_step(6, lambda: limit_file_size(Path("run/log.jsonl").stat().st_size + 10))
    with pytest.raises(RunEnded) as ended:
        train(RUN, Path("run"), show=fill)
    limit_file_size(before)
    assert str(ended.value) == (
        "run/log.jsonl: File too large; saved: run/checkpoints/000001-step-4, after 4 steps; "
        "resume with: tilegrad train --resume run"
    )
    assert newest().step == 4 and sorted(p.name for p in Path("run/checkpoints").iterdir()) == ["000001-step-4"]
    assert not list(Path("run").glob(".*.staged"))
    assert train(None, Path("run"), resume=True).steps == 12


def full(*_arguments: object, **_options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_that_cannot_be_written_saves_the_finished_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.training.log import RunLog

    append = RunLog.append

    def fails_at_6(self: RunLog, step: int, kind: str, values: Any) -> None:
        if step == 6:
            with monkeypatch.context() as patch:
                patch.setattr(self, "_file", type("Full", (), {"write": full, "closed": True}))
                append(self, step, kind, values)
        append(self, step, kind, values)

    monkeypatch.setattr(RunLog, "append", fails_at_6)
    watched_by(lambda _event, _numbers: None, monkeypatch)
    assert main(["train", "run.toml", "--out", "run"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "tilegrad: run/log.jsonl: No space left on device; the report: run/report.html; "
        "saved: run/checkpoints/000001-step-6, after 6 steps; resume with: tilegrad train --resume run\n"
    )
    assert newest().step == 6


def test_the_error_of_a_failed_save_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    train(replace(RUN, train=replace(RUN.train, steps=4, keep_checkpoints=1)), Path("run"))

    def no_space(_tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(atomic, "save_file", no_space)
    longer = replace(RUN, train=replace(RUN.train, keep_checkpoints=1))
    with pytest.raises(RunEnded, match=r"000002-step-8: No space left on device; .*step-4, after 4 steps") as ended:
        train(longer, Path("run"), resume=True)
    assert isinstance(ended.value.__cause__, OSError) and ended.value.__cause__.errno == errno.ENOSPC
    assert [p.name for p in Path("run/checkpoints").iterdir()] == ["000001-step-4"] and newest().step == 4


def test_a_report_that_cannot_be_written_is_an_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_whole", lambda _path, _pieces: full())
    with pytest.raises(RunEnded, match=r"No space left on device; saved: run/checkpoints/.*-step-12, after 12 steps"):
        train(RUN, Path("run"))
    assert newest().step == 12


def poisoned_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Engine.gradients

    def poisoned(self: Engine, *arguments: Any, **more: Any) -> float:
        loss = gradients(self, *arguments, **more)
        if self.steps >= step:
            self.loss = loss = float("nan")
            self.optimizer.loss.fill_(loss)
        return loss

    monkeypatch.setattr(Engine, "gradients", poisoned)


def test_a_loss_that_is_not_finite_leaves_an_earlier_checkpoint_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(RUN, train=replace(RUN.train, steps=30, checkpoint_interval=7))
    train(run, Path("whole"))
    with monkeypatch.context() as patch:
        poisoned_after(5, patch)
        with pytest.raises(
            RunEnded, match=r"not finite in 10 steps in a row .*; the checkpoint is from before these steps; "
        ):
            train(run, Path("run"))
        watched_by(lambda _event, _numbers: None, patch)
        assert main(["train", "--resume", "run"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step-5, after 5 steps; resume with: tilegrad train --resume run" in error
    found = newest()
    assert found.step == 5 and found.state["engine"]["skipped"] == 0 and Path("run/report.html").exists()
    assert train(None, Path("run"), resume=True).steps == 30
    a, b = newest("whole").tensors, newest().tensors
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_resumed_among_steps_that_are_not_finite_ends_before_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = replace(RUN, train=replace(RUN.train, steps=30, checkpoint_interval=0))
    train(run, Path("whole"))
    with monkeypatch.context() as patch:
        poisoned_after(5, patch)
        assert train(run, Path("run"), show=at_step(8, send(signal.SIGTERM))).steps == 8
        assert newest().state["engine"]["skipped_in_a_row"] == 3
        train_lines = [r for r in read_log(Path("run/log.jsonl")) if r["kind"] == "train"]
        assert [r["skipped"] for r in train_lines] == [0, 0, 0, 0, 0, 1, 2, 3]
        with pytest.raises(
            RunEnded, match=r"10 steps in a row .*; the checkpoint is from before these steps; .*after 5 steps"
        ):
            train(None, Path("run"), resume=True)
    assert newest().step == 5 and newest().state["engine"]["skipped"] == 0 and newest().state["finite"] is None
    assert train(None, Path("run"), resume=True).steps == 30
    a, b = newest("whole").tensors, newest().tensors
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_new_run_does_not_mix_with_a_run_that_died_before_its_first_checkpoint() -> None:
    def killed() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        train(RUN, Path("run"), show=at_step(3, killed))
    Path("run/tensorboard").mkdir()
    Path("run/tensorboard/events.out.tfevents.1").write_text("of the dead run", encoding="utf-8")
    assert read_log(Path("run/log.jsonl"))[-1]["step"] == 3
    train(RUN, Path("run"))
    assert [r["step"] for r in read_log(Path("run/log.jsonl")) if r["kind"] == "train"] == list(range(1, 13))
    assert not Path("run/tensorboard").exists()
    length = len(read_log(Path("run/log.jsonl")))
    train(None, Path("run"), resume=True)
    assert len(read_log(Path("run/log.jsonl"))) > length  # its own run loses no record


SLOW = """
import os, signal, sys, time
from pathlib import Path
from tilegrad.training import run
from tilegrad.cli import main
def prepare(*arguments, **options):
    made = genuine(*arguments, **options)
    os.write(there, b"prepared")
    time.sleep(600)
    return made
genuine, run.prepare_data = run.prepare_data, prepare
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for number in map(int, sys.argv[1:]):
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        sys.exit(main(["train", "run.toml", "--out", "deep/run"]))
    assert os.read(here, 8) == b"prepared" and Path("deep/run/data/tokens.bin").exists()
    os.kill(child, number)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), Path("deep").exists(), flush=True)
"""


def test_a_signal_during_the_preparation_of_data_leaves_no_folder() -> None:
    numbers = [str(int(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    done = python(SLOW, *numbers)
    assert (done.stdout, done.stderr) == ("130 False\n143 False\n129 False\n", "")


@pytest.mark.parametrize("left", [0, 100, 1000])
def test_a_run_saves_when_its_data_is_truncated_and_resumes_when_it_is_whole_again(left: int) -> None:
    """Without a check of the file's length the process would end by SIGBUS."""
    tokens, whole = Path("run/data/tokens.bin"), b""

    def cut() -> None:
        nonlocal whole
        whole = tokens.read_bytes()
        os.truncate(tokens, left)

    with pytest.raises(
        RunEnded, match=f"tokens.bin: truncated while it was in use: {left} bytes, .* before; .*saved: .*step-6"
    ):
        train(RUN, Path("run"), show=at_step(6, cut))
    kept = newest()
    assert kept.step == 6 and all(bool(x.isfinite().all()) for x in kept.tensors.values())
    with pytest.raises(ValueError, match=r"tokens.bin: "):
        train(None, Path("run"), resume=True)
    assert newest().step == 6
    tokens.write_bytes(whole)
    assert train(None, Path("run"), resume=True).steps == 12
    train(RUN, Path("whole"))
    a, b = newest("whole").tensors, newest().tensors
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_learning_rate_that_breaks_the_model_is_reported_without_a_sample() -> None:
    run = replace(RUN, train=replace(RUN.train, steps=20, learning_rate=1e30, warmup_steps=0))
    with pytest.raises(RunEnded, match="not finite"):
        train(run, Path("run"))
    assert newest().step == 1 and Path("run/report.html").exists()
    stopped = train(run, Path("stopped"), show=at_step(1, send(signal.SIGINT)))
    assert (stopped.steps, stopped.sample, stopped.stopped_by) == (1, "", "SIGINT")


def test_a_second_run_in_the_folder_of_a_running_one_is_refused() -> None:
    refusals: list[str] = []

    def second() -> None:
        for resume in (False, True):
            with pytest.raises(ValueError, match="accepted: one at a time") as error:
                train(RUN, Path("run"), resume=resume)
            refusals.append(str(error.value))

    assert train(RUN, Path("run"), show=at_step(6, second)).steps == 12
    assert (
        refusals
        == [f"run: got a second training while process {os.getpid()} trains there; accepted: one at a time"] * 2
    )
    assert not Path("run/run.lock").exists()


HOLDER = """
import fcntl, os, time
file = open("run/run.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, flush=True)
print("locked", flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_killed_process_is_free() -> None:
    Path("run").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            with pytest.raises(ValueError, match=f"while process {process.pid} trains there"):
                train(RUN, Path("run"))
            assert [p.name for p in Path("run").iterdir()] == ["run.lock"]
        finally:
            process.kill()
    assert train(RUN, Path("run")).steps == 12 and not Path("run/run.lock").exists()


def test_an_interrupted_demo_prints_that_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sections, "preset_run", lambda _name: replace(RUN, data=DataConfig()))
    watched_by(at_step(2, send(signal.SIGINT)), monkeypatch)
    assert main(["demo"]) == 130
    out, error = capsys.readouterr()
    assert "It was stopped after 2 of 12 steps." in out and "learn" not in out.replace("to learn from", "")
    assert error == "tilegrad: stopped by SIGINT; resume with: tilegrad train --resume runs/demo\n"


def test_the_last_step_is_evaluated_once() -> None:
    train(replace(RUN, train=replace(RUN.train, steps=6, eval_interval=3)), Path("run"))
    assert [r["step"] for r in read_log(Path("run/log.jsonl")) if r["kind"] == "validation"] == [3, 6]


def test_processes_of_a_test_get_the_signals_that_a_script_or_nohup_ignores() -> None:
    """Both ignore signals for all processes that they start, and then these tests would wait for ever."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    say = "import signal; print(*[signal.getsignal(n) != signal.SIG_IGN for n in (signal.SIGINT, signal.SIGHUP)])"
    try:
        hear_interrupts()
        with hangups_heard():
            done = subprocess.run([sys.executable, "-c", say], capture_output=True, text=True)
    finally:
        for number, was in before.items():
            signal.signal(number, was)
    assert done.stdout == "True True\n", done.stderr
