"""A run's folder: what it holds, who may train in it, and what a resumed run takes from it.

run.json              the configuration that ran last
data/                 tokens.bin and tokenizer.json: a resumed run needs no other text
log.jsonl             what happened, a line each
checkpoints/          the last few, each whole
best/                 the checkpoint of the lowest validation loss
origin/               config.json and tokenizer files of the weights it began with, where --init named some
report.html           curves, memory, a sample; needs nothing from outside
run.lock              while a process trains there: its id, and the kernel's lock on it
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .atomic import write_whole
from .checkpoint import DamagedCheckpoint, is_checkpoint, latest_checkpoint, latest_good, newest_name, read_state
from .config import RunConfig, resumed, run_from
from .data import TokenFile, Tokenizer, load_prepared, load_tokenizer, sha256_of, split, tokens_sha256


def locate(path: Path) -> tuple[Path, Path | None]:
    """(folder, checkpoint) of what was given to resume: a run's folder, or one of the checkpoints in it."""
    return (path.parent.parent, path) if is_checkpoint(path) else (path, None)


def checkpoint_of(folder: Path, given: Path | None, *, check: bool = True) -> Path:
    """The checkpoint to go on from: the one that is given, or the newest, with `check` every byte of it."""
    if given is not None and given.resolve().parent not in [place.resolve() for place in _places(folder)]:
        raise ValueError(f"resume: got {given}; accepted: a checkpoint of {folder}")
    return given or (latest_checkpoint(_newest(folder).parent) if check else None) or _newest(folder)


def _places(folder: Path) -> tuple[Path, Path]:
    """Where checkpoints are. A run that died before its first regular one may have a best one."""
    return folder / "checkpoints", folder / "best"


def holds_a_run(folder: Path) -> bool:
    """A whole checkpoint of one; what a process killed in its first save has left is none."""
    return any(newest_name(place) for place in _places(folder))


def _newest(folder: Path) -> Path:
    for place in _places(folder):
        if newest := newest_name(place):
            return newest
    raise ValueError(f"{folder}: got no checkpoint to resume from; accepted: a folder of a run that saved one")


@dataclass(frozen=True, slots=True)
class Best:
    """The evaluation with the lowest validation loss, and the checkpoint of it."""

    path: Path
    step: int
    validation_loss: float


def best_of(folder: Path) -> Best | None:
    """What best/ holds; None where there is none, or where it is damaged: the next evaluation makes another."""
    path = newest_name(folder / "best")
    try:
        state = None if path is None else read_state(path)
    except DamagedCheckpoint:
        return None
    return None if path is None or state is None else Best(path, state["engine"]["steps"], state["validation_loss"])


def weights_of(run: Path, *, best: bool) -> tuple[Path, Path]:
    """(folder, checkpoint) to generate from or to export, every byte of it checked: the newest of the folder `run`, its best,
    or the checkpoint that `run` is itself."""
    folder, given = locate(run)
    if given is not None and best:
        raise ValueError(f"best: got True beside the checkpoint {run}; accepted: True beside a run's folder")
    path = given or latest_checkpoint(folder / "best" if best else _newest(folder).parent)
    if path is None:
        raise ValueError(f"{folder}: got no best checkpoint; accepted: a run with an evaluation (train.eval_interval)")
    return folder, path


def forget(folder: Path) -> None:
    """The log and the curves of a run that died before its first checkpoint: a new run there has its own."""
    (folder / "log.jsonl").unlink(missing_ok=True)
    if (folder / "tensorboard").is_dir():
        shutil.rmtree(folder / "tensorboard")


def own_run(folder: Path, checkpoint: Path | None = None) -> RunConfig:
    """The configuration of the run in `folder`. Of run.json counts what may change between two parts of a run; the rest
    must be what the checkpoint says, by default the newest."""
    source = checkpoint or _newest(folder)
    try:
        saved = run_from(_dated(read_state(source)["run"]), f"{source}/manifest.json")
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(source, error.reason, latest_good(source.parent, before=source)) from error
    file = folder / "run.json"
    if not file.exists():
        return saved
    try:
        content = json.loads(file.read_bytes())
        return resumed(saved, run_from(_dated(content), "configuration").plain())
    except ValueError as error:
        raise ValueError(f"{file}: {error}; without this file, the checkpoint's own configuration counts") from error


def _dated(run: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration; one from before `validation` was a key took the end of the text."""
    data = run.get("data", {})
    return {**run, "data": {"validation": "end", **data}} if isinstance(data, Mapping) else dict(run)


def resume_command(folder: Path) -> str:
    """What goes on with the run, as a shell reads it; with as many ranks on this node as there are."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    launch = f"torchrun --nproc-per-node {ranks} -m tilegrad" if ranks > 1 else "tilegrad"
    return f"{launch} train --resume {shlex.quote(str(folder))}"


def write_run(folder: Path, run: RunConfig) -> None:
    write_whole(folder / "run.json", [json.dumps(run.plain(), indent=1).encode("utf-8") + b"\n"])


def own_data(folder: Path, state: Mapping[str, Any]) -> tuple[TokenFile, Tokenizer]:
    """The run's own tokens and tokenizer, refused where a checkpoint with this state was trained with others."""
    tokens, tokenizer = load_prepared(folder / "data")
    _check_tokenizer(folder, state, tokens.tokenizer_sha256)
    return tokens, tokenizer


def own_tokenizer(folder: Path, state: Mapping[str, Any]) -> Tokenizer:
    """The run's own tokenizer, refused where a checkpoint with this state was trained with another. A checkpoint that does
    not say with which is compared by its tokens."""
    file = folder / "data" / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such tokenizer; the run's own is needed")
    if "tokenizer_sha256" not in state:
        tokens, tokenizer = load_prepared(folder / "data")
        data = _dated(state["run"])["data"]
        drawn = data["validation"] == "windows"  # from the whole text
        training = tokens.tokens if drawn else split(tokens.tokens, data["validation_fraction"])[0]
        if tokens_sha256(training) != state["data"]["tokens_sha256"]:
            raise ValueError(f"{tokens.path}: got other tokens than those of the checkpoint; accepted: the run's own")
        return tokenizer
    _check_tokenizer(folder, state, sha256_of(file))
    return load_tokenizer(file)


def _check_tokenizer(folder: Path, state: Mapping[str, Any], found: str) -> None:
    saved = state.get("tokenizer_sha256", found)
    if saved != found:
        raise ValueError(
            f"{folder / 'data' / 'tokenizer.json'}: got a tokenizer of sha256 {found[:12]}…; accepted: that of the weights, "
            f"{saved[:12]}…"
        )


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside, no other process trains in `folder`, which is made where it is missing, and goes again if it is left empty.
    The kernel gives the lock back when the process ends, however it ends."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / "run.lock"):
            try:
                yield
            finally:
                (folder / "run.lock").unlink(missing_ok=True)
    finally:
        for path in missing:
            if any(path.iterdir()):
                break
            path.rmdir()


def _locked(path: Path) -> io.FileIO:
    """The file `path`, which holds this process's id, locked until it is closed. An interrupt in here closes it as well: it is
    an object, which nobody then has."""
    import fcntl  # not on Windows, where `generate` works all the same

    while True:
        file = io.FileIO(path, "r+", opener=lambda name, _flags: os.open(name, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = file.read(32).decode("ascii", errors="replace").strip() or "unknown"
            file.close()
            raise ValueError(
                f"{path.parent}: got a second training while process {who} trains there; accepted: one at a time"
            ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode("ascii"))
            return file
        file.close()  # of a run that ended, and took the name away, between our two calls
