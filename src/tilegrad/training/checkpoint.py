"""Checkpoints: folders that are whole or absent, each with a manifest of its files.

    runs/tiny/checkpoints/000007-step-350/     the seventh that was saved, after 350 steps
        tensors.safetensors
        manifest.json                          step and state, every file's size and sha256, and a digest of the manifest

A checkpoint is written into a folder with a hidden name, every file is synced to disk, and then the folder is renamed. Only
then are older checkpoints deleted, each after it was renamed to a hidden name. So every visible checkpoint is whole, and if a
process is killed or the disk is full, at most the checkpoint being saved is lost. The next save deletes hidden leftovers. Only
one process writes into a folder. start.py decides what a resumed run reads, and checkpointer.py restores it.

Several ranks write shards instead of one file (pieces.py); both formats are read the same way. If the same tensors are
saved in two folders, the second checkpoint hard-links the files of the first, and either can be deleted.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..kernels.checks import is_count
from ..model.config import ModelConfig
from ..model.lora import LoraConfig
from ..model.transformer import parameters
from ..pretrained.adapters import adapter_shapes, merge
from ..text.atomic import named, save_tensors, sha256_of, sync
from ..text.untrusted import shown
from .frozen import base_of, load_own, older_parts
from .manifest import (
    MANIFEST,
    MOST,
    SHARD,
    TENSORS,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    check_state,
    file_entry,
    is_complete,
    read_manifest,
    write_manifest,
)
from .state import RunState, adapters_of, check_shapes

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
STAGED, _GONE = ".staged", ".gone-"
_TEMPORARY = r"\.tmp\w{6}"  # a name of safetensors, for a file that it has not finished
_OWN_FILE = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(TENSORS)}|{SHARD.pattern}|{_TEMPORARY}")
_OPTIMIZER = re.compile(r"[mv]\.|ema\.|scale\.|adam_step$")  # names of tensors that are not parameters


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`weights` says which weights `load_model` has read: "raw", "averaged", or "mean of 3 checkpoints"."""

    path: Path
    step: int
    tensors: dict[str, torch.Tensor]
    state: RunState
    weights: str = "raw"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, object], *, keep: int = 3
) -> Path:
    """Save into a new folder inside `folder` (made if it is missing), and return the new folder's path.

    tensors   contiguous, on any device; views of one arena are accepted, tensors that overlap are refused
    state     everything else that a resumed run needs, as plain JSON: configuration, seeds, position in the data
    keep      how many complete checkpoints stay, including this one; older ones are deleted. A complete checkpoint has a valid
              manifest and files of the right sizes; their bytes are checked when a checkpoint is read.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}; accepted: at least 1, the new checkpoint")
    if step < 0:
        raise ValueError(f"step: got {step}; accepted: at least 0")
    check_state(state)

    def write(staged: Path) -> dict[str, FileEntry]:
        save_tensors(tensors, staged / TENSORS)
        sync(staged / TENSORS)
        return {TENSORS: file_entry(staged / TENSORS)}

    return _staged(folder, step, write, state, keep)


def save_same(folder: Path, source: Path, state: Mapping[str, object], *, keep: int = 3) -> Path:
    """Save the tensors of the checkpoint `source` again, with another state: as hard links to its files, or as copies if
    the file system has no links."""
    check_state(state)
    manifest = read_manifest(source)

    def link(staged: Path) -> dict[str, FileEntry]:
        for name in manifest["files"]:
            try:
                os.link(source / name, staged / name)
            except OSError:
                shutil.copyfile(source / name, staged / name)
                sync(staged / name)
        return manifest["files"]

    return _staged(folder, manifest["step"], link, state, keep)


def _staged(
    folder: Path, step: int, write: Callable[[Path], dict[str, FileEntry]], state: Mapping[str, object], keep: int
) -> Path:
    """Save the files that `write` writes into a hidden folder. `write` returns their entries for the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path, staged = next_path(folder, step), folder / STAGED
    try:
        staged.mkdir()
        write_manifest(staged, step, write(staged), state)
        staged.rename(path)
        sync(folder)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise named(error, path) from error
    retire(folder, keep)
    return path


