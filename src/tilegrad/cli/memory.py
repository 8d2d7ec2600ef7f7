"""`tilegrad plan`: plans the memory of a training step or of a decoder, and allocates nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Commands, add_command, add_keys, add_ranks, given_keys, sharding_of

if TYPE_CHECKING:
    import torch

    from ..engine.spec import StepSpec
    from ..memory.planned.report import MemoryReport
    from ..training.config import RunConfig


def _spec(args: argparse.Namespace, run: RunConfig, device: torch.device) -> StepSpec:
    from ..engine.spec import StepSpec
    from ..training.config import DTYPES

    t = run.train
    return StepSpec(
        run.model,
        t.batch_size,
        t.seq_len,
        DTYPES[t.dtype],
        device,
        deterministic=t.deterministic or t.device == "cpu",
        world=args.world_size,
        **run.step_options,
        **sharding_of(args),
    )


def _plan(args: argparse.Namespace) -> int:
    import torch

    from ..engine.batch import check_spec
    from ..engine.machine import check_device
    from ..engine.planning import step_report
    from ..engine.recompute import OverBudget, choose_recompute
    from ..text.atomic import check_replaceable
    from ..training.sections import run_from, settled

    page = Path(args.html) if args.html is not None else None
    if page is not None:
        check_replaceable(page, '<meta name="generator" content="tilegrad">')
    content = given_keys(args)
    run = settled(run_from(content, args.config or "flags"))
    name = Path(args.config).stem if args.config else content.get("model", {}).get("preset", "tiny")
    t = run.train
    check_device(t.device)
    if args.generate:
        return _plan_decoder(args, run, name, page)
    for flag in ("max_tokens", "prompt_tokens", "repetition_penalty"):
        if getattr(args, flag) is not None:
            raise ValueError(f"{flag.replace('_', '-')}: got {getattr(args, flag)} without --generate; give both")
    if args.world_size < 1:
        raise ValueError(f"world-size: got {args.world_size}; accepted: at least 1")
    device = torch.device(t.device)
    spec = _spec(args, run, device)
    check_spec(spec)
    largest, largest_sentence = _largest_batch(spec, t.memory_budget) if args.fit else ({}, "")
    try:
        choice, plan = choose_recompute(spec, t.memory_budget)
    except OverBudget as error:
        raise ValueError(f"{error}; {largest_sentence}") if args.fit else error from None
    spec = replace(spec, recompute=choice)
    title = f"{name}, batch {t.batch_size} × {t.seq_len} tokens, {t.dtype}"
    title += f", one of {args.world_size} ranks, shard {args.shard}" if args.world_size > 1 else ""
    title += f", {args.context} ranks to a sequence" if args.context > 1 else ""
    report = step_report(plan, spec, title)
    counts = {part: sum(part in block for block in choice) for part in ("norm", "activation", "block")}
    recomputed = ", ".join(f"{part} in {n} blocks" for part, n in counts.items() if n)
    _print(args, report, device, page, [f"recomputed: {recomputed}"] if recomputed else [], largest, largest_sentence)
    return 0


def _print(
    args: argparse.Namespace,
    report: MemoryReport,
    device: torch.device,
    page: Path | None,
    notes: list[str],
    largest: dict[str, int | None],
    largest_sentence: str,
) -> None:
    from ..engine.machine import what_fits

    if page is not None:
        page.write_text(report.html(), encoding="utf-8")
    fits, sentence = what_fits(report.peak_bytes + sum(dict(report.unplanned).values()), device)
    if args.json:
        print(json.dumps(report.json() | fits | largest, indent=1))
        return
    print(report.table())
    for note in notes:
        print(f"\n{note}")
    print(f"\n{sentence}")
    if args.fit:
        print(largest_sentence)
    if page is not None:
        print(f"\nThe timeline: {page}")


def _plan_decoder(args: argparse.Namespace, run: RunConfig, name: str, page: Path | None) -> int:
    """Print the memory plan of the decoder that `generate` would use."""
    import torch

    from ..engine.decoder import decoder_spec, largest_batch, plan_decoder
    from ..engine.sampling import Sampling
    from ..memory.managed import pressure
    from ..memory.planned.report import memory_report
    from ..training.config import DTYPES

    t, size = run.train, run.model.block_size
    for flag, value, accepted in (
        ("world-size", args.world_size, 1),
        ("context", args.context, 1),
        ("memory-budget", t.memory_budget, None),
    ):
        if value != accepted:
            raise ValueError(f"{flag}: got {value} with --generate; accepted: {accepted}")
    for flag, value in (("max-tokens", args.max_tokens), ("prompt-tokens", args.prompt_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{flag}: got {value}; accepted: an int ≥ 1")
    if args.prompt_tokens is not None and args.max_tokens is None:
        remedy = f"--prompt-tokens with --max-tokens, because without it the plan has block_size ({size}) tokens"
        raise ValueError(f"prompt-tokens: got {args.prompt_tokens}; accepted: {remedy}")
    prompt = args.prompt_tokens or 1
    # The decoder does not read the last new token.
    capacity = size if args.max_tokens is None else min(size, prompt + args.max_tokens - 1)
    device, dtype = torch.device(t.device), DTYPES[t.dtype]
    penalties = args.repetition_penalty is not None and Sampling(repetition_penalty=args.repetition_penalty).has_penalty
    spec = decoder_spec(
        run.model, t.batch_size, capacity, device=device, dtype=dtype, penalties=penalties, invariant=t.invariant
    )
    title = f"{name}, generation of {t.batch_size} × {capacity} tokens, {t.dtype}"
    title += ", repetition penalty" * penalties + ", invariant" * t.invariant
    largest, sentence = largest_batch(spec, pressure.memory_available(device)) if args.fit else ({}, "")
    _print(args, memory_report(plan_decoder(spec), title), device, page, [], largest, sentence)
    return 0


def _largest_batch(spec: StepSpec, budget: int | None) -> tuple[dict[str, int | None], str]:
    """The largest micro-batch that fits into free memory and into memory_budget, as data and as a sentence."""
    from ..engine.machine import what_is_largest
    from ..engine.recompute import largest_batch
    from ..memory.managed import pressure

    free = pressure.memory_available(spec.device)
    limit = free if free is not None else budget
    if limit is None:
        raise ValueError(f"fit: got {spec.device}, whose free memory is unknown here; give --memory-budget")
    batch_size, nbytes = largest_batch(spec, budget, limit) or (0, None)
    return what_is_largest(batch_size, nbytes, spec.seq_len)


def add_memory(commands: Commands) -> None:
    text = "plan the memory of the training step that `train` would run with the same arguments; allocate nothing"
    plan = add_command(commands, "plan", text, _plan)
    plan.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    plan.add_argument("--json", action="store_true", help="JSON instead of the table")
    plan.add_argument("--fit", action="store_true", help="also find the largest batch size that fits into free memory")
    plan.add_argument("--generate", action="store_true", help="plan generation instead: --batch-size sequences at once")
    text = "with --generate: most new tokens (default: up to block_size)"
    plan.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = "with --generate: tokens of the longest prompt (default: 1)"
    plan.add_argument("--prompt-tokens", type=int, metavar="N", help=text)
    text = "with --generate: as in generate; unless it is 1, the plan has batch_size · vocab_size bytes more"
    plan.add_argument("--repetition-penalty", type=float, metavar="X", help=text)
    plan.add_argument("--world-size", type=int, default=1, metavar="N", help="plan one of N ranks (default: 1)")
    add_ranks(plan)
    add_keys(plan)
