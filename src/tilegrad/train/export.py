"""A run's newest weights as a folder that transformers loads, with the config and the tokenizer it began with."""

from __future__ import annotations

from pathlib import Path

import torch

from ..model.config import ModelConfig
from ..model.transformer import declare
from .checkpoint import latest_checkpoint, load_checkpoint
from .folder import locate, own_tokenizer
from .weights import config_json, write_weights


def export_run(run: Path, out: Path, *, dtype: torch.dtype | None = None) -> tuple[str, int]:
    """(model_type, steps) of what is written. A run that learnt its own BPE gives its tokenizer.json along; bytes have none."""
    folder, given = locate(run)
    path = given or (latest_checkpoint(folder / "checkpoints") if (folder / "checkpoints").exists() else None)
    if path is None:
        raise ValueError(f"{run}: got no checkpoint; accepted: the folder of a run (tilegrad train)")
    checkpoint = load_checkpoint(path)
    config = ModelConfig.from_dict(checkpoint.state["run"]["model"])
    names = declare(config, 1, 1, torch.float32, "cpu").params
    params = {name: checkpoint.tensors[name] for name in names}
    own_tokenizer(folder, checkpoint.state)  # refuses a tokenizer that is not the weights'
    origin = folder / "origin"
    tokenizer = folder / "data" / "tokenizer.json" if checkpoint.state["run"]["data"]["tokenizer"] != "bytes" else None
    write_weights(
        out, params, config, origin=origin if origin.is_dir() else None, tokenizer=tokenizer, dtype=dtype
    )  # fmt: skip
    return str(config_json(config, torch.float32)["model_type"]), checkpoint.step