def next_path(folder: Path, step: int) -> Path:
    saved = _saved(folder)
    return folder / f"{1 + (_parse(saved[-1])[0] if saved else 0):06d}-step-{step}"


def load_checkpoint(path: Path) -> Checkpoint:
    """Check every byte, then load all tensors, on the CPU."""
    manifest = _verified(path)
    with Tensors(path, manifest) as file:
        tensors = {name: file.read(name) for name in sorted(file.headers)}
    return Checkpoint(path, manifest["step"], tensors, manifest["state"])


def load_model(
    path: Path, init: Path | None = None, *, averaged: bool = True, mean_of: Sequence[Path] = ()
) -> tuple[ModelConfig, Checkpoint]:
    """A checkpoint's model configuration and its parameters, without moments, after a check of every byte. Names and shapes
    must be exactly those of the model. bfloat16 parameters (train.masters none) are returned in float32. Adapters are merged
    into their base weights (`base_of`), in the adapters' dtype.

    averaged   True: return the average of the weights (optimizer.ema) if the checkpoint has one; False: the weights themselves
    mean_of    checkpoints of the same run, of which `path` is the last. The mean of their weights is returned, computed in
               float64 and rounded once. Adapters are merged after their mean is computed.
    """
    state = read_state(path)
    config, lora = ModelConfig.from_dict(state["run"]["model"]), adapters_of(state["run"])
    if lora is None:
        if init is not None:
            raise ValueError(
                f"init: got {init} with {path}, which has no adapters; accepted: --init with a run of adapters"
            )
        shapes = {name: tuple(p.master.shape) for name, p in parameters(config).items()}
        return config, _load_params(path, shapes, averaged=averaged, mean_of=mean_of)
    checkpoint = _load_params(path, adapter_shapes(config, lora), averaged=averaged, mean_of=mean_of)
    params = base_of(config, state, init).weights.read(next(iter(checkpoint.tensors.values())).dtype)
    merge(params, checkpoint.tensors, config, lora)
    return config, replace(checkpoint, tensors=params)


def load_adapters(
    path: Path, *, averaged: bool = True, mean_of: Sequence[Path] = ()
) -> tuple[ModelConfig, LoraConfig, Checkpoint]:
    """The adapters in a checkpoint, without moments and without their base weights. The keywords are those of `load_model`."""
    run = read_state(path)["run"]
    config, lora = ModelConfig.from_dict(run["model"]), adapters_of(run)
    if lora is None:
        raise ValueError(f"{path}: got a checkpoint without adapters; accepted: one of a run with [lora]")
    return config, lora, _load_params(path, adapter_shapes(config, lora), averaged=averaged, mean_of=mean_of)


def _load_params(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, averaged: bool, mean_of: Sequence[Path]
) -> Checkpoint:
    """The parameters of these shapes: the trained ones from the checkpoint, the frozen ones from the run's own copy."""
    frozen = {name: _widened(x) for name, x in load_own(path.parent.parent, read_state(path)).items()}
    if not mean_of:
        loaded = _load_trained(path, shapes, frozen, averaged=averaged)
        return replace(loaded, tensors={name: (frozen | loaded.tensors)[name] for name in shapes})
    total: dict[str, torch.Tensor] = {}
    for each in mean_of:
        loaded = _load_trained(each, shapes, frozen, averaged=False)
        total = {name: x.double() + total.get(name, 0.0) for name, x in loaded.tensors.items()}
    mean = {name: (x / len(mean_of)).to(loaded.tensors[name].dtype) for name, x in total.items()}
    tensors = {name: (frozen | mean)[name] for name in shapes}
    return replace(loaded, tensors=tensors, weights=f"mean of {len(mean_of)} checkpoint{'s' * (len(mean_of) > 1)}")


