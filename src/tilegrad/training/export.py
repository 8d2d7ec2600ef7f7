"""Write the weights of a run, or of a folder of weights, as a folder that transformers loads or as a GGUF file. If a run began
with imported weights and still has their tokenizer, the config and tokenizer files of these weights are written too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from ..data.tokenizer import ByteTokenizer, load_tokenizer
from ..model.config import ModelConfig
from ..pretrained.adapters import write_adapter
from ..pretrained.families import config_json
from ..pretrained.gguf.write import write_gguf
from ..pretrained.weights import is_weights, model_type, open_weights, write_weights
from .checkpoint import load_adapters, load_model
from .folder import origin_of, own_tokenizer, refuse_choices, weights_of


@dataclass(frozen=True, slots=True)
class Exported:
    """A model to export, and the files that belong to it."""

    config: ModelConfig
    params: Mapping[str, Tensor]
    origin: Path | None  # a folder of weights with config.json and tokenizer files
    tokenizer: Path | None  # the run's tokenizer.json; a byte tokenizer has one too
    step: int | None  # None: a folder of weights
    weights: str = "raw"


class Which(TypedDict, total=False):
    """Which weights of a run to export, as in `tilegrad.load`."""

    best: bool
    init: Path | None
    averaged: bool
    average: int | None


class Written(NamedTuple):
    """`kind` is the model_type, `step` None for a folder of weights, `weights` as in `TrainedModel`."""

    kind: str
    step: int | None
    weights: str
    notes: tuple[str, ...] = ()


def _exported(
    source: Path, *, best: bool = False, init: Path | None = None, averaged: bool = True, average: int | None = None
) -> Exported:
    """The newest or best weights of a run, the weights of a checkpoint, or a folder of weights. Adapters are merged into
    their base weights; `init` is the folder of the base weights, if it has moved."""
    if is_weights(source):
        refuse_choices(source, best=best, average=average, init=init)
        weights = open_weights(source)
        return Exported(weights.config, weights.read(), weights.folder, None, None)
    folder, path, mean_of = weights_of(source, best=best, average=average)
    config, checkpoint = load_model(path, init, averaged=averaged, mean_of=mean_of)
    own = own_tokenizer(folder, checkpoint.state)  # raises if the weights were trained with another tokenizer
    tokenizer = folder / "data" / "tokenizer.json"
    return Exported(config, checkpoint.tensors, origin_of(folder, own), tokenizer, checkpoint.step, checkpoint.weights)


def export_run(
    run: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    **which: Unpack[Which],
) -> Written:
    """Write a folder for transformers. A run's own BPE tokenizer.json is copied; a byte tokenizer is not exported."""
    x = _exported(run, **which)
    has_bpe = x.tokenizer is not None and not isinstance(load_tokenizer(x.tokenizer), ByteTokenizer)
    write_weights(
        out,
        x.params,
        x.config,
        origin=x.origin,
        tokenizer=x.tokenizer if has_bpe else None,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    return Written(str(config_json(x.config, torch.float32)["model_type"]), x.step, x.weights)


def export_gguf(run: Path, out: Path, *, dtype: str | None = None, **which: Unpack[Which]) -> Written:
    """Write a GGUF file."""
    x = _exported(run, **which)
    gguf = write_gguf(out, x.params, x.config, origin=x.origin, tokenizer=x.tokenizer, dtype=dtype)
    return Written(gguf.kind, x.step, x.weights, tuple(gguf.notes))


def export_adapter(
    run: Path,
    out: Path,
    *,
    best: bool = False,
    dtype: torch.dtype | None = None,
    averaged: bool = True,
    average: int | None = None,
) -> Written:
    """Export the adapters of a run for PEFT, without their base weights."""
    if is_weights(run):
        raise ValueError(f"adapter: got {run}, a folder of weights; accepted: --adapter with a run of adapters")
    folder, path, mean_of = weights_of(run, best=best, average=average)
    config, lora, checkpoint = load_adapters(path, averaged=averaged, mean_of=mean_of)
    kind = model_type(folder / "origin")
    base = checkpoint.state["base"]["folder"]
    write_adapter(out, checkpoint.tensors, config, lora, kind=kind, base=base, dtype=dtype)
    return Written(kind, checkpoint.step, checkpoint.weights)
