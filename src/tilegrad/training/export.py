"""Write a run's weights as a folder that transformers loads. If the run began with imported weights and still has their
tokenizer, the folder gets their config and tokenizer files."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data.tokenizer import load_tokenizer
from ..pretrained.adapters import write_adapter
from ..pretrained.families import config_json
from ..pretrained.weights import model_type, write_weights
from .checkpoint import load_adapters, load_model
from .folder import own_tokenizer, weights_of


def export_run(
    run: Path, out: Path, *, best: bool = False, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None,
    init: Path | None = None,
) -> tuple[str, int]:  # fmt: skip
    """Export the newest or best weights of the run, or those of a checkpoint, and return (model_type, steps). A run's
    own BPE tokenizer.json is copied; a byte tokenizer is not exported. Adapters are merged into their base weights, which
    are in `init` if their folder has moved."""
    folder, path = weights_of(run, best=best)
    config, checkpoint = load_model(path, init)
    state = checkpoint.state
    own = own_tokenizer(folder, state)  # raises if the weights were trained with another tokenizer
    origin = folder / "origin"
    began_with = origin / "tokenizer.json"
    same_tokens = began_with.is_file() and load_tokenizer(began_with).json() == own.json()
    tokenizer = folder / "data" / "tokenizer.json" if state["run"]["data"]["tokenizer"] != "bytes" else None
    source = origin if same_tokens else None
    write_weights(
        out,
        checkpoint.tensors,
        config,
        origin=source,
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    return str(config_json(config, torch.float32)["model_type"]), checkpoint.step


def export_adapter(run: Path, out: Path, *, best: bool = False, dtype: torch.dtype | None = None) -> tuple[str, int]:
    """Export the adapters of a run for PEFT, without their base weights, and return (model_type, steps)."""
    folder, path = weights_of(run, best=best)
    config, lora, checkpoint = load_adapters(path)
    kind = model_type(folder / "origin")
    base = checkpoint.state["base"]["folder"]
    write_adapter(out, checkpoint.tensors, config, lora, kind=kind, base=base, dtype=dtype)
    return kind, checkpoint.step