def _load_trained(
    path: Path, shapes: Mapping[str, tuple[int, ...]], frozen: Mapping[str, torch.Tensor], *, averaged: bool
) -> Checkpoint:
    """The trained parameters or, with `averaged`, their average if there is one. A checkpoint is damaged if its parameters and
    `frozen` together do not have the names and shapes in `shapes`."""
    manifest = _verified(path)
    dtypes = ("BF16",) if manifest["state"]["run"]["train"].get("masters") == "none" else ("F32", "F64")
    with Tensors(path, manifest) as file:
        saved = {name: shape for name, (_, shape) in file.headers.items() if not _OPTIMIZER.match(name)}
        if both := sorted({*saved} & {*frozen}):
            raise DamagedCheckpoint(path, f"got {both[0]}, which is also among the run's frozen parameters")
        saved |= {name: tuple(x.shape) for name, x in frozen.items()}
        for name in sorted({*saved, *shapes}):
            if saved.get(name) != shapes.get(name):
                raise DamagedCheckpoint(
                    path,
                    f"got {name} of shape {saved.get(name)}; accepted: {shapes.get(name)}, by its own configuration",
                )
            if name not in frozen and file.headers[name][0] not in dtypes:
                raise DamagedCheckpoint(
                    path, f"got {name} of dtype {file.headers[name][0]}; accepted: {' or '.join(dtypes)}"
                )
        trained, average = {*shapes} - {*frozen}, {name for name in file.headers if name.startswith("ema.")}
        wanted = {f"ema.{name}": file.headers[name] for name in trained} if average else {}
        for name in sorted({*wanted} | average):
            if wanted.get(name) != file.headers.get(name):
                got, accepted = (of.get(name, "none") for of in (file.headers, wanted))
                raise DamagedCheckpoint(
                    path, f"got {name} of dtype and shape {got}; accepted: {accepted}, as its parameter"
                )
        kind = "ema." if average and averaged else ""
        tensors = {name: _widened(file.read(f"{kind}{name}")) for name in shapes if name in trained}
    return Checkpoint(path, manifest["step"], tensors, manifest["state"], "averaged" if kind else "raw")


def _widened(x: torch.Tensor) -> torch.Tensor:
    """A bfloat16 tensor as float32, without rounding; any other tensor unchanged."""
    return x.float() if x.dtype == torch.bfloat16 else x


