"""Checkpoints of several ranks, which any number of ranks can read: torch's distributed checkpoint (DCP) in safetensors.

    runs/large/checkpoints/000007-step-350/
        shard-00001-model-00001-of-00001.safetensors     the pieces of parameters and moments that rank 0 owns
        shard-00002-model-00001-of-00001.safetensors     …
        manifest.json                                    as with one process: step, state, size and sha256 of every file

A piece is a slice of a flattened tensor, identified by the name of the tensor and the offset of the slice. So a checkpoint
does not depend on buckets, arenas or ranks. A checkpoint of one process is read too: each of its tensors is one piece.

DCP plans which pieces each rank writes and reads; the rest is as in `checkpoint.py`. Pieces are written into a folder with a
hidden name, each rank hashes its own file, and rank 0 checks the sizes of all files, writes the manifest and renames the
folder. A rank that dies leaves a hidden folder and nothing else. Before a checkpoint is read, each file is hashed by one rank,
and all ranks raise if one of them finds a wrong hash. No file is a pickle, but DCP sends its plans between ranks as pickled
objects.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..engine.dist.mesh import Mesh
from ..engine.state import owned_pieces, publish_pieces
from ..text.atomic import sha256_of, sync
from .checkpoint import STAGED, Tensors, latest_good, next_path, remove_leftovers, retire, save_same
from .manifest import (
    MANIFEST,
    TENSORS,
    DamagedCheckpoint,
    Manifest,
    check_state,
    file_entry,
    read_manifest,
    write_manifest,
)
from .state import RunState

if TYPE_CHECKING:
    from ..engine.engine import Engine


_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}  # names of dtypes in safetensors
dcp: ModuleType = torch.distributed.checkpoint  # its type stubs lack the names used here


class Piece(torch.Tensor):
    """A slice of a flattened tensor, in the form that DCP accepts: as for a DTensor, its size is that of the whole tensor."""

    tensor: Tensor
    at: ChunkStorageMetadata

    @staticmethod
    def __new__(cls, tensor: Tensor, offset: int, whole: int) -> Piece:
        piece: Piece = torch.Tensor._make_wrapper_subclass(cls, (whole,), dtype=tensor.dtype, device=tensor.device)
        piece.tensor, piece.at = tensor, ChunkStorageMetadata(torch.Size([offset]), tensor.shape)
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> NoReturn:
        raise TypeError(f"Piece: got {func}; accepted: no operation; use its `tensor`")

    def __create_write_items__(self, name: str, _whole: object) -> list[WriteItem]:
        data = TensorWriteData(self.at, TensorProperties.create_from_tensor(self.tensor), self.size())
        return [WriteItem(MetadataIndex(name, self.at.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.at]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return self.tensor


def save_pieces(folder: Path, engine: Engine, mesh: Mesh, state: Mapping[str, object], *, keep: int = 3) -> Path:
    """Save a checkpoint and return its path. Called on every rank; only the `state` of rank 0 is saved."""
    staged, saved = folder / STAGED, state_of_ranks(engine, mesh, state)
    check_state(saved)
    mesh.at(f"step {engine.steps}: saving")

    def begin() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        staged.mkdir()
        return staged

    _on_rank_0(folder, mesh, begin)
    pieces = {name: Piece(*piece) for name, piece in owned_pieces(engine, shared=True).items()}
    if mesh.rank:
        pieces.pop("adam_step")
    writer = dcp.HuggingFaceStorageWriter(str(staged), save_distributed=True)
    _on_all_ranks(mesh, lambda: dcp.save(pieces, storage_writer=writer, process_group=mesh.host_group), "save")
    own = sorted(staged.glob(f"shard-{mesh.rank + 1:05d}-*.safetensors"))
    for file in own:
        sync(file)
    entries = mesh.gather({file.name: file_entry(file) for file in own})

    def finish() -> Path:
        path = next_path(folder, engine.steps)
        write_manifest(staged, engine.steps, {name: one for part in entries for name, one in part.items()}, saved)
        staged.rename(path)
        sync(folder)
        retire(folder, keep)
        return path

    return _on_rank_0(folder, mesh, finish)


def save_same_pieces(
    folder: Path, source: Path, engine: Engine, mesh: Mesh, state: Mapping[str, object], *, keep: int
) -> Path:
    """`save_same`, called on every rank."""
    mesh.at(f"step {engine.steps}: saving")
    return _on_rank_0(folder, mesh, lambda: save_same(folder, source, state_of_ranks(engine, mesh, state), keep=keep))


def state_of_ranks(engine: Engine, mesh: Mesh, state: Mapping[str, object]) -> dict[str, object]:
    """`state`, with the shapes and the number of ranks, which only a checkpoint of several ranks has."""
    return {**state, "shapes": {name: [*shape] for name, shape in _shapes(engine).items()}, "ranks": mesh.world}


def _shapes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shapes of trained parameters, moments and states of float8, of all ranks together."""
    params, scales = (
        {name: tuple(x.shape) for name, x in each.items()} for each in (engine.grads, engine.ranks.scales)
    )
    return params | engine.optimizer.shapes | scales


