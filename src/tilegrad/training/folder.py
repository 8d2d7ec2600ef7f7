"""A run's folder: its files, the lock on it, and the files that a resumed run reads.

run.json              the configuration that ran last
data/                 tokens.bin, documents.bin, tokenizer.json and tokenizer_config.json: a resumed run needs no other text
log.jsonl             one record per line
checkpoints/          the last few checkpoints
best/                 the checkpoint with the lowest validation loss
origin/               config.json and tokenizer files of the weights that --init named
frozen.safetensors    the parameters that train.freeze names (frozen.py)
report.html           curves, memory and a sample, as one self-contained page
tensorboard/          the log for TensorBoard (train.log)
wandb/                files of Weights & Biases (train.log)
loggers.json          ids of the run in wandb and MLflow, which a resumed run continues
.tilegrad-run         marks the folder as a run of tilegrad: a new run begins in an empty folder, or in one with this file
                      and no checkpoint
run.lock              during training: the process's id and a token that all ranks must find; locked by flock

Nothing else in the folder is written or deleted.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..data.batches import split
from ..data.prepare import load_prepared
from ..data.tokenizer import Tokenizer, load_tokenizer
from ..data.tokens import TokenFile, tokens_sha256
from ..model.config import ModelConfig
from ..text.atomic import sha256_of, staged_name, write_whole
from ..text.spelling import did_you_mean
from ..text.untrusted import shown
from .checkpoint import is_checkpoint, latest_checkpoint, newest_checkpoints, newest_name, read_state
from .config import RunConfig, TrainConfig, Values
from .frozen import OWN
from .loggers import EVENTS, IDS
from .manifest import DamagedCheckpoint
from .state import RunState

if TYPE_CHECKING:
    from ..engine.dist.mesh import Mesh

MARKER, LOCK = ".tilegrad-run", "run.lock"
_MARK = b'{"format": "tilegrad run", "version": 1}\n'
_LOCK = re.compile(rb"(?:\d+(?: [0-9a-f]+)?\n)?")  # the content of a lock: a process's id and a token
_MODELS = "the folder of a run, a checkpoint in it, or a folder of weights"
_MOST_NAMES = 3  # in an error
SHARED_S = 5.0  # seconds that a network file system may take to show a new file


def locate(path: Path, *, accepted: str = "the folder of a run, or a checkpoint in it") -> tuple[Path, Path | None]:
    """(folder, checkpoint) of a path: (`path`, None) for a run's folder, (the run's folder, `path`) for a checkpoint in it."""
    if not path.is_dir():
        what = "got a file" if path.exists() else f"no such folder{did_you_mean(path.name, _neighbours(path))}"
        raise FileNotFoundError(f"{path}: {what}; accepted: {accepted}")
    return (path.parent.parent, path) if is_checkpoint(path) else (path, None)


def _neighbours(path: Path) -> dict[str, str]:
    """The folders next to `path`, by name."""
    paths = path.parent.iterdir() if path.parent.is_dir() else ()
    return {other.name: str(other) for other in paths if other.is_dir()}


def checkpoint_of(folder: Path, given: Path | None, *, check: bool = True) -> Path:
    """The checkpoint to resume from: `given`, or the newest; with `check`, every byte of the newest is checked."""
    if given is not None and given.resolve().parent not in [place.resolve() for place in _places(folder)]:
        raise ValueError(f"resume: got {given}; accepted: a checkpoint of {folder}")
    return given or (latest_checkpoint(_newest(folder).parent) if check else None) or _newest(folder)


def _places(folder: Path) -> tuple[Path, Path]:
    """The folders of checkpoints. A run that died before its first regular checkpoint may have a best one."""
    return folder / "checkpoints", folder / "best"


def holds_a_run(folder: Path) -> bool:
    """Whether the folder has a checkpoint. The leftovers of a process that was killed in its first save do not count."""
    return any(newest_name(place) for place in _places(folder))


def _newest(folder: Path) -> Path:
    for place in _places(folder):
        if newest := newest_name(place):
            return newest
    raise ValueError(f"{folder}: got no checkpoint to resume from; accepted: a folder of a run that saved one")


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint with the lowest validation loss."""

    path: Path
    step: int
    validation_loss: float


def best_of(folder: Path) -> Best | None:
    """The checkpoint in best/, or None if it is missing or damaged; the next evaluation then saves one."""
    path = newest_name(folder / "best")
    try:
        state = None if path is None else read_state(path)
    except DamagedCheckpoint:
        return None
    if path is None or state is None or state["validation_loss"] is None:
        return None
    return Best(path, state["engine"]["steps"], state["validation_loss"])


class Chosen(NamedTuple):
    """The checkpoint `path` whose weights are used. If `mean_of` is not empty, the mean of the weights of these checkpoints
    is used, and `path` is the newest of them."""

    folder: Path
    path: Path
    mean_of: tuple[Path, ...] = ()


