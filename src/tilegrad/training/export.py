"""Write a run's weights as a folder that transformers loads. If the run began with imported weights and still has their
tokenizer, the folder gets their config and tokenizer files."""

from __future__ import annotations

from pathlib import Path

import torch

from ..pretrained.families import config_json
from ..pretrained.weights import write_weights
from .checkpoint import load_model
from .folder import origin_of, own_tokenizer, weights_of


def export_run(
    run: Path, out: Path, *, best: bool = False, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> tuple[str, int]:
    """Export the newest or best weights of the run, or those of a checkpoint, and return (model_type, steps). A run's
    own BPE tokenizer.json is copied; a byte tokenizer is not exported."""
    folder, path = weights_of(run, best=best)
    config, checkpoint = load_model(path)
    state = checkpoint.state
    own = own_tokenizer(folder, state)  # raises if the weights were trained with another tokenizer
    tokenizer = folder / "data" / "tokenizer.json" if state["run"]["data"]["tokenizer"] != "bytes" else None
    write_weights(
        out,
        checkpoint.tensors,
        config,
        origin=origin_of(folder, own),
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    return str(config_json(config, torch.float32)["model_type"]), checkpoint.step