def _on_rank_0(folder: Path, mesh: Mesh, work: Callable[[], Path]) -> Path:
    """Call `work` on rank 0. All ranks return its path, in `folder`, or raise the OSError that rank 0 had."""
    name, failed = "", None
    if mesh.rank == 0:
        try:
            name = work().name
        except OSError as error:
            failed = error.errno, error.strerror, str(error.filename)
    name, failed = mesh.gather((name, failed))[0]
    if failed:
        raise OSError(*failed)
    return folder / name


def load_pieces(path: Path, engine: Engine, mesh: Mesh) -> RunState:
    """Load a checkpoint into an engine with any number of ranks and any buckets. If a file has changed, nothing is written."""
    mesh.at(f"loading {path.name}")
    manifest = check_together(path, mesh)
    whole = _check_headers(path, manifest, engine) or (path / TENSORS).exists()
    if whole:
        _load_whole(path, manifest, engine)
    else:
        pieces = {name: Piece(*piece) for name, piece in owned_pieces(engine).items()}
        reader = dcp.HuggingFaceStorageReader(str(path))
        _on_all_ranks(mesh, lambda: dcp.load(pieces, storage_reader=reader, process_group=mesh.host_group), "load")
    publish_pieces(engine)
    return manifest["state"]


def check_together(path: Path, mesh: Mesh) -> Manifest:
    """The manifest, after each rank has hashed its share of the files. If a file is damaged, all ranks raise the same error."""
    bad = ""
    try:
        manifest = read_manifest(path)
        for file in sorted(manifest["files"])[mesh.rank :: mesh.world]:
            if sha256_of(path / file) != manifest["files"][file]["sha256"]:
                bad = f"{file} does not have the sha256 that {MANIFEST} says"
    except DamagedCheckpoint as error:
        bad = error.reason
    bad = next(filter(None, mesh.gather(bad)), "")
    if bad:
        raise DamagedCheckpoint(path, bad, latest_good(path.parent, before=path))
    return manifest


def _check_headers(path: Path, manifest: Manifest, engine: Engine) -> bool:
    """Raise if names, shapes or dtypes differ from those of this engine. All ranks read the same headers. Returns whether some
    tensors have two parts in this older checkpoint (`older_parts`), so that whole tensors must be read."""
    wanted = _shapes(engine)
    with Tensors(path, manifest) as file:
        headers, joined = file.headers, bool(file.joined)
    for name in sorted({*wanted, *headers} - {"adam_step"}):
        shape = headers[name][1] if name in headers else None
        if shape != wanted.get(name):
            raise ValueError(f"{path}: got {name} of shape {shape}; accepted: {wanted.get(name)}, as in this model")
    for name, (piece, *_) in owned_pieces(engine).items():
        own = _DTYPES[piece.dtype]
        if name not in headers or headers[name][0] != own:
            got = headers[name][0] if name in headers else "none"
            raise ValueError(f"{path}: {name}: got dtype {got}; accepted: {own}, as in this run")
    return joined


def _load_whole(path: Path, manifest: Manifest, engine: Engine) -> None:
    with Tensors(path, manifest) as file:
        for name, (piece, offset, _) in owned_pieces(engine).items():
            piece.copy_(file.read(name).reshape(-1)[offset : offset + piece.numel()])


def _on_all_ranks(mesh: Mesh, work: Callable[[], None], name: str) -> None:
    """Run `work`, a call of DCP, on all ranks. An error on one rank, such as a full disk, is raised on all. Warnings that torch
    gives about its own code are ignored."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh.run(work, name)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        raise cause from error
