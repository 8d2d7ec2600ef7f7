"""A checkpoint is loaded as it was saved, is named if it is damaged, and is never lost when a process is killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support.forked import python
from support.models import LLAMA, batch

from tilegrad import Engine
from tilegrad.text import atomic
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, load_into, save_checkpoint
from tilegrad.training.manifest import DamagedCheckpoint

STATE: dict[str, Any] = {
    "config": {"n_layer": 2, "lr": 0.1 + 0.2, "tied": True, "window": None},
    "losses": [1, 2.5, "x"],
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Views of one arena, as in an engine, and shapes that are easy to get wrong."""
    arena = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return {
        "wte.weight": arena[:32].view(8, 4),
        "wte.bias": arena[32:40],
        "half": arena[40:].to(torch.bfloat16),
        "double": arena[40:].double(),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


@pytest.mark.parametrize("said", ["No space left on device (os error 28)", "Os { code: 28, kind: StorageFull }"])
def test_an_error_of_the_system_keeps_its_number(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_tensors: dict[str, torch.Tensor], _path: Path) -> None:
        raise SafetensorError(f"Error while serializing: {said}")

    monkeypatch.setattr(atomic, "save_file", no_space)
    with pytest.raises(OSError, match="No space left") as found:
        atomic.save_tensors({}, tmp_path / "x")
    assert found.value.errno == errno.ENOSPC


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path: Path) -> None:
    saved = tensors()
    path = save_checkpoint(tmp_path / "run" / "checkpoints", 350, saved, STATE)
    assert path.name == "000001-step-350" and latest_checkpoint(path.parent) == path
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "tensors.safetensors"]
    found = load_checkpoint(path)
    assert (found.path, found.step, found.state) == (path, 350, STATE)
    assert found.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name


