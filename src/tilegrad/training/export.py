"""A run's weights as a folder that transformers loads, with the config and the tokenizer files of the weights it began with,
where its tokens are still theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data.tokenizer import load_tokenizer
from ..pretrained.families import config_json
from ..pretrained.weights import write_weights
from .checkpoint import load_model
from .folder import own_tokenizer, weights_of


def export_run(
    run: Path, out: Path, *, best: bool = False, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> tuple[str, int]:
    """(model_type, steps) of what is written: the newest weights, the best, or those of the checkpoint that `run` is itself.
    A run that learnt its own BPE gives its tokenizer.json along; bytes have none."""
    folder, path = weights_of(run, best=best)
    config, checkpoint = load_model(path)
    state = checkpoint.state
    own = own_tokenizer(folder, state)  # refuses a tokenizer that is not the weights'
    origin = folder / "origin"
    began_with = origin / "tokenizer.json"
    same_tokens = began_with.is_file() and load_tokenizer(began_with).json() == own.json()
    tokenizer = folder / "data" / "tokenizer.json" if state["run"]["data"]["tokenizer"] != "bytes" else None
    write_weights(
        out, checkpoint.tensors, config, origin=origin if same_tokens else None, tokenizer=tokenizer, dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    return str(config_json(config, torch.float32)["model_type"]), checkpoint.step
