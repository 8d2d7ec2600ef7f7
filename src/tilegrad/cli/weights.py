"""`tilegrad import` and `export`: weights of Hugging Face folders, in and out."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from .arguments import DTYPES, Commands, add_command, add_dtype, add_init


def _import(args: argparse.Namespace) -> int:
    from ..pretrained.adapters import merge, open_adapter
    from ..pretrained.weights import open_weights, write_weights

    source = open_weights(Path(args.source))
    adapter = None if args.adapter is None else open_adapter(Path(args.adapter), source)
    params = source.read()
    if adapter is not None:
        merge(params, adapter.read(), source.config, adapter.lora)
    out = Path(args.out or f"models/{source.folder.resolve().name}")
    write_weights(out, params, source.config, origin=source.folder)
    name = shlex.quote(str(out))
    count = sum(p.numel() for p in params.values())
    print(f"{out}: a {source.origin['model_type']} model with {count:,} parameters; every name and shape was checked.")
    if adapter is not None:
        print(f"The adapters in {args.adapter} are merged into its weights: rank {adapter.lora.rank}.")
    print(f"Fine-tune it: tilegrad train --init {name} --data TEXT; let it write: tilegrad generate {name}")
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from ..text.spelling import byte_count
    from ..training.export import export_adapter, export_run

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    run, out = Path(args.run_folder), Path(args.out)
    if args.adapter:
        if args.max_shard_size is not None or args.init is not None:
            got = "init" if args.init is not None else "max-shard-size"
            raise ValueError(
                f"{got}: got a value with --adapter; accepted: none, because the base weights are not written"
            )
        kind, step = export_adapter(run, out, best=args.best, dtype=dtype)
        print(f"{out}: adapters of a {kind} model for PEFT, after {step:,} steps")
        return 0
    most = None if args.max_shard_size is None else byte_count(args.max_shard_size, "max_shard_size")
    init = None if args.init is None else Path(args.init)
    kind, step = export_run(run, out, best=args.best, dtype=dtype, max_shard_bytes=most, init=init)
    print(f"{args.out}: a {kind} model for transformers, after {step:,} steps")
    return 0


def add_weights(commands: Commands) -> None:
    bring = add_command(commands, "import", "import Hugging Face weights: GPT-2, Llama, Mistral, Qwen2, Qwen3", _import)
    bring.add_argument(
        "source", metavar="DIR_OR_FILE", help="a folder with config.json and *.safetensors, or one such file"
    )
    bring.add_argument("--out", metavar="DIR", help="the new folder (default: models/ and the name of the source)")
    bring.add_argument("--adapter", metavar="DIR", help="a folder of PEFT's adapters to merge into the weights")
    give = add_command(commands, "export", "write a run's weights as a folder that transformers loads", _export)
    give.add_argument("run_folder", metavar="RUN", help="the folder of a run, or a checkpoint in it")
    give.add_argument("out", metavar="DIR", help="the new folder")
    add_dtype(give, "dtype of the exported weights (default: the run's)", choices=DTYPES)
    give.add_argument("--best", action="store_true", help="the weights of the lowest validation loss, not the newest")
    give.add_argument(
        "--adapter",
        action="store_true",
        help="only the run's adapters, as PEFT saves them (default: merged into the weights)",
    )
    add_init(give)
    give.add_argument(
        "--max-shard-size", metavar="X", help="split into files of at most this size, such as 5GB (default: one file)"
    )