def weights_of(run: Path, *, best: bool, average: int | None = None) -> Chosen:
    """The checkpoint to load weights from: the newest or best one of the folder `run`, or `run` itself if it is a checkpoint.
    average=n: the newest n checkpoints."""
    folder, given = locate(run, accepted=_MODELS)
    if given is None and not best and not holds_a_run(folder):
        hint = f", such as {folder.parent}{' with --best' * (folder.name == 'best')}" * holds_a_run(folder.parent)
        raise ValueError(f"{folder}: got neither checkpoints/ nor config.json in it; accepted: {_MODELS}{hint}")
    if given is not None and best:
        raise ValueError(f"best: got True with the checkpoint {run}; accepted: True with a run's folder")
    path = given or latest_checkpoint(folder / "best" if best else _newest(folder).parent)
    if path is None:
        raise ValueError(f"{folder}: got no best checkpoint; accepted: a run with an evaluation (train.eval_interval)")
    if average is None:
        return Chosen(folder, path)
    if best or given is not None:
        got = "best" if best else f"the checkpoint {run}"
        raise ValueError(f"average: got {shown(average)} with {got}; accepted: a number with a run's folder")
    return Chosen(folder, path, newest_checkpoints(path.parent, average))


def refuse_choices(weights: Path, *, best: bool, average: int | None, init: object) -> None:
    """Raise if a choice among the weights of a run is given with a folder of weights."""
    got = f"{weights}, a folder of weights"
    if best:
        raise ValueError(f"best: got {got}; accepted: --best with a run")
    if average is not None:
        raise ValueError(f"average: got {average} with {got}; accepted: a number with a run")
    if init is not None:
        raise ValueError(f"init: got {init} with {got}; accepted: --init with a run of adapters")


def forget(folder: Path) -> None:
    """Delete the log, the curves, the ids in loggers.json and the frozen parameters of a run that died before its first
    checkpoint. Only files that a run wrote are deleted, and nothing through a symbolic link."""
    for name in ("log.jsonl", IDS, OWN):
        (folder / name).unlink(missing_ok=True)
    curves = folder / "tensorboard"
    if curves.is_dir() and not curves.is_symlink():
        for file in curves.glob(f"{EVENTS}*"):
            file.unlink()
        if not any(curves.iterdir()):
            curves.rmdir()


def upgraded(run: dict[str, Values]) -> dict[str, Values]:
    """A saved configuration with today's keys. Without the key `validation`, a run held out the end of the text; without
    the key `format`, it has windows of a text. A key of [model] or [train] that a run lacks has its default."""
    before = {
        "data": {"validation": "end", "format": "text", "packing": False, "too_long": "split"},
        "model": {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING},
        "train": {f.name: f.default for f in fields(TrainConfig)},
    }
    own = {name: {**values, **run[name]} for name, values in before.items() if isinstance(run.get(name), dict)}
    return {**run, **own}


