"""Train each contender for the same time on the same text: `python -m benchmarks.five_minutes --data FOLDER`.

Each run has a process of its own, one at a time, and appends its line to `--out` when it ends. `--report` reads such files, so
runs can be spread over hours. `python -m benchmarks.five_minutes.data FOLDER` makes the text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path

import torch

from tilegrad.text.environment import environment

from .contenders import CONTENDERS, SIZES
from .report import read_runs, report, to_json
from .training import Run, Settings, train


def measure(every: Sequence[Settings], out: Path | None) -> tuple[list[Run], bool]:
    """The runs, and whether one failed."""
    runs, failed = [], False
    for settings in every:
        name = f"{settings.contender}, seed {settings.seed}"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                run = process.submit(train, settings).result()
            except (RuntimeError, ImportError, NotImplementedError, OSError) as error:
                failed = True
                _say(f"{name}: failed: {type(error).__name__}: {error}")
                continue
        runs.append(run)
        _say(f"{name}: {run.bits_per_byte:.4f} bits per byte after {run.steps} steps in {run.seconds:.2f} s")
        if out is not None:
            _append(out, to_json(run))
    return runs, failed


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rates_of(given: Sequence[str]) -> dict[str, float]:
    """The rate of each contender, from texts NAME=RATE such as muon=0.002."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"rate: got {text!r}; accepted: NAME=RATE, such as muon=0.002") from None
        if name not in CONTENDERS:
            raise ValueError(f"rate: got {text!r}; accepted: NAME=RATE, with NAME one of {', '.join(CONTENDERS)}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = {field.name: field.default for field in fields(Settings)}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.five_minutes", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="the text, from `python -m benchmarks.five_minutes.data FOLDER`")
    add(
        "--case",
        nargs="+",
        metavar="NAME",
        help=f"contenders: {', '.join(CONTENDERS)} (default: all that the device can run)",
    )
    add(
        "--seconds",
        type=float,
        default=defaults["seconds"],
        metavar="S",
        help="seconds of training (default: %(default)s)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="train for N steps instead of --seconds; a second run gives the same bits",
    )
    add("--seeds", type=int, default=3, metavar="N", help="runs of each contender (default: %(default)s)")
    add("--first-seed", type=int, default=0, metavar="N", help="seed of the first run (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--size", default=defaults["size"], choices=tuple(SIZES), help="the model's size (default: %(default)s)")
    add("--rate", nargs="+", default=[], metavar="NAME=RATE", help="a different peak for a contender's learning rate")
    add(
        "--evaluations",
        type=int,
        default=defaults["evaluations"],
        metavar="N",
        help="evaluations of a run (default: %(default)s)",
    )
    add(
        "--eval-tokens",
        type=int,
        default=defaults["eval_tokens"],
        metavar="N",
        help="targets of an evaluation (default: %(default)s)",
    )
    add("--out", type=Path, metavar="FILE", help="append the environment and each run to FILE, as lines of JSON")
    add(
        "--report",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="train nothing, print the table of the runs in these files",
    )
    args = parser.parse_args(arguments)
    if args.report is not None:
        print(report(read_runs(args.report)))
        return 0
    if args.data is None:
        parser.error("--data: got none; accepted: a folder with the text")
    rates = rates_of(args.rate)
    names = args.case or [name for name, chosen in CONTENDERS.items() if args.device != "cpu" or not chosen.needs_gpu]
    same = {name: getattr(args, name) for name in ("seconds", "steps", "size", "device", "evaluations", "eval_tokens")}
    every = [
        Settings(args.data, name, args.first_seed + seed, rate=rates.get(name), **same)
        for seed in range(args.seeds)
        for name in names
    ]
    if args.out is not None:
        _append(args.out, json.dumps(environment(torch.device(args.device), torch.bfloat16)))
    runs, failed = measure(every, args.out)
    if runs:
        print(report(runs))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
