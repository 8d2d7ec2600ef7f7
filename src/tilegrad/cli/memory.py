"""`tilegrad plan`: every byte of a training step before the first is allocated."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Commands, add_command, add_keys, add_ranks, given_keys, sharding_of

if TYPE_CHECKING:
    from ..engine.spec import StepSpec


def _plan(args: argparse.Namespace) -> int:
    import torch

    from ..engine.machine import check_device, what_fits
    from ..engine.planning import plan_model, step_report
    from ..engine.recompute import OverBudget, choose_recompute
    from ..engine.spec import StepSpec
    from ..text.atomic import check_replaceable
    from ..training.config import DTYPES
    from ..training.sections import run_from, settled

    page = Path(args.html) if args.html is not None else None
    if page is not None:
        check_replaceable(page, '<meta name="generator" content="tilegrad">')
    content = given_keys(args)
    run = settled(run_from(content, args.config or "flags"))
    where = Path(args.config).stem if args.config else None
    t = run.train
    check_device(t.device)
    if args.world_size < 1:
        raise ValueError(f"world-size: got {args.world_size}; accepted: at least 1")
    device = torch.device(t.device)
    spec = StepSpec(
        run.model, t.batch_size, t.seq_len, DTYPES[t.dtype], device,
        linear=t.linear, deterministic=t.deterministic or t.device == "cpu", world=args.world_size,
        documents=run.documents, lora=run.lora, freeze=t.freeze, **sharding_of(args),
    )  # fmt: skip
    largest, largest_sentence = _largest_batch(spec, t.memory_budget) if args.fit else ({}, "")
    try:
        spec = replace(spec, recompute=choose_recompute(spec, t.memory_budget))
    except OverBudget as error:
        raise ValueError(f"{error}; {largest_sentence}") if args.fit else error from None
    name = where or content.get("model", {}).get("preset", "tiny")
    title = f"{name}, batch {t.batch_size} × {t.seq_len} tokens, {t.dtype}"
    title += f", one of {args.world_size} ranks, shard {args.shard}" if args.world_size > 1 else ""
    title += f", {args.context} ranks to a sequence" if args.context > 1 else ""
    report = step_report(plan_model(spec), spec, title)
    if page is not None:
        page.write_text(report.html(), encoding="utf-8")
    fits, sentence = what_fits(report.peak_bytes + sum(dict(report.beside).values()), device)
    if args.json:
        print(json.dumps(report.json() | fits | largest, indent=1))
        return 0
    print(report.table())
    chosen = {name: sum(name in block for block in spec.recompute) for name in ("norm", "activation", "block")}
    if any(chosen.values()):
        print("\nrecomputed: " + ", ".join(f"{name} in {n} blocks" for name, n in chosen.items() if n))
    print(f"\n{sentence}")
    if args.fit:
        print(largest_sentence)
    if page is not None:
        print(f"\nThe timeline: {page}")
    return 0


def _largest_batch(spec: StepSpec, budget: int | None) -> tuple[dict[str, int | None], str]:
    """The largest micro-batch that fits into free memory and into memory_budget, as data and as a sentence."""
    from ..engine.recompute import largest_batch
    from ..memory.managed import pressure
    from ..memory.page import human

    free = pressure.memory_available(spec.device)
    limit = free if free is not None else budget
    if limit is None:
        raise ValueError(f"fit: got {spec.device}, whose free memory is unknown here; give --memory-budget")
    found = largest_batch(spec, budget, limit)
    batch_size, nbytes = found or (0, None)
    data = {"largest_batch_size": batch_size, "largest_batch_bytes": nbytes}
    if nbytes is None:
        return data, f"no batch fits, not even one of a single sequence of {spec.seq_len} tokens"
    return data, f"the largest batch that fits is {batch_size:,} × {spec.seq_len} tokens, {human(nbytes)}"


def add_memory(commands: Commands) -> None:
    plan = add_command(
        commands,
        "plan",
        "every byte of the training step that `train` would run with the same arguments; nothing is allocated",
        _plan,
    )
    plan.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    plan.add_argument("--json", action="store_true", help="JSON instead of the table")
    plan.add_argument("--fit", action="store_true", help="also find the largest batch size that fits into free memory")
    plan.add_argument("--world-size", type=int, default=1, metavar="N", help="plan one of N ranks (default: 1)")
    add_ranks(plan)
    add_keys(plan)
