"""Ctrl-C at any bytecode of a save, a load, a run, an import, an export or a preparation of data loses nothing."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interrupts import Here, interrupted, places
from support.models import LLAMA, equal

import tilegrad
from tilegrad import ModelConfig
from tilegrad.cli import main
from tilegrad.data.documents import default_text
from tilegrad.data.prepare import load_prepared, prepare
from tilegrad.engine.engine import Engine
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training import loop
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, load_into, newest_name, save_checkpoint
from tilegrad.training.config import AdapterConfig, DataConfig, RunConfig, TrainConfig
from tilegrad.training.export import export_run
from tilegrad.training.folder import holds_a_run
from tilegrad.training.log import read_log
from tilegrad.training.manifest import DamagedCheckpoint
from tilegrad.training.run import train

pytestmark = [  # the garbage collector closes a file that was open when the interrupt came
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
OURS = tuple({f"{Path(inspect.getfile(one)).parent}/" for one in (save_checkpoint, prepare, write_weights, train)})


def here(file: str) -> bool:
    """Whether `file` is in a package that saves, prepares, exports or trains, or is shutil or pathlib."""
    return file.startswith(OURS) or file.endswith(("/shutil.py", "/pathlib.py"))


@dataclass(frozen=True)
class Attack:
    """`begin` fills the folder in which `act` is interrupted. `check` looks at the folder then, and continues from there."""

    begin: Callable[[], None]
    act: Callable[[], object]
    check: Callable[[], None]
    here: Here = here


def attack_at_places(
    attack: Attack, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int = 0
) -> tuple[int, int]:
    """Interrupt at `count` places of the code, drawn by the seed. Returns the number of all places, and of interrupts that
    reached the caller."""

    def fresh(name: str) -> None:
        shutil.copytree(folder / "begun", folder / name)
        monkeypatch.chdir(folder / name)

    (folder / "begun").mkdir()
    monkeypatch.chdir(folder / "begun")
    attack.begin()
    fresh("first")
    attack.act()  # so that later calls import nothing
    fresh("second")
    every = places(attack.act, attack.here)
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    came = 0
    for at in chosen:
        fresh(str(at))
        try:
            came += interrupted(attack.act, attack.here, at)
            assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
            attack.check()
        except BaseException as error:
            error.add_note(f"interrupted at bytecode {at}")
            raise
        monkeypatch.chdir(folder)
        shutil.rmtree(folder / str(at))
    return len(every), came


# ── checkpoints ──


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 4), float(step)), "b": torch.arange(4).to(torch.bfloat16)}


def saved_twice() -> None:
    for step in (1, 2):
        save_checkpoint(Path("checkpoints"), step, tensors(step), {"step": step}, keep=2)


def save_a_third() -> None:
    save_checkpoint(Path("checkpoints"), 3, tensors(3), {"step": 3}, keep=2)


def every_checkpoint_is_good(folder: Path) -> list[int]:
    """The steps of the checkpoints with final names, all of which load."""
    steps = []
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        steps.append(load_checkpoint(path).step)
    return steps


def no_checkpoint_is_lost() -> None:
    steps = every_checkpoint_is_good(Path("checkpoints"))
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
    newest = latest_checkpoint(Path("checkpoints"))
    assert newest is not None
    found = load_checkpoint(newest)
    assert equal(found.tensors, tensors(found.step))
    save_checkpoint(Path("checkpoints"), 4, tensors(4), {}, keep=2)
    assert every_checkpoint_is_good(Path("checkpoints")) == [steps[-1], 4]
    assert not list(Path("checkpoints").glob(".*")), "the interrupt left files"


def load_both_ways() -> None:
    newest = latest_checkpoint(Path("checkpoints"))
    assert newest is not None
    load_checkpoint(newest)
    load_into(newest, tensors(0))


def the_checkpoint_loads() -> None:
    assert every_checkpoint_is_good(Path("checkpoints")) == [1, 2]
    into = tensors(0)
    newest = newest_name(Path("checkpoints"))
    assert newest is not None
    load_into(newest, into)
    assert equal(into, tensors(2))


# ── data ──

OTHER = default_text().read_text(encoding="utf-8")[2000:6000]


def prepared() -> None:
    Path("text.txt").write_text(OTHER, encoding="utf-8")
    Path("old.txt").write_text(OTHER[::-1], encoding="utf-8")
    prepare([Path("old.txt")], Path("data"), tokenizer="bpe", vocab_size=270)


def prepare_another() -> None:
    prepare([Path("text.txt")], Path("data"), tokenizer="bpe", vocab_size=265)


def the_data_is_whole() -> None:
    def text() -> str:
        tokens, tokenizer = load_prepared(Path("data"))
        return tokenizer.decode([int(token) for token in tokens.tokens])

    refused = ""
    try:
        assert text() in (OTHER, OTHER[::-1])
    except ValueError as error:
        refused = str(error)
    assert not refused or "accepted: the tokenizer of tokens.bin" in refused
    prepare_another()
    assert text() == OTHER
    assert sorted(path.name for path in Path("data").iterdir()) == ["tokenizer.json", "tokens.bin"]
    assert Path("text.txt").read_text(encoding="utf-8") == OTHER


# ── weights ──

WEIGHTS = replace(LLAMA, vocab_size=256, n_layer=1, n_kv_head=2)


def weights_of_a_family() -> None:
    params = Engine(WEIGHTS, 1, 4, seed=3).params
    write_weights(Path("weights"), params, WEIGHTS, max_shard_bytes=6000)
    Path("mine.txt").write_text("of the user's", encoding="utf-8")


def import_them() -> None:
    code = main(["import", "weights", "--out", "models/mine"])
    if code == 130:
        raise KeyboardInterrupt
    assert code == 0


def all_or_nothing(out: str, again: Callable[[], object], want: Callable[[], dict[str, torch.Tensor]]) -> None:
    out_folder = Path(out)
    if not out_folder.exists():
        again()
    assert equal(open_weights(out_folder).read(), want())
    left = sorted(path.name for path in out_folder.parent.iterdir() if path.name.startswith("."))
    assert not left, left


def the_import_is_whole_or_absent() -> None:
    assert Path("mine.txt").read_text(encoding="utf-8") == "of the user's"
    all_or_nothing("models/mine", import_them, open_weights(Path("weights")).read)


# ── runs ──

RUN = RunConfig(
    ModelConfig(vocab_size=256, block_size=8, n_layer=1, n_head=1, n_embd=8),
    TrainConfig(
        steps=3, batch_size=2, seq_len=8, warmup_steps=1, eval_interval=2, eval_batches=1, checkpoint_interval=1,
        keep_checkpoints=2, log_interval=1, sample_tokens=2,
    ),
    DataConfig(files=("text.txt",)),
)  # fmt: skip


ADAPTED = replace(  # adapters, some of them frozen: the run refers to base weights and also has its own copy
    RUN,
    model=replace(WEIGHTS, block_size=8),
    train=replace(RUN.train, init="weights", freeze=("blocks.0.ffn.*",)),
    lora=AdapterConfig(rank=2, layers=("q", "down")),
)
Ends = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """The final tensors of the runs without an interrupt."""
    ends = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        a_text()
        weights_of_a_family()
        for name, run in (("plain", RUN), ("adapted", ADAPTED)):
            train(run, Path(name))
            newest = latest_checkpoint(Path(name) / "checkpoints")
            assert newest is not None
            ends[name] = load_checkpoint(newest).tensors
    return ends


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())


def a_text() -> None:
    Path("text.txt").write_text(OTHER, encoding="utf-8")


def a_run_that_stopped() -> None:
    def stop(event: str, _numbers: dict[str, Any]) -> None:
        if event == "train":
            os.kill(os.getpid(), signal.SIGINT)

    a_text()
    assert train(RUN, Path("run"), show=stop).steps == 1


def files_under_final_names_are_whole(run: Path) -> None:
    for place in ("checkpoints", "best"):
        if (run / place).is_dir():
            every_checkpoint_is_good(run / place)
    if (run / "run.json").exists():
        json.loads((run / "run.json").read_text(encoding="utf-8"))
    if (run / "log.jsonl").exists():
        read_log(run / "log.jsonl")
    if (run / "report.html").exists():
        assert (run / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    if (run / "data" / "tokens.bin").exists():
        load_prepared(run / "data")


def is_unlocked(run: Path) -> bool:
    """Whether no process has the lock, if its file is still there."""
    if not (run / "run.lock").exists():
        return True
    with (run / "run.lock").open(encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def text_and_weights() -> None:
    a_text()
    weights_of_a_family()


def resumes_to(end: dict[str, torch.Tensor], *, was_saved: bool, config: RunConfig = RUN) -> Callable[[], None]:
    def check() -> None:
        run = Path("run")
        assert Path("text.txt").read_text(encoding="utf-8") == OTHER
        if run.exists():
            files_under_final_names_are_whole(run)
        assert is_unlocked(run)
        assert not was_saved or holds_a_run(run)
        assert train(config, run, resume=holds_a_run(run)).steps == 3
        newest = latest_checkpoint(run / "checkpoints")
        assert newest is not None and equal(load_checkpoint(newest).tensors, end)
        assert not (run / "run.lock").exists() and not list(run.rglob(".*.staged")) and (run / "report.html").exists()

    return check


def begin_without_a_text() -> None:
    """A run that claims its folder and ends because its text is empty."""
    Path("empty.txt").touch()
    try:
        train(replace(RUN, data=DataConfig(files=("empty.txt",))), Path("run"))
    except ValueError as error:
        if "got no text" not in str(error):
            raise


def the_folder_is_unlocked() -> None:
    assert is_unlocked(Path("run"))
    begin_without_a_text()
    assert not Path("run/data").exists()


def export_it() -> None:
    export_run(Path("run"), Path("out"))


def the_export_is_whole_or_absent() -> None:
    files_under_final_names_are_whole(Path("run"))
    all_or_nothing("out", export_it, lambda: tilegrad.load("run").params)


def attacks(ends: Ends) -> dict[str, Attack]:
    end = ends["plain"]
    return {
        "save": Attack(saved_twice, save_a_third, no_checkpoint_is_lost),
        "load": Attack(saved_twice, load_both_ways, the_checkpoint_loads),
        "prepare": Attack(prepared, prepare_another, the_data_is_whole),
        "import": Attack(weights_of_a_family, import_them, the_import_is_whole_or_absent),
        "export": Attack(a_run_that_stopped, export_it, the_export_is_whole_or_absent),
        "claim": Attack(
            a_text,
            begin_without_a_text,
            the_folder_is_unlocked,
            lambda file: file.endswith(("folder.py", "signals.py", "atomic.py")),
        ),
        "train": Attack(a_text, lambda: train(RUN, Path("run")), resumes_to(end, was_saved=False)),
        "resume": Attack(
            a_run_that_stopped, lambda: train(RUN, Path("run"), resume=True), resumes_to(end, was_saved=True)
        ),
        "adapters": Attack(
            text_and_weights,
            lambda: train(ADAPTED, Path("run")),
            resumes_to(ends["adapted"], was_saved=False, config=ADAPTED),
        ),
    }


PLACES = {  # the least number of places in the code of each attack
    "save": 1_000, "load": 800, "prepare": 1_000, "import": 2_000, "export": 1_500, "claim": 100,
    "train": 8_000, "resume": 8_000, "adapters": 8_000,
}  # fmt: skip
IN_CI = {
    "save": 40, "load": 10, "prepare": 20, "import": 12, "export": 8, "claim": 60, "train": 8, "resume": 8, "adapters": 4,
}  # fmt: skip
IN_THE_SLOW_SET = {
    "save": 1_000, "load": 500, "prepare": 500, "import": 500, "export": 500, "claim": 100,
    "train": 500, "resume": 500, "adapters": 500,
}  # fmt: skip


@pytest.mark.parametrize("name", IN_CI)
def test_an_interrupt_at_some_bytecodes_loses_nothing(
    name: str, whole: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, came = attack_at_places(attacks(whole)[name], tmp_path, monkeypatch, IN_CI[name])
    assert places >= PLACES[name] and came > 0.9 * IN_CI[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THE_SLOW_SET)
def test_an_interrupt_at_many_bytecodes_loses_nothing(
    name: str, whole: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    places, came = attack_at_places(attacks(whole)[name], tmp_path, monkeypatch, IN_THE_SLOW_SET[name], fresh_seed)
    assert places >= PLACES[name] and came > 0.9 * IN_THE_SLOW_SET[name]


def test_canary_a_save_under_its_final_name_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place() -> None:
        path = Path("checkpoints") / "000003-step-3"
        path.mkdir()
        for file in sorted(Path("checkpoints/000002-step-2").iterdir()):
            shutil.copy(file, path)

    attack = Attack(saved_twice, in_place, no_checkpoint_is_lost)
    with pytest.raises(DamagedCheckpoint):
        attack_at_places(attack, tmp_path, monkeypatch, 40)


def test_canary_an_export_that_leaves_its_parts_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.pretrained.weights.shutil.rmtree", lambda *_arguments, **_options: None)
    attack = Attack(weights_of_a_family, import_them, the_import_is_whole_or_absent)
    with pytest.raises((AssertionError, FileExistsError)):
        attack_at_places(attack, tmp_path, monkeypatch, 40)
