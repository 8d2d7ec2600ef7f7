"""Reads and writes folders of Hugging Face weights: config.json, safetensors, tokenizer.json. transformers is not needed.

    source = open_weights(folder)              reads config.json as a ModelConfig; raises if the engine does not support it
    source.load(engine.params)                 checks every name, shape and dtype before it writes a parameter
    write_weights(folder, params, config)      writes a folder that transformers loads, whole or not at all

families.py translates names of tensors and config.json. All files, even those that an export copies, are opened by the
rules of text/untrusted.py: names and links stay in the folder, except for links in the cache of Hugging Face. A pickle
(.bin, .pt) is never read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..data.tokenizer import Tokenizer, load_tokenizer
from ..memory.managed.pressure import memory_limit
from ..memory.page import human
from ..model.config import ModelConfig
from ..model.transformer import parameters
from ..text.atomic import check_new, named, save_tensors
from ..text.untrusted import file_in, naming, open_tensors, read_json, shown
from .cache import cached_model, how_to_download
from .families import FAMILIES, Config, config_json, config_of, theirs

STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # names of dtypes in safetensors
_BUFFERS = (
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
)  # tensors of old checkpoints that are not parameters
_TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "chat_template*")
_COPIED = (*_TOKENIZER_FILES, "generation_config.json")


@dataclass(frozen=True, slots=True)
class Weights:
    """A folder of Hugging Face weights. Its config has been read, its tensors have not."""

    folder: Path
    origin: Config  # config.json
    config: ModelConfig
    files: dict[str, Path]  # Hugging Face name → file

    @property
    def kind(self) -> str:
        return str(self.origin["model_type"])

    @property
    def tokenizer(self) -> Path | None:
        name = "tokenizer.json"
        return file_in(self.folder, name) if _is_there(self.folder / name) else None

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy the weights into `params` (names in tilegrad → tensors of any device and dtype), one tensor at a time from
        mapped files."""
        self.check(params)
        stored = self._stored_names(params)
        with ExitStack() as stack:
            opened = {file: stack.enter_context(open_tensors(file)) for file in {*self.files.values()}}
            for name, place in theirs(self.kind, params, self.config):
                place.copy_(opened[self.files[stored[name]]].get_tensor(stored[name]))

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Refuse files whose names or shapes differ from `params`, or with a dtype that is not in STORED_DTYPES."""
        config, stored = self.config, self._stored_names(params)
        missing = sorted(name for name, own in stored.items() if own not in self.files)
        expected = {*stored.values(), *(["lm_head.weight"] if config.tie_embeddings else [])}
        extra = sorted(name for name in self.files if name not in expected and not name.endswith(_BUFFERS))
        if missing or extra:
            raise ValueError(
                f"{self.folder}: missing tensors: {missing[:3] or 'none'}; unexpected tensors: {extra[:3] or 'none'}; "
                "accepted: exactly the tensors that follow from config.json"
            )
        with ExitStack() as stack:
            opened = {file: stack.enter_context(open_tensors(file)) for file in {*self.files.values()}}
            for name, place in theirs(self.kind, params, config):
                found = opened[self.files[stored[name]]].get_slice(stored[name])
                shape, dtype, where = tuple(found.get_shape()), found.get_dtype(), self.files[stored[name]]
                if shape != tuple(place.shape):
                    raise ValueError(
                        f"{where}: {stored[name]}: got shape {shape}; accepted: {tuple(place.shape)}, by config.json"
                    )
                if dtype not in STORED_DTYPES:
                    raise ValueError(
                        f"{where}: {stored[name]}: got dtype {dtype}; accepted: {', '.join(STORED_DTYPES)}"
                    )

    def _stored_names(self, params: Mapping[str, Tensor]) -> dict[str, str]:
        """Hugging Face name of each tensor → its name in the files, which for GPT-2 may lack the prefix."""
        prefix = FAMILIES[self.kind]["wte.{p}"][0].split(".")[0] + "."
        names = [name for name, _ in theirs(self.kind, params, self.config)]
        return {name: name if name in self.files else name.removeprefix(prefix) for name in names}

    def keep_origin(self, origin: Path) -> None:
        """Copy config.json and the tokenizer files into the folder `origin`, from which an export copies them."""
        origin.mkdir(parents=True, exist_ok=True)
        (origin / "config.json").write_text(json.dumps(self.origin, indent=2) + "\n", encoding="utf-8")
        for path in {path for pattern in _COPIED for path in origin.glob(pattern)}:
            path.unlink()  # a file of a run that died before its first checkpoint
        copy_files(self.folder, origin)

    def sha256(self) -> str:
        """The sha256 of the tensors in the files: names, dtypes, shapes and bytes. The same weights in other shards have the
        same sha256."""
        params = forms(self.config)
        self.check(params)
        digest, stored = hashlib.sha256(), self._stored_names(params)
        with ExitStack() as stack:
            opened = {file: stack.enter_context(open_tensors(file)) for file in {*self.files.values()}}
            for name, own in sorted(stored.items()):
                x = opened[self.files[own]].get_tensor(own)
                digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
                digest.update(x.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def read(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """All weights by their names in tilegrad. Names, shapes and dtypes are checked before anything is allocated."""
        without_memory = forms(self.config, dtype)
        self.check(without_memory)
        params = allocate(without_memory, f"{self.folder}: ")
        self.load(params)
        return params


def forms(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The parameters of a model by their names in tilegrad, as tensors without memory."""
    return {name: torch.empty(p.master.shape, dtype=dtype, device="meta") for name, p in parameters(config).items()}


