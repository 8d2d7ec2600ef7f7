"""Runs of several processes under torchrun: the same training as one, lost ranks, restarts, any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tilegrad import Engine, ModelConfig
from tilegrad.pretrained.weights import write_weights
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint
from tilegrad.training.log import read_log

SMALL = [
    "--model.n_layer", "2", "--model.n_embd", "32", "--model.block_size", "32", "--train.batch_size", "2",
    "--train.gradient_accumulation", "3", "--train.eval_interval", "0", "--train.checkpoint_interval", "4",
    "--train.log_interval", "1", "--train.warmup_steps", "1",
]  # fmt: skip


FAULTY = str(Path(__file__).parents[1] / "support" / "faulty_rank.py")


class Torchrun:
    """A run under torchrun. `fault` is the fault, its rank and its step (support/faulty_rank.py)."""

    def __init__(
        self, world: int, folder: Path, *flags: str, restarts: int = 0, fault: tuple[str, int, int] | None = None
    ) -> None:
        self.folder, self.log = folder, folder.with_suffix(".txt")
        program = ["-m", "tilegrad"] if fault is None else [FAULTY, *map(str, fault)]
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
            f"--max-restarts={restarts}", *program, "train", "--out", str(folder), *SMALL, *flags,
        ]  # fmt: skip
        with self.log.open("w", encoding="utf-8") as out:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)

    def wait(self, limit_s: float = 240) -> int:
        try:
            return self.process.wait(limit_s)
        finally:
            self.process.kill()

    def after_step(self, step: int) -> None:
        self.after(f"step{step:>7,} of")

    def after(self, line: str) -> None:
        """Waits until the text is printed."""
        until = time.monotonic() + 200
        while line not in self.text():
            assert self.process.poll() is None and time.monotonic() < until, self.text()
            time.sleep(0.05)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def pid(self, rank: int) -> int:
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parent = (folder / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1]
                    variables = (folder / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if int(parent) == self.process.pid and f"RANK={rank}".encode() in variables:
                    return int(folder.name)
        raise AssertionError(f"no process of rank {rank}")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def params(self) -> dict[str, torch.Tensor]:
        path = latest_checkpoint(self.folder / "checkpoints")
        assert path is not None
        return load_checkpoint(path).tensors


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The result of 14 steps of two ranks without a fault."""
    run = Torchrun(2, tmp_path_factory.mktemp("undisturbed") / "run", "--steps", "14")
    assert run.wait() == 0, run.text()
    return run.params()


