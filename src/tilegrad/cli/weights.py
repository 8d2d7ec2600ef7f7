"""`tilegrad import` and `export`: weights of Hugging Face folders, in and out."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from .arguments import DTYPES, Commands, add_command, add_dtype


def _import(args: argparse.Namespace) -> int:
    from ..pretrained.weights import open_weights, write_weights

    given = Path(args.source)
    source = open_weights(given)
    params = source.read()
    name = source.folder.resolve().name if given.exists() else given.name  # not the revision of a cached ORG/NAME
    out = Path(args.out or f"models/{name}")
    write_weights(out, params, source.config, origin=source.folder)
    name = shlex.quote(str(out))
    count = sum(p.numel() for p in params.values())
    print(f"{out}: a {source.origin['model_type']} model with {count:,} parameters; every name and shape was checked.")
    print(f"Fine-tune it: tilegrad train --init {name} --data TEXT; let it write: tilegrad generate {name}")
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from ..text.spelling import byte_count
    from ..training.export import export_run

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    most = None if args.max_shard_size is None else byte_count(args.max_shard_size, "max_shard_size")
    kind, step = export_run(Path(args.run_folder), Path(args.out), best=args.best, dtype=dtype, max_shard_bytes=most)
    print(f"{args.out}: a {kind} model for transformers, after {step:,} steps")
    return 0


def add_weights(commands: Commands) -> None:
    bring = add_command(commands, "import", "import Hugging Face weights: GPT-2, Llama, Mistral, Qwen2, Qwen3", _import)
    bring.add_argument(
        "source", metavar="DIR_OR_FILE",
        help="a folder with config.json and *.safetensors, one such file, or ORG/NAME in Hugging Face's cache",
    )  # fmt: skip
    bring.add_argument("--out", metavar="DIR", help="the new folder (default: models/ and the name of the source)")
    give = add_command(commands, "export", "write a run's weights as a folder that transformers loads", _export)
    give.add_argument("run_folder", metavar="RUN", help="the folder of a run, or a checkpoint in it")
    give.add_argument("out", metavar="DIR", help="the new folder")
    add_dtype(give, "dtype of the exported weights (default: the run's)", choices=DTYPES)
    give.add_argument("--best", action="store_true", help="the weights of the lowest validation loss, not the newest")
    give.add_argument(
        "--max-shard-size", metavar="X", help="split into files of at most this size, such as 5GB (default: one file)"
    )
