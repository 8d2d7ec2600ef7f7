"""The files that a run writes and those that it does not touch: the user's files, links, modes, equal bytes."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import small_run

from tilegrad.cli import main
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, save_same
from tilegrad.training.config import DataConfig
from tilegrad.training.manifest import FileEntry, is_complete, write_manifest
from tilegrad.training.run import train

RUN = small_run(steps=4, warmup_steps=1, eval_interval=2, checkpoint_interval=2, sample_tokens=0)
TRAIN = ["train", "--data", "text.txt", "--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16"]
TRAIN += ["--model.block_size", "16", "--batch-size", "2", "--steps", "2"]
MINE = [
    "tensorboard/events.out.tfevents.1", "log.jsonl", "data/tokenizer.json", "data/tokens.bin", "run.json", "report.html",
    "origin/config.json", "run.lock", ".run.json.staged", "checkpoints/.staged/x", "best/.gone-x/y", ".tilegrad-run",
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")


def found(folder: str) -> dict[str, bytes | None]:
    """Every path in the folder, with the bytes of files."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(Path(folder).rglob("*"))}


@pytest.mark.parametrize("name", MINE)
def test_a_folder_with_a_file_of_the_user_is_refused_by_name_and_does_not_change(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path("home", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("the user's own", encoding="utf-8")
    before = found("home")
    assert main([*TRAIN, "--out", "home"]) == 2
    assert capsys.readouterr().err == (
        f"tilegrad: home: got a folder with {name.split('/')[0]}, which tilegrad did not write; accepted: a new or empty "
        "folder (--out)\n"
    )
    assert found("home") == before


def test_a_run_in_the_current_folder_is_refused_if_it_is_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    for name in MINE[:6]:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("the user's own", encoding="utf-8")
    before = found(".")
    assert main([*TRAIN, "--out", "."]) == 2
    assert (
        "got a folder with data, log.jsonl, report.html and 3 more, which tilegrad did not write"
        in capsys.readouterr().err
    )
    assert found(".") == before


def died(folder: str, at: str = "train") -> None:
    """A run that ends before its first checkpoint, without cleaning up."""

    def show(event: str, _numbers: dict[str, Any]) -> None:
        if event == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        try:
            train(RUN, Path(folder), show=show)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert Path(folder, "run.lock").exists() and not Path(folder, "checkpoints").exists()


def test_files_of_a_killed_run_are_replaced_and_files_of_the_user_are_kept() -> None:
    died("run")
    Path("elsewhere").mkdir()
    for file in ("run/notes.txt", "run/data/more.txt", "run/tensorboard/mine.txt", "elsewhere/events.out.tfevents.1"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("the user's own", encoding="utf-8")
    assert train(RUN, Path("run")).steps == 4
    for file in ("run/notes.txt", "run/data/more.txt", "run/tensorboard/mine.txt"):
        assert Path(file).read_text(encoding="utf-8") == "the user's own"
    died("other")
    for event in Path("other").glob("tensorboard/*"):
        event.unlink()
    if Path("other/tensorboard").exists():
        Path("other/tensorboard").rmdir()
    Path("other/tensorboard").symlink_to("../elsewhere")
    assert train(RUN, Path("other")).steps == 4
    assert Path("elsewhere/events.out.tfevents.1").read_text(encoding="utf-8") == "the user's own"


@pytest.mark.parametrize("length", [0, 9, 41])
def test_a_run_can_begin_after_a_process_was_killed_while_it_wrote_the_marker(length: int) -> None:
    mark = b'{"format": "tilegrad run", "version": 1}\n'
    assert len(mark) == 41
    Path("run").mkdir()
    Path("run/..tilegrad-run.staged").write_bytes(mark[:length])
    Path("run/run.lock").write_bytes(b"12345 abcdef\n")
    assert train(RUN, Path("run")).steps == 4
    assert not Path("run/..tilegrad-run.staged").exists()
    Path("mine").mkdir()
    Path("mine/..tilegrad-run.staged").write_bytes(mark[:length] + b"x")
    with pytest.raises(ValueError, match=r"mine: got a folder with \.\.tilegrad-run\.staged, which tilegrad did not"):
        train(RUN, Path("mine"))


def test_an_older_run_without_a_marker_resumes() -> None:
    train(replace(RUN, train=replace(RUN.train, steps=2)), Path("run"))
    Path("run/.tilegrad-run").unlink()
    assert train(RUN, Path("run"), resume=True).steps == 4
    with pytest.raises(ValueError, match="run: holds a run already"):
        train(RUN, Path("run"))


def test_a_refused_run_leaves_neither_marker_nor_folder() -> None:
    bad = replace(RUN, data=DataConfig(files=("none.txt",)))
    Path("mine").mkdir()
    for folder in ("mine", "deep/run"):
        with pytest.raises(FileNotFoundError):
            train(bad, Path(folder))
    assert not list(Path("mine").iterdir()) and not Path("deep").exists()
    Path("file").write_text("the user's own", encoding="utf-8")
    with pytest.raises(ValueError, match="file: not a folder"):
        train(RUN, Path("file"))


@pytest.mark.parametrize("name", ["run.lock", "log.jsonl"])
def test_a_symbolic_link_where_a_run_writes_is_refused_by_name(name: str) -> None:
    train(replace(RUN, train=replace(RUN.train, steps=2)), Path("run"))
    Path("victim").write_text("the user's own, without an end of line", encoding="utf-8")
    Path("run", name).unlink(missing_ok=True)
    Path("run", name).symlink_to("../victim")
    with pytest.raises(ValueError, match=rf"run/{name}: got a symbolic link; accepted: no such file, or a run's own"):
        train(None, Path("run"), resume=True)
    assert Path("victim").read_text(encoding="utf-8") == "the user's own, without an end of line"
    Path("run", name).unlink()
    assert train(RUN, Path("run"), resume=True).steps == 4


@pytest.mark.parametrize("name", [".run.json.staged", ".report.html.staged", "checkpoints/.staged", "best/.staged"])
def test_no_file_is_written_or_deleted_through_a_symbolic_link(name: str) -> None:
    train(replace(RUN, train=replace(RUN.train, steps=2)), Path("run"))
    Path("victim").mkdir()
    Path("victim/file").write_text("the user's own", encoding="utf-8")
    Path("run", name).symlink_to(Path("victim/file" if name.startswith(".") else "victim").absolute())
    before = found("victim")
    assert train(RUN, Path("run"), resume=True).steps == 4
    assert found("victim") == before and not Path("run", name).exists()


@pytest.mark.parametrize(
    "name", ["checkpoints/.staged/notes", "best/.gone-000001-step-2", "checkpoints/.gone-mine/x/y"]
)
def test_a_leftover_with_a_file_of_the_user_is_refused_by_name_and_stays(name: str) -> None:
    train(replace(RUN, train=replace(RUN.train, steps=2)), Path("run"))
    Path("run", name).parent.mkdir(parents=True, exist_ok=True)
    Path("run", name).write_text("the user's own", encoding="utf-8")
    before = found("run")
    named = "/".join(name.split("/")[:3])
    with pytest.raises(ValueError, match=f"did not write it, so move it to another folder: 'run/{re.escape(named)}'"):
        train(RUN, Path("run"), resume=True)
    assert found("run") == before
    with pytest.raises(FileExistsError, match="did not write it"):
        save_checkpoint(Path("run", name.split("/")[0]), 3, {"x": torch.ones(3)}, {})
    assert found("run") == before


def test_a_checkpoint_with_a_file_of_the_user_is_kept_and_so_is_a_link() -> None:
    one, two = (save_checkpoint(Path("run"), step, {"x": torch.ones(3)}, {}) for step in (1, 2))
    (one / "notes.txt").write_text("the user's own", encoding="utf-8")
    two.rename("moved")
    two.symlink_to(Path("moved").absolute())
    before = found("moved")
    for step in (3, 4):
        save_checkpoint(Path("run"), step, {"x": torch.ones(3)}, {}, keep=1)
    assert sorted(p.name for p in Path("run").iterdir()) == [one.name, two.name, "000004-step-4"]
    assert (one / "notes.txt").read_text(encoding="utf-8") == "the user's own" and found("moved") == before


def tensors_in(place: str) -> Path:
    path = latest_checkpoint(Path("run", place))
    assert path is not None
    return path / "tensors.safetensors"


def test_a_checkpoint_that_is_also_the_best_one_uses_its_bytes_once() -> None:
    train(RUN, Path("run"))
    files = [p for place in ("best", "checkpoints") for p in Path("run", place).rglob("*.safetensors")]
    best, newest = tensors_in("best"), tensors_in("checkpoints")
    assert os.path.samefile(best, newest) and len({p.stat().st_ino for p in files}) == len(files) - 1
    want = load_checkpoint(best.parent)
    for file in best.parent.iterdir():
        file.unlink()
    best.parent.rmdir()
    kept = load_checkpoint(newest.parent)
    assert kept.step == want.step == 4 and all(torch.equal(kept.tensors[n], x) for n, x in want.tensors.items())
    assert kept.state == want.state


def no_links(_source: object, _target: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_checkpoint_is_complete_also_without_links_or_after_the_best_one_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def best_goes(event: str, _numbers: dict[str, Any]) -> None:
        if event == "checkpoint":
            assert load_checkpoint(max(Path("run/checkpoints").iterdir()))

    monkeypatch.setattr(os, "link", no_links)
    train(RUN, Path("run"), show=best_goes)
    best, newest = tensors_in("best"), tensors_in("checkpoints")
    assert best.read_bytes() == newest.read_bytes() and not os.path.samefile(best, newest)
    saved = save_checkpoint(Path("best"), 3, {"x": torch.ones(3)}, {})
    assert is_complete(saved)
    (saved / "tensors.safetensors").unlink()
    assert not is_complete(saved)


def test_a_failed_second_save_leaves_no_file_and_names_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = save_checkpoint(Path("best"), 3, {"x": torch.ones(3)}, {})

    def full(_source: object, _target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        patch.setattr("shutil.copyfile", full)
        with pytest.raises(OSError, match=r"No space left .*checkpoints/000001-step-3"):
            save_same(Path("checkpoints"), source, {"a": 1})
    assert not list(Path("checkpoints").iterdir())
    assert dict(load_checkpoint(save_same(Path("checkpoints"), source, {"a": 1})).state) == {"a": 1}


def test_every_file_of_a_manifest_exists_and_has_its_size() -> None:
    Path("staged").mkdir()
    Path("staged/a").write_bytes(b"12")
    for sizes in ({"a": 3}, {"a": 2, "b": 2}):
        files: dict[str, FileEntry] = {name: {"bytes": n, "sha256": ""} for name, n in sizes.items()}
        with pytest.raises(OSError, match=r"staged/[ab]"):
            write_manifest(Path("staged"), 1, files, {})
    assert [p.name for p in Path("staged").iterdir()] == ["a"]


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_every_file_has_the_mode_that_the_umask_gives(umask: int) -> None:
    modes: dict[str, int] = {}

    def look(_event: str, _numbers: dict[str, Any]) -> None:
        modes["run/run.lock"] = Path("run/run.lock").stat().st_mode

    os.chmod("text.txt", 0o640)
    train(RUN, Path("run"), show=look)
    assert main(["export", "run", "out", "--max-shard-size", "8KB"]) == 0
    assert main(["init", "new.toml"]) == 0 and main(["plan", "--html", "plan.html"]) == 0
    for path in [*Path("run").rglob("*"), *Path("out").rglob("*"), Path("new.toml"), Path("plan.html")]:
        modes[str(path)] = path.stat().st_mode
    assert len(modes) > 20
    for name, mode in modes.items():
        assert stat.S_IMODE(mode) == (0o777 if stat.S_ISDIR(mode) else 0o666) & ~umask, name


def test_other_commands_do_not_overwrite_existing_files(capsys: pytest.CaptureFixture[str]) -> None:
    train(RUN, Path("run"))
    for name in ("out/notes.txt", ".new.partial/notes.txt", "page.html", "new.toml"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("the user's own", encoding="utf-8")
    for command in (
        ["export", "run", "out"], ["export", "run", "new"], ["plan", "--html", "page.html"], ["init", "new.toml"],
    ):  # fmt: skip
        assert main(command) == 2
        assert "accepted: a new name" in capsys.readouterr().err
    for name in ("out/notes.txt", ".new.partial/notes.txt", "page.html", "new.toml"):
        assert Path(name).read_text(encoding="utf-8") == "the user's own"
    assert not Path("new").exists()
    Path("page.html").unlink()
    for _again in range(2):
        assert main(["plan", "--html", "page.html"]) == 0


TEXT = "naïve Ω → “quoted” … " * 200


def test_characters_that_the_terminal_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding is that of PYTHONIOENCODING=latin-1."""
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    shown = io.BytesIO()
    streams = [io.TextIOWrapper(shown, encoding="latin-1", write_through=True) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        assert main([*TRAIN, "--out", "naïve Ω"]) == 0
        assert main(["generate", "naïve Ω", "--prompt", "é Ω → ", "--max-tokens", "4"]) == 0
        assert main(["generate", "Ω"]) == 2
    assert latest_checkpoint(Path("naïve Ω/checkpoints")) is not None
    for text in ("The report: naïve \\u03a9/report.html", "é \\u03a9 \\u2192 ", "tilegrad: \\u03a9"):
        assert text.encode("latin-1") in shown.getvalue()
    for stream in streams:
        stream.detach()