@pytest.mark.slow
def test_a_killed_rank_restarts_to_the_same_bits_and_any_number_of_ranks_continues(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    killed = Torchrun(2, tmp_path / "run", "--steps", "14", restarts=1)
    killed.after_step(6)
    killed.send(1, signal.SIGKILL)
    assert killed.wait() == 0, killed.text()
    assert "resumed from" in killed.text()
    assert apart(killed.params(), undisturbed) == 0.0
    losses = {}
    for world in (1, 4):
        more = Torchrun(world, tmp_path / "run", "--resume", "--steps", "15")
        assert more.wait() == 0, more.text()
        assert ("1 of 4 ranks have no micro-batch: gradient_accumulation is 3" in more.text()) == (world == 4)
        losses[world] = read_log(more.folder / "log.jsonl")[-1]["loss"]
        (latest_checkpoint(more.folder / "checkpoints") or Path()).rename(tmp_path / f"gone-{world}")
    assert losses[1] == pytest.approx(losses[4], abs=1e-5)


@pytest.mark.slow
def test_a_refusal_is_printed_once_and_names_the_key(tmp_path: Path) -> None:
    """Some errors occur on every rank before they connect, and some only after."""
    few = Torchrun(2, tmp_path / "few", "--train.gradient_accumulation", "1")
    apart_in_seed = Torchrun(2, tmp_path / "seed", "--steps", "4", fault=("other seed", 1, 0))
    for run, said in (
        (few, "tilegrad: gradient_accumulation: got 1; accepted: at least 2"),
        (apart_in_seed, "tilegrad: train.seed: got 1234 on rank 1; accepted: the value of rank 0, "),
    ):
        assert run.wait() != 0
        lines = [line for line in run.text().splitlines() if line.startswith("tilegrad: ")]
        assert len(lines) == 1 and lines[0].startswith(said) and len(lines[0]) < 120, run.text()


@pytest.mark.slow
def test_ten_restarts_in_a_row_end_with_the_same_bits(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    flags = ("--steps", "14", "--train.checkpoint_interval", "1")
    run = Torchrun(2, tmp_path / "run", *flags, restarts=10, fault=("killed", 1, 2))
    assert run.wait(560) == 0, run.text()
    assert run.text().count("resumed from") == 10
    assert apart(run.params(), undisturbed) == 0.0


@pytest.mark.slow
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_it(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run = Torchrun(2, tmp_path / "run", "--steps", "14", fault=("torn", 1, 8))
    assert run.wait() != 0
    assert "rank 0, save at 'step 8: saving': rank 1 is dead or stopped" in run.text()
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [".staged", "000001-step-4"]
    more = Torchrun(2, tmp_path / "run", "--resume")
    assert more.wait() == 0, more.text()
    assert apart(more.params(), undisturbed) == 0.0
    assert not (run.folder / "checkpoints" / ".staged").exists()


@pytest.mark.slow
def test_a_rank_killed_in_the_first_save_is_restarted_from_the_start(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run = Torchrun(2, tmp_path / "run", "--steps", "14", restarts=1, fault=("torn", 0, 4))
    assert run.wait() == 0, run.text()
    assert "resumed from" not in run.text() and apart(run.params(), undisturbed) == 0.0


def check_same_losses(runs: list[Torchrun]) -> None:
    """Compares the losses of six steps and two validations."""
    losses = []
    for run in runs:
        assert run.wait() == 0, run.text()
        losses.append([r["loss"] for r in read_log(run.folder / "log.jsonl") if r["kind"] in ("train", "validation")])
    assert all(each == pytest.approx(losses[0], abs=2e-5) for each in losses)
    assert len(losses[0]) == 8


@pytest.mark.slow
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """There are five evaluation batches, so one rank has one more."""
    flags = ("--steps", "6", "--train.eval_interval", "3", "--train.eval_batches", "5")
    runs = [Torchrun(1, tmp_path / "one", *flags)]
    runs += [Torchrun(2, tmp_path / shard, *flags, "--shard", shard) for shard in ("optimizer", "all")]
    check_same_losses(runs)


@pytest.mark.slow
def test_ranks_train_adapters_as_one_process_does(tmp_path: Path) -> None:
    """Some parameters are frozen. One process resumes from the checkpoint of two ranks, and two from that of one."""
    config = ModelConfig(vocab_size=256, block_size=32, n_layer=2, n_head=4, n_embd=32)
    write_weights(tmp_path / "weights", Engine(config, 1, 4, seed=3).params, config)
    flags = [
        "--steps", "6", "--train.eval_interval", "3", "--init", str(tmp_path / "weights"), "--lora.rank", "4",
        "--lora.dropout", "0.1", "--train.freeze", "blocks.0.attn.*",
    ]  # fmt: skip
    runs = [Torchrun(1, tmp_path / "one", *flags)]
    runs += [Torchrun(2, tmp_path / shard, *flags, "--shard", shard) for shard in ("optimizer", "none")]
    check_same_losses(runs)
    more = [
        Torchrun(2, tmp_path / "one", "--resume", "--steps", "7"),
        Torchrun(1, tmp_path / "none", "--resume", "--steps", "7"),
    ]
    assert [run.wait() for run in more] == [0, 0], [run.text() for run in more]


@pytest.mark.slow
def test_ranks_that_share_sequences_train_as_one_process_does(tmp_path: Path) -> None:
    """Five evaluation batches in groups of one and of two; then different ranks resume from the checkpoint of a group."""
    flags = ("--steps", "6", "--train.eval_interval", "3", "--train.eval_batches", "5", "--model.position", "rope")
    runs = [Torchrun(1, tmp_path / "one", *flags), Torchrun(2, tmp_path / "two", *flags, "--context", "2")]
    runs += [Torchrun(4, tmp_path / "four", *flags, "--context", "2", "--shard", "all")]
    check_same_losses(runs)
    assert "2 ranks, 2 to a sequence" in (tmp_path / "two" / "report.html").read_text(encoding="utf-8")
    more = [
        Torchrun(1, tmp_path / "two", "--resume", "--steps", "7"),
        Torchrun(2, tmp_path / "one", "--resume", "--steps", "7", "--context", "2"),
        Torchrun(2, tmp_path / "four", "--resume", "--steps", "7"),
    ]
    assert [run.wait() for run in more] == [0, 0, 0], [run.text() for run in more]
    last = [
        next(r["loss"] for r in read_log(run.folder / "log.jsonl") if r["kind"] == "train" and r["step"] == 7)
        for run in more
    ]
    assert last == pytest.approx([last[0]] * 3, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_is_named(tmp_path: Path, number: signal.Signals) -> None:
    """Every other rank names a stopped rank within ten seconds. Its place is that of its last heartbeat."""
    run = Torchrun(3, tmp_path / "run", "--steps", "4000", "--timeout", "5", "--train.checkpoint_interval", "0")
    run.after_step(80)
    began = time.monotonic()
    run.send(1, number)
    named = "rank 1 is dead or stopped, last at 'step"
    while number == signal.SIGSTOP and run.text().count(named) < 2:
        assert time.monotonic() - began < 10, run.text()
        time.sleep(0.1)
    assert run.wait() != 0 and named in run.text()
    assert not (run.folder / "checkpoints").exists(), "a lost rank never ends in a save"


@pytest.mark.slow
def test_a_rank_asleep_is_named_with_its_place(tmp_path: Path) -> None:
    flags = ("--steps", "40", "--timeout", "5", "--train.checkpoint_interval", "0")
    run = Torchrun(3, tmp_path / "run", *flags, fault=("asleep", 1, 20))
    run.after("asleep")
    began, named = time.monotonic(), "rank 1 is behind, at 'step 20: reading data'"
    while run.text().count(named) < 2:
        assert time.monotonic() - began < 10, run.text()
        time.sleep(0.1)
    assert run.wait() != 0 and not (run.folder / "checkpoints").exists()


@pytest.mark.slow
def test_the_watch_ends_ranks_where_nothing_raises(tmp_path: Path) -> None:
    run = Torchrun(2, tmp_path / "run", "--steps", "40", "--timeout", "2", fault=("silent", 0, 3))
    assert run.wait() != 0
    assert "has been at 'step 3: counting targets' for" in run.text() and "exitcode: 13" in run.text()


@pytest.mark.slow
def test_ranks_agree_on_a_stop_and_save_once(tmp_path: Path) -> None:
    run = Torchrun(2, tmp_path / "run", "--steps", "400", "--train.checkpoint_interval", "0")
    run.after_step(3)
    run.send(1, signal.SIGTERM)
    assert run.wait() == 0, run.text()
    assert len(list((run.folder / "checkpoints").iterdir())) == 1 and "stopped by SIGTERM" in run.text()
    assert f"resume with: torchrun --nproc-per-node 2 -m tilegrad train --resume {run.folder}" in run.text()
