"""`tilegrad train`, `demo` and `generate`: a run, followed by a person; what it ends with is its exit code."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import Commands, add_command, add_keys, given_keys
from .faults import complain, silence

if TYPE_CHECKING:
    from ..train.config import RunConfig
    from ..train.loop import RunResult


def _train(args: argparse.Namespace) -> int:
    from ..train.config import resumed, run_from
    from ..train.folder import locate, own_run

    content = given_keys(args)
    name = Path(args.config).stem if args.config else content.get("model", {}).get("preset", "tiny")
    folder = Path(args.out or f"runs/{name}")
    if args.resume is None:
        return _follow(run_from(content, args.config or "flags"), folder)[1]
    home, checkpoint = locate(folder if args.resume is True else Path(args.resume))
    if args.out and home.resolve() != folder.resolve():
        raise ValueError(f"out: got {folder}; accepted: the run's own, {home}, when resuming")
    return _follow(resumed(own_run(home, checkpoint), content), home, resume=checkpoint or True)[1]


def _init(args: argparse.Namespace) -> int:
    from ..train.keys import example

    file = Path(args.file)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(example())
    except FileExistsError:
        raise ValueError(f"{file}: got a file that is there already; accepted: a new name") from None
    print(f"{file}: every key with its default. Change it, then: tilegrad train {shlex.quote(str(file))}")
    return 0


def _follow(run: RunConfig, folder: Path, *, resume: Path | bool = False) -> tuple[RunResult | None, int]:
    """Train while a person watches. The result, None where a fault ended it, and the exit code: 0 only when it is done."""
    from ..progress import watch
    from ..train.folder import resume_command
    from ..train.loop import RunEnded, train

    try:
        with watch() as show:
            result = train(run, folder, resume=resume, show=show)
    except RunEnded as error:
        complain(error)
        return None, 1
    if result.stopped_by is None:
        _print_result(result)
        return result, 0
    try:
        _print_result(result)
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)
    complain(f"stopped by {result.stopped_by}; go on with: {resume_command(folder)}")
    return result, 128 + signal.Signals[result.stopped_by]


def _print_result(result: RunResult) -> None:
    from ..memory.page import human
    from ..text_table import table

    rows: list[tuple[str, str]] = [
        ("steps", f"{result.steps:,}"),
        ("training loss", f"{result.train_loss:.4f}"),
        ("unigram entropy", f"{result.unigram_entropy:.4f}"),
        ("memory planned", f"{human(result.planned_bytes)}"),
        ("of it resident", human(sum(result.measured.arenas.values()))),
        (f"beside it, {result.measured.beside}", human(result.measured.beside_bytes)),
    ]
    if result.validation_loss is not None:
        rows.insert(2, ("validation loss", f"{result.validation_loss:.4f}"))
    print(f"\n{table(('', 'result'), rows)}\n\nA sample:\n{result.sample}\n\nThe report: {result.report}")


def _demo(_args: argparse.Namespace) -> int:
    from ..train.config import preset_run

    start = time.perf_counter()
    folder, number = Path("runs/demo"), 1
    while folder.exists():
        number += 1
        folder = Path(f"runs/demo-{number}")
    run = preset_run("tiny")
    print(
        "Training the tiny preset on Moby-Dick, byte by byte: every gradient by hand, every byte of memory planned.\n"
    )
    result, code = _follow(run, folder)
    if result is None:
        return code
    if result.stopped_by:
        print(f"It was stopped after {result.steps} of {run.train.steps} steps.")
        return code
    learned = result.validation_loss is not None and result.validation_loss < result.unigram_entropy - 0.3
    verdict = "learned: the loss is well below the unigram entropy" if learned else "did NOT learn as it should"
    print(f"It {verdict}. {time.perf_counter() - start:.0f} s in all.")
    return 0 if learned else 1


def _generate(args: argparse.Namespace) -> int:
    from ..model.config import ModelConfig
    from ..model.generate import generate
    from ..train.checkpoint import latest_checkpoint, load_checkpoint
    from ..train.folder import own_tokenizer
    from ..train.loop import decode_known
    from ..train.weights import imported, is_weights

    folder = Path(args.run_folder)
    if is_weights(folder):
        config, params, tokenizer = imported(folder)
    else:
        path = latest_checkpoint(folder / "checkpoints") if (folder / "checkpoints").exists() else None
        if path is None:
            raise ValueError(f"{folder}: got no checkpoint; accepted: the folder of a run, or of an imported model")
        checkpoint = load_checkpoint(path)
        tokenizer = own_tokenizer(folder, checkpoint.state)
        config, params = ModelConfig.from_dict(checkpoint.state["run"]["model"]), checkpoint.tensors
    prompt = [int(token) for token in tokenizer.encode(args.text or args.prompt)]
    options: dict[str, Any] = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    tokens = list(generate(config, params, prompt, args.max_tokens, **options))
    print(decode_known(tokenizer, prompt + tokens))
    return 0


def add_runs(commands: Commands) -> None:
    add_command(
        commands,
        "demo",
        "train the tiny model on the text that ships with the package, about 90 seconds on 2 cores",
        _demo,
    )
    init = add_command(commands, "init", "write a run as TOML to begin with: every key, its default, its unit", _init)
    init.add_argument(
        "file", nargs="?", default="run.toml", metavar="FILE", help="default: %(default)s; never overwritten"
    )
    train = add_command(commands, "train", "train a model; a run is a folder with log, checkpoints and report", _train)
    train.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/NAME, of FILE or the preset)")
    train.add_argument(
        "--resume", nargs="?", const=True, metavar="RUN",
        help="go on with the run in this folder (default: --out) from its newest checkpoint, or from the checkpoint given "
        "here; all else is the run's own, and of the flags only those may differ that change no past step",
    )  # fmt: skip
    add_keys(train)

    text = add_command(commands, "generate", "let a trained model write", _generate)
    text.add_argument("run_folder", metavar="RUN", help="the folder of a run, or of an imported model")
    text.add_argument("text", nargs="?", metavar="PROMPT", help="the same as --prompt")
    text.add_argument("--prompt", default="Call me ", help="what it goes on from (default: %(default)r)")
    text.add_argument(
        "--max-tokens", type=int, default=80, metavar="N", help="how much it writes (default: %(default)s)"
    )
    text.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 = always the likeliest (default: %(default)s)"
    )
    text.add_argument("--top-k", type=int, metavar="N", help="choose among the N likeliest only")
    text.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed writes the same (default: %(default)s)"
    )