def allocate(forms: Mapping[str, Tensor], where: str = "") -> dict[str, Tensor]:
    """Tensors on the CPU with the shapes and dtypes of `forms`. Raises if the machine has less memory; the error begins with
    `where`."""
    size, limit = sum(form.nbytes for form in forms.values()), memory_limit(torch.device("cpu"))
    if limit is not None and size > limit:
        got = f"{human(size)} in {str(next(iter(forms.values())).dtype).removeprefix('torch.')}"
        raise ValueError(f"{where}got weights of {got}; accepted: at most {human(limit)} of memory")
    return {name: torch.empty_like(form, device="cpu") for name, form in forms.items()}


def is_weights(source: Path) -> bool:
    """Whether the path is a folder of Hugging Face weights, a file of weights, or ORG/NAME in the cache of Hugging Face."""
    return source.is_file() or _is_there(source / "config.json") or not _is_there(source) and bool(cached_model(source))


def _is_there(path: Path) -> bool:
    """Whether anything has this name, even a broken link, whose opening then raises."""
    return path.is_symlink() or path.exists()


def imported(folder: Path) -> tuple[ModelConfig, dict[str, Tensor], Tokenizer, Path]:
    """A model to generate with: config, weights, tokenizer, and the folder with the other files of the tokenizer."""
    source = open_weights(folder)
    if source.tokenizer is None:
        raise FileNotFoundError(
            f"{source.folder / 'tokenizer.json'}: no such file; accepted: weights with their tokenizer"
        )
    return source.config, source.read(), load_tokenizer(source.tokenizer), source.folder


def open_weights(source: Path) -> Weights:
    """Open weights: a folder with config.json and *.safetensors, one .safetensors file next to its config.json, or ORG/NAME in
    the cache of Hugging Face."""
    if not _is_there(source):
        source = cached_model(source) or source
    folder = source.parent if source.is_file() else source
    if source.is_file() and source.suffix == ".gguf":
        raise ValueError(f"{source}: got a GGUF file; accepted: the folder that `tilegrad import {source}` writes")
    if source.is_file() and source.suffix != ".safetensors":
        raise ValueError(
            f"{source}: got {source.suffix or 'no suffix'}; accepted: .safetensors; a pickle is never read"
        )
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such folder or file; accepted: a folder with config.json and *.safetensors"
            f"{how_to_download(source)}"
        )
    if not _is_there(folder / "config.json"):
        raise FileNotFoundError(
            f"{folder / 'config.json'}: no such file; accepted: a folder with config.json and *.safetensors"
        )
    origin, config = _read_config(folder)
    return Weights(folder, origin, config, _files(folder, source if source.is_file() else None))


def model_type(folder: Path) -> str:
    """The family that the config.json in `folder` names."""
    return str(_read_config(folder)[0]["model_type"])


def _read_config(folder: Path) -> tuple[Config, ModelConfig]:
    path = file_in(folder, "config.json")
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {shown(content)}; accepted: an object")
    with naming(path):
        return content, config_of(content)