def load_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Copy a checkpoint into `tensors`, on any device, one tensor at a time from mapped files. If a name, shape or dtype
    differs, ValueError is raised and nothing is written."""
    manifest = _verified(path)
    with Tensors(path, manifest) as file:
        here, there = set(tensors), set(file.headers)
        if here != there:
            raise ValueError(
                f"{path}: holds other tensors than this model; only in the checkpoint: {sorted(there - here) or 'none'}, "
                f"only here: {sorted(here - there) or 'none'}"
            )
        for name, tensor in tensors.items():
            saved = file.read(name)
            there_is, here_is = (f"{t.dtype} {tuple(t.shape)}" for t in (saved, tensor))
            if there_is != here_is:
                raise ValueError(f"{path}: {name} is {there_is} in the checkpoint, {here_is} here")
        for name, tensor in tensors.items():
            tensor.copy_(file.read(name))
    return Checkpoint(path, manifest["step"], dict(tensors), manifest["state"])


class Tensors:
    """The tensors of a checkpoint, in one file or in shards; the files are mapped while this object is open. A shard has
    slices of flattened tensors, and its header has their offsets. The slices of a tensor must cover it exactly. An older
    checkpoint has two tensors for some parameters that are one tensor now (`older_parts`); the two are read as one.

    headers   name → (safetensors' dtype, shape)
    joined    name → the names of its two parts in an older checkpoint
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._files, self._path = ExitStack(), path
        self._slices: dict[str, list[tuple[int, int, safe_open]]] = {}  # name → (offset, length, file)
        self.headers: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.joined: dict[str, tuple[str, str]] = {}
        self._sharded = [*manifest["files"]] != [TENSORS]
        try:
            for name in sorted(manifest["files"]):
                self._open(name)
            if self._sharded:
                self._check_shards(check_shapes(manifest["state"]))
            self._join()
        except (ValueError, SafetensorError, RecursionError) as error:
            self._files.close()
            if isinstance(error, DamagedCheckpoint):
                raise
            raise DamagedCheckpoint(path, str(error)) from error

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _open(self, name: str) -> None:
        try:
            file = self._files.enter_context(safe_open(self._path / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(self._path, f"{name} can't be read ({error})") from error
        sharding = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}")) if self._sharded else {}
        for tensor in file.keys():  # noqa: SIM118
            header = file.get_slice(tensor)
            shape, dtype, offset = tuple(header.get_shape()), header.get_dtype(), 0
            if self._sharded:
                entry = sharding.get(tensor) if isinstance(sharding, dict) else None
                offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
                offset = offsets[0] if isinstance(offsets, list) and len(offsets) == 1 else -1
                if not is_count(offset, MOST, 0) or len(shape) != 1:
                    got = f"offsets {shown(offsets)} and shape {shape}"
                    raise ValueError(
                        f"{name}: {tensor}: got {got}; accepted: a slice of a flattened tensor and its offset"
                    )
            if self.headers.setdefault(tensor, (dtype, shape))[0] != dtype:
                raise ValueError(
                    f"{name}: {tensor}: got dtype {dtype}; accepted: {self.headers[tensor][0]}, as in other shards"
                )
            self._slices.setdefault(tensor, []).append((offset, math.prod(shape), file))

    def _check_shards(self, shapes: Mapping[str, list[int]]) -> None:
        """Check that the slices cover every parameter and moment, and that adam_step is there."""
        wanted = {name: tuple(shape) for name, shape in shapes.items()} | {"adam_step": ()}
        for name in sorted({*wanted, *self._slices}):
            if name not in wanted or name not in self._slices:
                raise ValueError(
                    f"{name}: {'missing from' if name in wanted else 'not in state.shapes, but in'} the shards"
                )
            self._slices[name].sort(key=lambda one: one[:2])
            at = 0
            for offset, length, _ in self._slices[name]:
                if offset != at:
                    what = "overlap" if offset < at else "leave a gap"
                    raise ValueError(f"{name}: its shards {what} at element {min(offset, at)}")
                at += length
            if at != math.prod(wanted[name]):
                raise ValueError(
                    f"{name}: its shards have {at} elements; accepted: {math.prod(wanted[name])}, by its shape"
                )
            self.headers[name] = self.headers[name][0], wanted[name]

    def _join(self) -> None:
        for name, parts in older_parts(self.headers).items():
            (dtype, (rows, *shape)), (gate_dtype, (gate_rows, *gate_shape)) = (self.headers.pop(part) for part in parts)
            if (dtype, shape) != (gate_dtype, gate_shape):
                raise ValueError(
                    f"{parts[1]}: got {gate_dtype} {gate_shape}; accepted: {dtype} {shape}, as {parts[0]} has"
                )
            self.headers[name], self.joined[name] = (dtype, (rows + gate_rows, *shape)), parts

    def read(self, name: str) -> torch.Tensor:
        x = torch.cat([self._read(part) for part in self.joined[name]]) if name in self.joined else self._read(name)
        return x.view(self.headers[name][1])

    def _read(self, name: str) -> torch.Tensor:
        parts: list[torch.Tensor] = [file.get_tensor(name) for *_, file in self._slices[name]]
        return torch.cat(parts) if self._sharded else parts[0]


def latest_good(folder: Path, before: Path) -> Path | None:
    """The newest good checkpoint that was saved before `before`."""
    return next((path for path in reversed(_saved(folder)) if _parse(path) < _parse(before) and _is_good(path)), None)


def newest_checkpoints(folder: Path, average: int) -> tuple[Path, ...]:
    """The newest `average` checkpoints, in the order in which they were saved. A checkpoint that was saved earlier but has as
    many steps or more is left out: it has other weights, because the run was then resumed from a checkpoint before it."""
    saved: list[Path] = []
    for path in reversed(_saved(folder)):
        if not saved or _parse(path)[1] < _parse(saved[0])[1]:
            saved.insert(0, path)
    if not is_count(average, len(saved)):
        raise ValueError(
            f"average: got {shown(average)}; accepted: an int from 1 to {len(saved)}, as many checkpoints as {folder} has of "
            "these weights (train.keep_checkpoints)"
        )
    return tuple(saved[-average:])


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint, after a check of every byte; None if none was saved. If it is damaged, `DamagedCheckpoint` is
    raised, whose `previous` is the newest good checkpoint before it: the caller decides whether to resume from `previous`."""
    newest = newest_name(folder)
    if newest is None:
        return None
    try:
        _verified(newest)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(error.path, error.reason, latest_good(folder, before=newest)) from error
    return newest


def newest_name(folder: Path) -> Path | None:
    """The newest checkpoint, unchecked; None if none was saved."""
    saved = _saved(folder)
    return saved[-1] if saved else None


def is_checkpoint(path: Path) -> bool:
    """Whether the path has the name of a checkpoint, or is a folder with a manifest."""
    return _NAME.fullmatch(path.name) is not None or (path / MANIFEST).is_file()


def read_state(path: Path) -> RunState:
    """The state that a run saved with the tensors. Every field of the state and the sizes of the files are checked."""
    state = read_manifest(path)["state"]
    if "run" not in {*state}:
        reason = f"{MANIFEST}: run: got none; accepted: the configuration of a run"
        raise DamagedCheckpoint(
            path, reason, latest_good(path.parent, before=path) if _NAME.fullmatch(path.name) else None
        )
    return state


def _parse(path: Path) -> tuple[int, int]:
    """(number, step) of a checkpoint, from its name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2])