def resume_command(folder: Path) -> str:
    """The shell command that resumes the run, with the same number of ranks on this node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    launch = f"torchrun --nproc-per-node {ranks} -m tilegrad" if ranks > 1 else "tilegrad"
    return f"{launch} train --resume {shlex.quote(str(folder))}"


def write_run(folder: Path, run: RunConfig) -> None:
    write_whole(folder / "run.json", [json.dumps(run.plain(), indent=1).encode("utf-8") + b"\n"])


def own_data(folder: Path, state: RunState, *, documents: bool = False) -> tuple[TokenFile, Tokenizer]:
    """The run's own tokens and tokenizer. Raises if the checkpoint of this state was trained with another tokenizer. With
    `documents`, the ends of documents as well."""
    tokens, tokenizer = load_prepared(folder / "data", documents=documents)
    _check_tokenizer(folder, state, tokens.tokenizer_sha256)
    return tokens, tokenizer


def own_tokenizer(folder: Path, state: RunState) -> Tokenizer:
    """The run's own tokenizer. Raises if the checkpoint of this state was trained with another tokenizer. An old checkpoint
    has no digest of its tokenizer; instead the digests of the tokens are compared."""
    file = folder / "data" / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; put the run's own tokenizer back")
    if "tokenizer_sha256" not in state:
        tokens, tokenizer = load_prepared(folder / "data")
        data, training = upgraded(state["run"])["data"], tokens.tokens
        if data["validation"] == "end":
            training, _ = split(training, data["validation_fraction"])
        if tokens_sha256(training) != state["data"]["tokens_sha256"]:
            raise ValueError(
                f"{tokens.path}: got tokens with which the checkpoint was not trained; accepted: the tokens that the run wrote"
            )
        return tokenizer
    _check_tokenizer(folder, state, sha256_of(file))
    return load_tokenizer(file)


def origin_of(folder: Path, tokenizer: Tokenizer) -> Path | None:
    """The folder origin/ with the files of the weights that the run began with; None if there is none, or if it has another
    tokenizer than the run."""
    file = folder / "origin" / "tokenizer.json"
    return file.parent if file.is_file() and load_tokenizer(file).json() == tokenizer.json() else None


def _check_tokenizer(folder: Path, state: RunState, found: str) -> None:
    saved = state.get("tokenizer_sha256", found)
    if saved != found:
        raise ValueError(
            f"{folder / 'data' / 'tokenizer.json'}: got a tokenizer of sha256 {found[:12]}…; accepted: the tokenizer "
            f"of the checkpoint, {saved[:12]}…"
        )


def _check_own_folder(folder: Path) -> None:
    """Raise unless the folder is missing, empty, or the folder of a run."""
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise ValueError(f"{folder}: not a folder; accepted: a new folder (--out)")
        return
    if holds_a_run(folder) or _is_regular(folder / MARKER) and (folder / MARKER).read_bytes() == _MARK:
        return
    others = sorted(path.name for path in folder.iterdir() if not _is_left_by_a_killed_process(path))
    if others:
        more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
        raise ValueError(
            f"{folder}: got a folder with {', '.join(others[:_MOST_NAMES])}{more}, which tilegrad did not write; accepted: a "
            "new or empty folder (--out)"
        )


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_left_by_a_killed_process(path: Path) -> bool:
    """Whether the file is a lock or an incomplete marker, left by a process that was killed before it wrote the marker."""
    if not _is_regular(path) or path.stat().st_size >= 64:
        return False
    if path == staged_name(path.with_name(MARKER)):
        return _MARK.startswith(path.read_bytes())
    return path.name == LOCK and _LOCK.fullmatch(path.read_bytes()) is not None


@contextmanager
def claimed(folder: Path, *, new: bool) -> Iterator[str]:
    """Lock `folder` against other processes, and yield the token of the lock. The folder of a `new` run is made if it is
    missing, and deleted again if it stays empty. However the process ends, the operating system releases the lock."""
    if new:
        _check_own_folder(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        token = secrets.token_hex(16)
        with _locked(folder / LOCK, token):
            try:
                if new and holds_a_run(folder):
                    raise ValueError(
                        f"{folder}: holds a run already; resume it (--resume), or choose another folder (--out)"
                    )
                if new:
                    write_whole(folder / MARKER, [_MARK])
                yield token
            finally:
                if {path.name for path in folder.iterdir()} == {LOCK, MARKER}:
                    (folder / MARKER).unlink()
                (folder / LOCK).unlink(missing_ok=True)
    finally:
        for path in missing:
            if any(path.iterdir()):
                break
            path.rmdir()


def check_shared(folder: Path, token: str, mesh: Mesh) -> None:
    """Raise on all ranks if one of them does not find the token of rank 0 in `folder`, because each rank writes its part of a
    checkpoint there. Every rank calls this; only the `token` of rank 0 is used."""
    token = mesh.gather(token)[0]
    until = time.monotonic() + SHARED_S
    while not (is_shared := _token(folder) == token) and time.monotonic() < until:
        time.sleep(0.1)
    places = mesh.gather((is_shared, f"{folder.absolute()} on {socket.gethostname()}"))
    apart = [f"rank {rank} ({where})" for rank, (is_shared, where) in enumerate(places) if not is_shared]
    if apart:
        more = f" and {len(apart) - _MOST_NAMES} more" if len(apart) > _MOST_NAMES else ""
        raise ValueError(
            f"out: got a folder that the ranks don't share: {', '.join(apart[:_MOST_NAMES])}{more} can't see what rank 0 wrote "
            f"into {places[0][1]}; accepted: the same --out on every node, on a file system that all of them share"
        )


def _token(folder: Path) -> str | None:
    try:
        return (folder / LOCK).read_bytes().decode("ascii", errors="replace").split()[1]
    except (OSError, IndexError):
        return None


_FLAGS = (
    os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)


def _locked(path: Path, token: str) -> io.FileIO:
    """Write the id of this process and the token into `path`, which is locked until the file is closed. An interrupt during
    this call closes the file too, because nothing else refers to the file object."""
    import fcntl  # not on Windows, where `generate` works without it

    while True:
        try:
            file = io.FileIO(path, "r+", opener=lambda name, _flags: os.open(name, _FLAGS, 0o666))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"{path}: got a symbolic link; accepted: no such file, or a run's own lock") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError(f"{path}: not a regular file; accepted: no such file, or a run's own lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = file.read(32).decode("ascii", errors="replace").split()
            file.close()
            raise ValueError(
                f"{path.parent}: got a second training while process {who[0] if who else 'unknown'} trains there; "
                "accepted: one at a time"
            ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            file.truncate(0)
            file.write(f"{os.getpid()} {token}\n".encode("ascii"))
            return file
        file.close()  # the last owner deleted it between our open and flock: try again