def test_load_into_writes_the_given_tensors(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, tensors(), STATE)
    into = tensors(seed=1)
    address = {name: tensor.data_ptr() for name, tensor in into.items()}
    found = load_into(path, into)
    assert (found.step, found.state) == (3, STATE)
    for name, tensor in tensors().items():
        assert torch.equal(into[name], tensor) and into[name].data_ptr() == address[name]
        assert found.tensors[name] is into[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"half": None}, r"only in the checkpoint: \['half'\], only here: none"),
        ({"more": torch.zeros(1)}, r"only in the checkpoint: none, only here: \['more'\]"),
        ({"wte.bias": torch.zeros(9)}, r"wte\.bias is torch\.float32 \(8,\) in the checkpoint, .* \(9,\) here"),
        (
            {"double": torch.zeros(24)},
            r"double is torch\.float64 \(24,\) in the checkpoint, torch\.float32 \(24,\) here",
        ),
        ({"scalar": torch.tensor(7.0)}, r"scalar is torch\.int64 \(\)"),
    ],
)
def test_load_into_refuses_another_model_and_writes_nothing(
    tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    path = save_checkpoint(tmp_path, 3, tensors(), {})
    into = {name: t for name, t in (tensors(seed=1) | change).items() if t is not None}
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(ValueError, match=words) as caught:
        load_into(path, into)
    assert str(path) in str(caught.value)
    assert all(torch.equal(into[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": (1, 2)}}, r"state\['a'\]\['b'\]: tuple is not JSON"),
        ({"a": [1, torch.tensor(1)]}, r"state\['a'\]\[1\]: Tensor is not JSON"),
        ({"a": {1: 2}}, r"state\['a'\]: the key 1 is not a string"),
        ({"loss": float("nan")}, r"state\['loss'\]: got nan"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        save_checkpoint(tmp_path, 1, {}, state)
    assert latest_checkpoint(tmp_path) is None


def test_retention_keeps_the_last_good_checkpoints_by_time_of_saving(tmp_path: Path) -> None:
    for step in (10, 20, 30, 25):
        save_checkpoint(tmp_path, step, tensors(step), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000003-step-30", "000004-step-25"]
    assert latest_checkpoint(tmp_path) == tmp_path / "000004-step-25"
    (tmp_path / "000004-step-25" / "manifest.json").unlink()
    save_checkpoint(tmp_path, 25, tensors(), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000003-step-30", "000004-step-25", "000005-step-25"]
    save_checkpoint(tmp_path, 26, tensors(), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000005-step-25", "000006-step-26"]
    with pytest.raises(ValueError, match="keep: got 0"):
        save_checkpoint(tmp_path, 27, {}, {}, keep=0)


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def edit(path: Path) -> None:
    (path / "manifest.json").write_text(
        (path / "manifest.json").read_text(encoding="utf-8").replace('"step": 2', '"step": 3'), encoding="utf-8"
    )


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a tensor": (
        lambda p: flip(p / "tensors.safetensors", -3),
        "tensors.safetensors does not have the sha256",
    ),
    "a bit of the header": (
        lambda p: flip(p / "tensors.safetensors", 40),
        "tensors.safetensors does not have the sha256",
    ),
    "truncated": (lambda p: os.truncate(p / "tensors.safetensors", 50), "tensors.safetensors has 50 bytes, not"),
    "no tensors": (lambda p: (p / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda p: os.truncate(p / "manifest.json", 60), "manifest.json is not a manifest"),
    "another manifest": (lambda p: write(p / "manifest.json", "[1]"), "manifest.json is not a manifest"),
    "an edited step": (edit, "manifest.json does not have the digest"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_offered(tmp_path: Path, damage: str) -> None:
    act, words = DAMAGE[damage]
    good, worse, newest = (save_checkpoint(tmp_path, step, tensors(), STATE) for step in (0, 1, 2))
    act(newest)
    with pytest.raises(DamagedCheckpoint, match=words) as caught:
        latest_checkpoint(tmp_path)
    assert (caught.value.path, caught.value.previous) == (newest, worse)
    assert str(newest) in str(caught.value) and str(worse) in str(caught.value)
    for load in (load_checkpoint, lambda path: load_into(path, tensors())):
        with pytest.raises(DamagedCheckpoint, match=words):
            load(newest)
    flip(worse / "tensors.safetensors", -1)
    with pytest.raises(DamagedCheckpoint) as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.previous == good and load_checkpoint(good).state == STATE
    os.truncate(good / "manifest.json", 0)
    with pytest.raises(DamagedCheckpoint, match="no good one before it") as caught:
        latest_checkpoint(tmp_path)
    assert caught.value.previous is None


def test_a_change_of_any_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 2, {}, {"seed": 5})
    manifest = path / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    inside = [i for i, c in enumerate(whole) if c.isalnum()]
    for at in inside[:: max(1, len(inside) // 60)]:
        flip(manifest, at)
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(path)
        manifest.write_text(whole, encoding="utf-8")
    assert load_checkpoint(path).step == 2


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegrad.training.manifest._VERSION", 2)
    path = save_checkpoint(tmp_path, 2, {}, {})
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpoint, match="'tilegrad checkpoint' version 1"):
        load_checkpoint(path)


def test_a_folder_without_checkpoints_has_none_to_load(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none")


def test_all_files_are_on_disk_before_a_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def logged_fsync(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def logged_rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    save_checkpoint(tmp_path, 5, tensors(), {})
    assert events == [
        "sync tensors.safetensors",
        "sync manifest.json",
        "sync .staged",
        "rename .staged 000001-step-5",
        f"sync {tmp_path.name}",
    ]


KILLER = """
import os, pathlib, random, signal, sys, time
import torch
from tilegrad.text import atomic
from tilegrad.training import checkpoint
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

torch.set_num_threads(1)
folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])

def save(step):
    save_checkpoint(folder, step, {"x": torch.full((20_000,), float(step))}, {"step": step}, keep=2)

def check(at_least):
    found = load_checkpoint(latest_checkpoint(folder))
    assert found.step == found.state["step"] >= at_least, (found.step, at_least)
    assert bool((found.tensors["x"] == found.step).all())
    for path in checkpoint._saved(folder): load_checkpoint(path)  # whatever has the name of one is whole
    return found.step

# Die before, or after, call number n of whatever changes the disk.
def crash_at(n):
    calls = 0
    def wrap(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == n: os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            calls += 1
            if calls == n: os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapped
    os.fsync, os.unlink, os.rmdir = wrap(os.fsync), wrap(os.unlink), wrap(os.rmdir)
    for name in ("rename", "mkdir", "write_text"): setattr(pathlib.Path, name, wrap(getattr(pathlib.Path, name)))
    atomic.save_file = wrap(atomic.save_file)

step, points = 2, 0
save(1); save(2)
while True:
    points += 1
    if os.fork() == 0:
        crash_at(points)
        save(step + 1)
        os._exit(0)
    status = os.wait()[1]
    step = check(step)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(checkpoint._saved(folder)) >= 2, "the previous one is still there"

# Die at any moment at all: inside a write, too.
random.seed(int(sys.argv[3]))
begin = time.perf_counter()
step += 1
save(step)
one_save = time.perf_counter() - begin
for _ in range(kills):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for next in range(step + 1, step + 1000):
            save(next)
            os.write(write, next.to_bytes(8, "little"))
        os._exit(0)
    os.close(write)
    time.sleep(random.uniform(0, 4 * one_save))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    done = step
    while piece := os.read(read, 8): done = int.from_bytes(piece, "little")
    os.close(read)
    step = check(done)

save(step + 1)
hidden = [p.name for p in folder.iterdir() if p.name.startswith(".")]
print(points, step, hidden)
"""


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_killed_while_saving_loses_no_checkpoint(
    tmp_path: Path, kills: int, request: pytest.FixtureRequest
) -> None:
    seed = request.config.option.seed or 0
    done = python(KILLER, str(tmp_path), str(kills), str(seed), timeout=600)
    assert done.returncode == 0, done.stderr
    points, step, hidden = done.stdout.split(maxsplit=2)
    assert int(points) > 20, "moments inside one save"
    assert int(step) > 20, "saves that were finished"
    assert hidden.strip() == "[]", "what a killed save left behind went with the next"


def older(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as in older checkpoints, in which up and gate were two layers."""
    found: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if ".up_gate." in name:
            up, gate = x.chunk(2)
            found |= {name.replace("up_gate", "up"): up.clone(), name.replace("up_gate", "gate"): gate.clone()}
        else:
            found[name] = x
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_an_older_checkpoint_with_up_and_gate_resumes_with_the_same_bits(tmp_path: Path, bias: bool) -> None:
    config = replace(LLAMA, bias=bias)
    engine, again = (Engine(config, 2, 8, seed=seed, ema=0.9) for seed in (0, 1))
    engine.step(*batch(config, 2, 8), 1e-2)
    there = older(engine.tensors())
    kinds = 3 * (1 + bias)  # parameters, m and v; the average is below
    assert len(there) == len(engine.tensors()) + config.n_layer * (kinds + 1 + bias)
    path = save_checkpoint(tmp_path, 1, there, {})
    load_into(path, again.tensors())
    again.steps, again.draws = engine.steps, engine.draws
    assert all(torch.equal(x, again.tensors()[name]) for name, x in engine.tensors().items())
    assert {*load_checkpoint(path).tensors} == {*engine.tensors()}
    assert engine.step(*batch(config, 2, 8), 1e-2) == again.step(*batch(config, 2, 8), 1e-2)


def test_an_older_checkpoint_whose_gate_does_not_fit_is_refused(tmp_path: Path) -> None:
    there = {"blocks.0.ffn.up.weight": torch.ones(4, 2), "blocks.0.ffn.gate.weight": torch.ones(4, 3)}
    path = save_checkpoint(tmp_path, 1, there, {})
    with pytest.raises(DamagedCheckpoint, match=r"blocks.0.ffn.gate.weight: got F32 \[3\]; accepted: F32 \[2\]"):
        load_checkpoint(path)


def test_a_checkpoint_of_gelu_has_no_older_names(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"blocks.0.ffn.up.weight": torch.ones(4, 2)}, {})
    assert {*load_checkpoint(path).tensors} == {"blocks.0.ffn.up.weight"}
