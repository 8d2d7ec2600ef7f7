"""`tilegrad import` and `export`, for Hugging Face folders and GGUF files."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import DTYPES, Commands, add_command, add_dtype, add_model, which_weights

if TYPE_CHECKING:
    from ..training.export import Written


def _import(args: argparse.Namespace) -> int:
    path = Path(args.source)
    if path.suffix == ".gguf":
        from ..pretrained.gguf.read import import_gguf

        if args.adapter:
            raise ValueError(
                f"adapter: got {args.adapter} with a .gguf; accepted: none with a .gguf; import the .gguf first, then "
                "the new folder with the adapter"
            )
        out = Path(args.out or f"models/{path.stem}")
        imported = import_gguf(path, out, tokenizer=Path(args.tokenizer) if args.tokenizer else None)
        _print_imported(out, imported.kind, imported.parameters)
        _print_notes(out, imported.notes)
        return 0
    from ..pretrained.adapters import merge, open_adapter
    from ..pretrained.weights import open_weights, write_weights

    if args.tokenizer:
        raise ValueError(
            f"tokenizer: got {args.tokenizer}; accepted: none with a folder, which has its own tokenizer.json"
        )
    source = open_weights(path)
    adapter = None if args.adapter is None else open_adapter(Path(args.adapter), source)
    params = source.read()
    if adapter is not None:
        merge(params, adapter.read(), source.config, adapter.lora)
    # The folder of ORG/NAME in Hugging Face's cache is named after a revision, so the model gets the name NAME.
    name = source.folder.resolve().name if path.exists() else path.name
    out = Path(args.out or f"models/{name}")
    write_weights(out, params, source.config, origin=source.folder)
    _print_imported(out, source.kind, sum(p.numel() for p in params.values()))
    if adapter is not None:
        print(f"The adapters in {args.adapter} of rank {adapter.lora.rank} are merged into the weights.")
    return 0


def _print_imported(out: Path, kind: str, count: int) -> None:
    name = shlex.quote(str(out))
    print(f"{out}: a {kind} model with {count:,} parameters; every name and shape was checked.")
    print(f"Fine-tune it: tilegrad train --init {name} --data TEXT; generate text: tilegrad generate {name}")


def _print_notes(out: Path, notes: Iterable[str]) -> None:
    for note in notes:
        print(f"{out}: {note}")


def _export(args: argparse.Namespace) -> int:
    import torch

    from ..text.spelling import byte_count
    from ..training.export import export_adapter, export_gguf, export_run

    source, out, chosen = Path(args.run_folder), Path(args.out), which_weights(args)
    init = chosen.pop("init")
    if args.gguf:
        if args.adapter:
            raise ValueError("adapter: got --adapter with --gguf; accepted: one of them")
        if args.max_shard_size is not None:
            raise ValueError(
                f"max_shard_size: got {args.max_shard_size}; accepted: none with --gguf, which is one file"
            )
        written = export_gguf(source, out, dtype=args.dtype, init=init, **chosen)
        print(f"{out}: a {written.kind} model for llama.cpp and Ollama{_steps_and_weights(written)}")
        _print_notes(out, written.notes)
        return 0
    if out.suffix == ".gguf":
        raise ValueError(f"out: got {out} without --gguf; accepted: --gguf, or the name of a folder")
    if args.dtype == "q8_0":
        raise ValueError("dtype: got q8_0; accepted: q8_0 with --gguf")
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if args.adapter:
        if args.max_shard_size is not None or init is not None:
            got = "init" if init is not None else "max-shard-size"
            raise ValueError(
                f"{got}: got a value with --adapter; accepted: none, because the base weights are not written"
            )
        written = export_adapter(source, out, dtype=dtype, **chosen)
        print(f"{out}: adapters of a {written.kind} model for PEFT{_steps_and_weights(written)}")
        return 0
    most = None if args.max_shard_size is None else byte_count(args.max_shard_size, "max_shard_size")
    written = export_run(source, out, dtype=dtype, max_shard_bytes=most, init=init, **chosen)
    print(f"{out}: a {written.kind} model for transformers{_steps_and_weights(written)}")
    return 0


def _steps_and_weights(written: Written) -> str:
    steps = "" if written.step is None else f", after {written.step:,} steps"
    return steps if written.weights == "raw" else f"{steps}, weights: {written.weights}"


def add_weights(commands: Commands) -> None:
    importer = add_command(
        commands, "import", "import Hugging Face weights or a GGUF file: GPT-2, Llama, Mistral, Qwen2, Qwen3", _import
    )
    text = "a folder with config.json and *.safetensors, a .safetensors, a .gguf, or ORG/NAME in Hugging Face's cache"
    importer.add_argument("source", metavar="DIR_OR_FILE", help=text)
    importer.add_argument("--out", metavar="DIR", help="the new folder (default: models/NAME, with the source's name)")
    importer.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of the one in a .gguf")
    importer.add_argument("--adapter", metavar="DIR", help="a folder of PEFT's adapters to merge into the weights")
    exporter = add_command(commands, "export", "write a run's weights for transformers, llama.cpp or Ollama", _export)
    add_model(exporter)
    exporter.add_argument("out", metavar="OUT", help="the new folder, or the new file with --gguf")
    exporter.add_argument("--gguf", action="store_true", help="write one GGUF file, for llama.cpp and Ollama")
    add_dtype(
        exporter,
        "dtype of the exported weights; q8_0 only with --gguf (default: the run's)",
        choices=(*DTYPES, "float16", "q8_0"),
    )
    text = "write only the run's adapters, as PEFT saves them (default: merge the adapters into the weights)"
    exporter.add_argument("--adapter", action="store_true", help=text)
    text = "split into files of at most this size, such as 5GB (default: one file)"
    exporter.add_argument("--max-shard-size", metavar="X", help=text)
