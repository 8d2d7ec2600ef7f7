"""`tilegrad plan`: every byte of a training step before the first is allocated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .arguments import DTYPES, PRESETS, Commands, add_command, byte_count


def _plan(args: argparse.Namespace) -> int:
    import torch

    from ..model.config import PRESETS as MODELS
    from ..train.planning import plan_model, step_report
    from ..train.recompute import choose_recompute

    config, dtype, device = MODELS[args.preset], getattr(torch, args.dtype), torch.device(args.device)
    seq_len = args.seq_len or config.block_size
    form = (config, args.batch_size, seq_len, dtype, device)
    recompute = choose_recompute(*form, args.memory_budget)
    title = f"{args.preset}, batch {args.batch_size} × {seq_len} tokens, {args.dtype}"
    report = step_report(plan_model(*form, recompute), config, args.batch_size, seq_len, dtype, recompute, title)
    if args.html:
        Path(args.html).write_text(report.html(), encoding="utf-8")
    if args.json:
        print(json.dumps(report.json(), indent=1))
        return 0
    print(report.table())
    chosen = {name: sum(name in block for block in recompute) for name in ("norm", "activation", "block")}
    if any(chosen.values()):
        print("\nrecomputed: " + ", ".join(f"{name} in {n} blocks" for name, n in chosen.items() if n))
    if args.html:
        print(f"\nThe timeline: {args.html}")
    return 0


def add_memory(commands: Commands) -> None:
    plan = add_command(commands, "plan", "every byte of a training step, with nothing allocated", _plan)
    plan.add_argument("--preset", choices=PRESETS, default="gpt2", help="a model by name (default: %(default)s)")
    plan.add_argument("--batch-size", type=int, default=1, metavar="N")
    plan.add_argument("--seq-len", type=int, metavar="N", help="default: the model's block_size")
    plan.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    plan.add_argument("--device", default="cpu", help="default: %(default)s")
    plan.add_argument(
        "--memory-budget", type=byte_count, metavar="BYTES", help="plan within these bytes by recomputing"
    )
    plan.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    plan.add_argument("--json", action="store_true", help="the same as data")