def _saved(folder: Path) -> list[Path]:
    """Every folder with the name of a checkpoint, in the order in which they were saved."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_parse)


def _verified(path: Path) -> Manifest:
    manifest = read_manifest(path)
    for name, what in manifest["files"].items():
        if sha256_of(path / name) != what.get("sha256"):
            raise DamagedCheckpoint(path, f"{name} does not have the sha256 that {MANIFEST} says")
    with Tensors(path, manifest):
        return manifest


def _is_good(path: Path) -> bool:
    try:
        _verified(path)
    except DamagedCheckpoint:
        return False
    return True


def retire(folder: Path, keep: int) -> None:
    """Delete the checkpoints before the last `keep` complete ones. A symbolic link stays, and so does a checkpoint into which
    somebody put another file."""
    saved, good = _saved(folder), 0
    while saved and good < keep:
        good += is_complete(saved.pop())
    for path in saved:
        if path.is_symlink() or _foreign_file(path):
            continue
        gone = path.with_name(_GONE + path.name)
        path.rename(gone)
        shutil.rmtree(gone)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed save left. A leftover with a file that no save writes is refused by name, and stays."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == STAGED or path.name.startswith(_GONE):
            if path.is_symlink():
                path.unlink()
            elif foreign := _foreign_file(path):
                raise FileExistsError(
                    errno.EEXIST, "tilegrad did not write it, so move it to another folder", str(foreign)
                )
            else:
                shutil.rmtree(path)


def _foreign_file(checkpoint: Path) -> Path | None:
    """A file in the folder of a checkpoint that no save writes, or the path itself if it is no folder."""
    if not checkpoint.is_dir():
        return checkpoint
    return next((file for file in checkpoint.iterdir() if not _OWN_FILE.fullmatch(file.name)), None)
