"""`tilegrad evaluate`: computes loss, perplexity and bits per byte of a model on texts or conversations."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict

from .arguments import DTYPES, Commands, add_command, add_dtype, add_model, which_weights


def _evaluate(args: argparse.Namespace) -> int:
    from ..text.table import table
    from ..training.api import evaluate
    from .progress import watch

    with watch(sys.stderr if args.json else sys.stdout) as show:
        result = evaluate(
            args.run_folder,
            args.data or (),
            **which_weights(args),
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            device=args.device,
            dtype=args.dtype,
            show=lambda event, numbers: None if args.json and event == "data" else show(event, numbers),
        )
    if args.json:
        values = asdict(result).items()
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values}
        print(json.dumps(finite, indent=1))
        return 0
    rows = [("weights", result.weights)] if result.weights != "raw" else []
    rows.append(("loss", f"{result.loss:.4f}"))
    if result.perplexity is not None:
        rows.append(("perplexity", f"{result.perplexity:,.2f}"))
    if result.bits_per_byte is not None:
        rows.append(("bits per byte", f"{result.bits_per_byte:.4f}"))
    if result.bytes is not None:
        rows.append(("bytes", f"{result.bytes:,}"))
    rows += [("tokens", f"{result.tokens:,}"), ("seconds", f"{result.seconds:.1f}")]
    print(table(("", "result"), rows))
    return 0


def add_evaluation(commands: Commands) -> None:
    text = "compute loss, perplexity and bits per byte of a model on texts or conversations"
    evaluate = add_command(commands, "evaluate", text, _evaluate)
    add_model(evaluate)
    text = "files of texts or conversations, and folders (default: the validation data of the run)"
    evaluate.add_argument("--data", nargs="+", metavar="FILE", help=text)
    evaluate.add_argument("--batch-size", type=int, metavar="N", help="windows in a batch (default: as in the run)")
    evaluate.add_argument("--seq-len", type=int, metavar="N", help="tokens in a window (default: as in the run)")
    evaluate.add_argument("--device", help="where to run (default: cuda if there is a GPU, else cpu)")
    add_dtype(
        evaluate,
        "compute in this dtype (default: as in the run; for a folder of weights bfloat16 on CUDA, else float32)",
        choices=DTYPES,
    )
    evaluate.add_argument("--json", action="store_true", help="JSON instead of the table")
