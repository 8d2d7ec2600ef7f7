"""`tilegrad train`, `warm-up`, `demo` and `init`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Commands, add_command, add_keys, add_ranks, given_keys, sharding_of
from .faults import complain, silence

if TYPE_CHECKING:
    from ..training.loop import RunResult


def _train(args: argparse.Namespace) -> int:
    from ..training.run import train
    from .progress import watch

    if not 0 < args.timeout <= 1e9:
        raise ValueError(f"timeout: got {args.timeout:g}; accepted: seconds, more than 0 and at most 1e9")
    sharding = sharding_of(args)
    keys = given_keys(args)
    with watch() as show:
        result = train(
            keys,
            args.out,
            resume=args.resume,
            where=args.config or "flags",
            name=Path(args.config).stem if args.config else None,
            show=show,
            **sharding,
            timeout_s=args.timeout,
        )
    return _conclude(result)


def _warm_up(args: argparse.Namespace) -> int:
    import torch

    from ..training.sections import run_from, settled
    from ..training.warm_up import warm_up
    from .doctor import build_modules

    run = settled(run_from(given_keys(args), args.config or "flags"))
    if torch.device(run.train.device).type == "cpu":
        built = build_modules(only_missing=True)
        print(
            f"On a CPU only the C++ modules are compiled. The native kernel {'is there' if built else 'was not built'}."
        )
        return 0 if built else 1

    def show(kernel: str, seconds: float, cached: bool) -> None:  # noqa: FBT001
        if not cached:
            print(f"compiled {kernel.strip('_')} in {seconds:.1f} s", flush=True)

    done = warm_up(run, show)
    print(f"Triton compiled {done.compiled} kernels and found {done.cached} in its cache: {done.seconds:.0f} s in all")
    return 0


def _init(args: argparse.Namespace) -> int:
    from ..training.keys import example, finetune

    file = Path(args.file or ("finetune.toml" if args.finetune else "run.toml"))
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(finetune() if args.finetune else example())
    except FileExistsError:
        raise ValueError(f"{file}: got a file that already exists; accepted: a new name") from None
    content, advice = ("a run that fine-tunes a model", "Fill in train.init and data.files")
    if not args.finetune:
        content, advice = "every key with its default", "Change it"
    print(f"{file}: {content}. {advice}, then: tilegrad train {shlex.quote(str(file))}")
    return 0


def _conclude(result: RunResult) -> int:
    """Print the result, and return the exit code: 0 if the run is done. A run of several ranks that was stopped gives 0 too,
    because otherwise torchrun would restart it."""
    from ..training.folder import resume_command

    if int(os.environ.get("RANK", "0")):
        return 0
    try:
        _print_result(result)
        sys.stdout.flush()
    except OSError:
        if result.stopped_by is None:
            raise
        silence(sys.stdout)
    if result.stopped_by is None:
        return 0
    complain(f"stopped by {result.stopped_by}; resume with: {resume_command(result.folder)}")
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return 128 + signal.Signals[result.stopped_by] if alone else 0


def _print_result(result: RunResult) -> None:
    from ..memory.page import human
    from ..text.table import table

    rows = [("steps", f"{result.steps:,}"), ("training loss", f"{result.train_loss:.4f}")]
    if result.validation_loss is not None:
        rows.append(("validation loss", f"{result.validation_loss:.4f}"))
    if result.best is not None:
        rows.append(("best validation loss", f"{result.best.validation_loss:.4f} after {result.best.step:,} steps"))
    rows += [
        ("unigram entropy", f"{result.unigram_entropy:.4f}"),
        ("memory planned", human(result.planned_bytes)),
        ("planned memory that is resident", human(sum(result.measured.arenas.values()))),
        (f"outside the plan: {result.measured.unplanned}", human(result.measured.unplanned_bytes)),
    ]
    if result.ended_early is not None:
        rows.append(("ended early", result.ended_early))
    sample = f"A sample:\n{result.sample}\n\n" if result.sample else ""
    print(f"\n{table(('', 'result'), rows)}\n\n{sample}The report: {result.report}")
    if result.best is not None:
        print(f"The best weights: {result.best.path} (tilegrad generate {shlex.quote(str(result.folder))} --best)")


def _demo(_args: argparse.Namespace) -> int:
    from ..training.run import train
    from ..training.sections import preset_run
    from .progress import watch

    start = time.perf_counter()
    folder, number = Path("runs/demo"), 1
    while folder.exists():
        number += 1
        folder = Path(f"runs/demo-{number}")
    run = preset_run("tiny")
    print(
        "Training the tiny preset on Moby-Dick, byte by byte: every gradient by hand, every byte of memory planned.\n"
    )
    with watch() as show:
        result = train(run, folder, show=show)
    code = _conclude(result)
    if result.stopped_by:
        print(f"It was stopped after {result.steps} of {run.train.steps} steps.")
        return code
    learned = result.validation_loss is not None and result.validation_loss < result.unigram_entropy - 0.3
    verdict = "learned: the loss is well below the unigram entropy" if learned else "did NOT learn as it should"
    print(f"It {verdict}. {time.perf_counter() - start:.0f} s in all.")
    return 0 if learned else 1


def add_runs(commands: Commands) -> None:
    text = "train the tiny model on the text that ships with the package, in about 100 seconds on 2 cores"
    add_command(commands, "demo", text, _demo)
    text = "write a TOML file to start from, with the default and the unit of every key"
    init = add_command(commands, "init", text, _init)
    text = "a run that fine-tunes a model on conversations, with adapters"
    init.add_argument("--finetune", action="store_true", help=text)
    init.add_argument("file", nargs="?", metavar="FILE", help="the new file (default: run.toml, or finetune.toml)")
    train = add_command(commands, "train", "train a model; a run is a folder with log, checkpoints and report", _train)
    train.add_argument(
        "--out", metavar="DIR", help="the run's folder (default: runs/NAME, with the name of FILE or preset)"
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="RUN",
        help="continue the run in this folder (default: --out) from its newest checkpoint, or from the checkpoint given "
        "here; flags may change only keys that affect no past step",
    )
    add_ranks(train)
    text = "how long a collective waits for a rank (default: %(default)s)"
    train.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help=text)
    add_keys(train)
    text = "compile the kernels that `train` would need with the same arguments, into Triton's cache; read no data"
    add_keys(add_command(commands, "warm-up", text, _warm_up))