def _files(folder: Path, one: Path | None) -> dict[str, Path]:
    """name of each tensor → its file"""
    index = folder / "model.safetensors.index.json"
    if one is None and _is_there(index):
        return _indexed(folder, file_in(folder, index.name))
    file = folder / "model.safetensors" if one is None else one
    if not _is_there(file):
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = "is a pickle, which is never read: save_pretrained of transformers writes safetensors"
        raise FileNotFoundError(f"{file}: no such file" + (f" ({pickles[0]} {hint})" if pickles else ""))
    file = file_in(folder, file.name)
    with open_tensors(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _indexed(folder: Path, index: Path) -> dict[str, Path]:
    """name of each tensor → its shard. Every shard must have exactly the tensors that the index lists for it."""
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ValueError(
            f"{index}: got no weight_map; accepted: an object that maps the name of each tensor to its file"
        )
    paths: dict[str, Path] = {}
    for file in names.values():
        if not isinstance(file, str) or file not in paths:
            try:
                path = file_in(folder, file, str(index))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{folder / str(file)}: no such file, but {index.name} lists it") from error
            paths[path.name] = path
    for file, path in paths.items():
        with open_tensors(path) as opened:
            in_file, in_index = {*opened.keys()}, {name for name, holder in names.items() if holder == file}
        unexpected = sorted(name for name in in_file - in_index if not name.endswith(_BUFFERS))
        if in_index - in_file or unexpected:
            raise ValueError(
                f"{path}: missing tensors: {sorted(in_index - in_file)[:3] or 'none'}; "
                f"unexpected tensors: {unexpected[:3] or 'none'}; "
                f"accepted: exactly those that {index.name} lists"
            )
    return {name: paths[file] for name, file in names.items()}


def write_weights(
    folder: Path,
    params: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    origin: Path | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a new folder that transformers loads.

    origin            the folder from which the model was imported: its tokenizer files are copied, and its config.json too if
                      it still describes this model
    tokenizer         a tokenizer.json to copy if `origin` has none
    max_shard_bytes   the most bytes of a file, unless one tensor is larger; None: one file
    """
    kept = dtype or next(iter(params.values())).dtype
    check_new(folder)
    content = config_json(config, kept) if origin is None else _same_config(origin, config, kept)
    with new_folder(folder) as staged:
        _save(staged, dict(theirs(str(content["model_type"]), params, config)), kept, max_shard_bytes)
        (staged / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if origin is not None:
            copy_files(origin, staged)
        if tokenizer is not None and not (staged / "tokenizer.json").exists():
            shutil.copyfile(file_in(tokenizer.parent, tokenizer.name), staged / "tokenizer.json")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder to write into. At the end of the context it is renamed to `folder`, and deleted after an error."""
    check_new(folder)
    staged = folder.with_name(f".{folder.name}.partial")
    if staged.exists():
        raise ValueError(
            f"{folder}: got {staged}, which a killed process may have left; accepted: a new name, or {folder} after "
            f"{staged} is deleted"
        )
    try:
        staged.mkdir(parents=True)
        yield staged
        staged.rename(folder)
    except FileExistsError:  # another process made the folder after the check above, and writes into it
        raise
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise named(error, folder) from error
        raise


def _save(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, most: int | None) -> None:
    """Write model.safetensors, or model-00001-of-0000n.safetensors … with an index, with one shard in memory at a time."""
    shards: list[list[str]] = [[]]
    room = most
    for name, x in tensors.items():
        size = x.numel() * dtype.itemsize
        if room is not None and size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room = None if room is None else room - size
    n = len(shards)
    files = ["model.safetensors"] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    for file, names in zip(files, shards, strict=True):
        shard = {name: tensors[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_tensors(shard, folder / file, {"format": "pt"})
    if n > 1:
        total = sum(x.numel() for x in tensors.values()) * dtype.itemsize
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _same_config(origin: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The config.json in `origin` with this dtype, if it describes a model that differs from this one at most in block_size
    and dropout; else `config_json`."""
    found, own = _read_config(origin)
    if replace(own, block_size=config.block_size, dropout=config.dropout) != config:
        return config_json(config, dtype)
    content = {name: value for name, value in found.items() if name != "torch_dtype"}
    return {**content, "dtype": str(dtype).removeprefix("torch.")}


def copy_files(source: Path, target: Path) -> None:
    """Copy tokenizer files, generation_config.json and chat templates. A link that leaves the folder is refused."""
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern) if not path.is_dir()}):
        shutil.copyfile(file_in(source, path.name), target / path.name)
