"""The command line: each command parses its arguments and makes one call. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from . import __version__

if TYPE_CHECKING:
    from .train.config import RunConfig
    from .train.loop import RunResult

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
PRESETS = ("tiny", "gpt2", "gpt2-medium", "gpt2-xl", "llama-135m")
DTYPES = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}


def _check_flash(args: argparse.Namespace) -> int:
    from .check import check_flash

    return 0 if check_flash(args.kernel, args.device, matrices=not args.brief) else 1


def _gradcheck(args: argparse.Namespace) -> int:
    from .gradcheck import LIMIT, check_attention, check_model, gradient_table
    from .model.config import PRESETS as MODELS

    if args.preset is None:
        title, results = "Gradients of attention against float64 central differences", check_attention(args.kernel)
    else:
        against = "torch autograd" if args.against == "autograd" else "float64 central differences"
        title = f"Gradients of {args.preset}, in small, against {against}"
        results = check_model(MODELS[args.preset], against=args.against)
    print(f"{title}\n\n{gradient_table(results)}")
    failed = [r.tensor for r in results if not r.passed]
    print(f"\n{'FAIL: ' + ', '.join(failed) if failed else 'PASS'}: relative error at most {LIMIT:g}\n")
    return 1 if failed else 0


def _run_of(args: argparse.Namespace) -> RunConfig:
    from .train.config import preset_run, read_run

    run = read_run(Path(args.config), args.preset) if args.config else preset_run(args.preset or "tiny")
    settings = _settings(args)
    if "steps" in settings:
        settings["warmup_steps"] = min(run.train.warmup_steps, settings["steps"] // 10)
    data = replace(run.data, files=tuple(args.data)) if args.data else run.data
    return replace(run, train=replace(run.train, **settings), data=data)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of [train]."""
    settings = {
        name: getattr(args, name)
        for name in ("steps", "batch_size", "seq_len", "learning_rate", "device", "seed", "memory_budget")
        if getattr(args, name) is not None
    }
    if args.dtype is not None:
        settings["dtype"] = DTYPES[args.dtype]
    return settings


def _train(args: argparse.Namespace) -> int:
    folder = Path(args.out or f"runs/{Path(args.config).stem if args.config else args.preset or 'tiny'}")
    if args.resume is None:
        return _follow(_run_of(args), folder)[1]
    from .train.folder import locate, own_run

    given = folder if args.resume is True else Path(args.resume)
    home, checkpoint = locate(given)
    if args.out and home.resolve() != folder.resolve():
        raise ValueError(f"out: got {folder}; accepted: the run's own, {home}, when resuming")
    return _follow(_resumed_run(args, own_run(home, checkpoint)), home, checkpoint or True)[1]


def _resumed_run(args: argparse.Namespace, own: RunConfig) -> RunConfig:
    """The run's own, with what the flags and the keys of --config say; what may not change is refused by name."""
    from .train.config import preset_run, read_run, read_toml, resumed

    asked: dict[str, dict[str, Any]] = {"model": {}, "train": {}, "data": {}}
    if args.config:
        plain = read_run(Path(args.config), args.preset).plain()
        for section, values in read_toml(Path(args.config)).items():
            names = plain[section] if "preset" in values else values
            asked[section] |= {name: plain[section][name] for name in names}
    if args.preset and preset_run(args.preset).model != own.model and not args.config:
        raise ValueError(f"preset: got {args.preset!r}; accepted: none when resuming, for the run has its own model")
    asked["train"] |= _settings(args)
    if args.data:
        asked["data"]["files"] = list(args.data)
    return resumed(own, asked)


def _follow(run: RunConfig, folder: Path, resume: Path | bool = False) -> tuple[RunResult | None, int]:
    """Train while a person watches. The result, None where a fault ended it, and the exit code: 0 only when it is done."""
    from .progress import watch
    from .train.folder import resume_command
    from .train.loop import RunEnded, train

    try:
        with watch() as show:
            result = train(run, folder, resume=resume, show=show)
    except RunEnded as error:
        _complain(error)
        return None, 1
    if result.stopped_by is None:
        _print_result(result)
        return result, 0
    try:
        _print_result(result)
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)
    _complain(f"stopped by {result.stopped_by}; go on with: {resume_command(folder)}")
    return result, 128 + signal.Signals[result.stopped_by]


def _complain(sentence: object) -> None:
    try:
        print(f"tilegrad: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Nothing reads it any more: what is left to be written goes nowhere, and fails nowhere, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print_result(result: RunResult) -> None:
    from .memory.page import human
    from .table import table

    rows: list[tuple[str, str]] = [
        ("steps", f"{result.steps:,}"),
        ("training loss", f"{result.train_loss:.4f}"),
        ("unigram entropy", f"{result.unigram_entropy:.4f}"),
        ("memory planned", f"{human(result.planned_bytes)}"),
        ("memory measured", f"{human(result.measured_bytes)}"),
    ]
    if result.validation_loss is not None:
        rows.insert(2, ("validation loss", f"{result.validation_loss:.4f}"))
    print(f"\n{table(('', 'result'), rows)}\n\nA sample:\n{result.sample}\n\nThe report: {result.report}")


def _demo(args: argparse.Namespace) -> int:
    from .train.config import preset_run

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
    from .model.config import ModelConfig
    from .model.generate import generate
    from .train.checkpoint import latest_checkpoint, load_checkpoint
    from .train.folder import own_tokenizer
    from .train.loop import decode_known

    folder = Path(args.run_folder)
    path = latest_checkpoint(folder / "checkpoints") if (folder / "checkpoints").exists() else None
    if path is None:
        raise ValueError(f"{folder}: got no checkpoint; accepted: the folder of a run (tilegrad train --out {folder})")
    checkpoint = load_checkpoint(path)
    tokenizer = own_tokenizer(folder, checkpoint.state)
    config = ModelConfig.from_dict(checkpoint.state["run"]["model"])
    prompt = [int(token) for token in tokenizer.encode(args.prompt)]
    options: dict[str, Any] = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    tokens = list(generate(config, checkpoint.tensors, prompt, args.max_tokens, **options))
    print(decode_known(tokenizer, prompt + tokens))
    return 0


def _plan(args: argparse.Namespace) -> int:
    import torch

    from .bench.document import document_table
    from .model.config import PRESETS as MODELS
    from .train.budget import choose_recompute, plan_model, step_report

    config, dtype, device = MODELS[args.preset], getattr(torch, DTYPES[args.dtype]), torch.device(args.device)
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
    print(f"\n{document_table()}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(build=args.build)


def _bench_memory(args: argparse.Namespace) -> int:
    from .bench.memory import bench_memory

    return bench_memory(json=args.json)


def _bench_training(args: argparse.Namespace) -> int:
    from .bench.training import CELLS, bench_training

    given = (args.dtype, args.batch_size, args.seq_len)
    if any(given) and not all(given):
        raise ValueError("one cell needs all of --dtype, --batch-size and --seq-len; accepted: all three, or none")
    cells = [(DTYPES[args.dtype], args.batch_size, args.seq_len)] if all(given) else CELLS
    out = Path(args.out) if args.out else None
    return bench_training(
        preset=args.preset, cells=cells, repeats=args.repeats, limit_s=args.limit_s, json=args.json, out=out
    )


def _bench_attention(args: argparse.Namespace) -> int:
    from .bench.attention import bench_attention

    return bench_attention(
        device=args.device, dtype=args.dtype, kernels=args.kernels, preset=args.preset, peers=args.peers,
        repeats=args.repeats, json=args.json, out=args.out, plot=args.plot, profile=args.profile, tune=args.tune,
        deterministic=args.deterministic, shapes=args.shape,
    )  # fmt: skip


def _add(commands: Commands, name: str, text: str, run: Command | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    return command


def _bytes(text: str) -> int:
    """1500000000, 1.5GB, 1400MiB."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; accepted: bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        ) from None


def _add_training(commands: Commands) -> None:
    _add(
        commands,
        "demo",
        "train the tiny model on the text that ships with the package, about 90 seconds on 2 cores",
        _demo,
    )
    train = _add(commands, "train", "train a model; a run is a folder with log, checkpoints and report", _train)
    train.add_argument("--config", metavar="FILE", help="a run as TOML, with sections [model], [train] and [data]")
    train.add_argument("--preset", choices=PRESETS, help="a model by name (default: tiny)")
    train.add_argument(
        "--data", nargs="+", metavar="FILE", help="UTF-8 text to learn from (default: Moby-Dick, shipped)"
    )
    train.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/NAME)")
    train.add_argument(
        "--resume", nargs="?", const=True, metavar="RUN",
        help="go on with the run in this folder (default: --out) from its newest checkpoint, or from the checkpoint given "
        "here; all else is the run's own, and of the flags only those may differ that change no past step",
    )  # fmt: skip
    for name, kind in (("steps", int), ("batch-size", int), ("seq-len", int), ("learning-rate", float), ("seed", int)):
        train.add_argument(
            f"--{name}", type=kind, metavar="N", help=f"instead of the configuration's {name.replace('-', '_')}"
        )
    train.add_argument("--device", help="cpu, cuda, cuda:1 …")
    train.add_argument("--dtype", choices=DTYPES, help="bf16 computes in bfloat16 with float32 master weights")
    train.add_argument(
        "--memory-budget", type=_bytes, metavar="BYTES", help="recompute what is needed to stay below, e.g. 1.5GB"
    )

    text = _add(commands, "generate", "let a trained model write", _generate)
    text.add_argument("run_folder", metavar="RUN", help="the folder of a run")
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

    plan = _add(commands, "plan", "every byte of a training step, with nothing allocated", _plan)
    plan.add_argument("--preset", choices=PRESETS, default="gpt2", help="a model by name (default: %(default)s)")
    plan.add_argument("--batch-size", type=int, default=1, metavar="N")
    plan.add_argument("--seq-len", type=int, metavar="N", help="default: the model's block_size")
    plan.add_argument("--dtype", choices=DTYPES, default="fp32", help="default: %(default)s")
    plan.add_argument("--device", default="cpu", help="default: %(default)s")
    plan.add_argument("--memory-budget", type=_bytes, metavar="BYTES", help="plan within these bytes by recomputing")
    plan.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    plan.add_argument("--json", action="store_true", help="the same as data")


def _add_checks(commands: Commands) -> None:
    check = _add(commands, "check", "compare kernels with whole matrices").add_subparsers(metavar="WHAT", required=True)
    flash = _add(check, "flash", "the specification's two cases of the FlashAttention-2 backward", _check_flash)
    flash.add_argument("--kernel", metavar="NAME", help="run this kernel instead of the one the table chooses")
    flash.add_argument("--device", default="cpu", help="where to run (default: %(default)s)")
    flash.add_argument("--brief", action="store_true", help="print only the comparison, not the matrices")

    gradcheck = _add(commands, "gradcheck", "check explicit gradients: of attention, or of a whole model", _gradcheck)
    gradcheck.add_argument("--preset", choices=PRESETS, help="a model by name, made small; without it, attention alone")
    gradcheck.add_argument(
        "--against", choices=("differences", "autograd"), default="differences", help="default: %(default)s"
    )
    gradcheck.add_argument(
        "--kernel", metavar="NAME", help="for attention: this kernel instead of the one the table chooses"
    )

    doctor = _add(commands, "doctor", "what this installation can run, and what to do where it can't", _doctor)
    doctor.add_argument("--build", action="store_true", help="compile the native CPU kernel (needs a C++ compiler)")

    bench = _add(commands, "bench", "measure, against the peers that are there").add_subparsers(
        metavar="WHAT", required=True
    )
    attention = _add(
        bench,
        "attention",
        "our kernels and the peers that are there, after a check against the oracle",
        _bench_attention,
    )
    attention.add_argument("--device", help="default: cuda where there is one, else cpu")
    attention.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default: %(default)s)")
    attention.add_argument("--kernels", nargs="+", metavar="NAME", help="default: those that run there")
    attention.add_argument(
        "--preset",
        metavar="NAME",
        help="which shapes: training, short, wide, window, gqa, varlen, decode, laptop, cpu or cpu-window",
    )
    attention.add_argument(
        "--shape",
        nargs="+",
        metavar="B,H,T,D[,causal]",
        help="these instead of a preset; behind D also window=N, hkv=N, tq=N",
    )
    attention.add_argument("--peers", nargs="*", metavar="NAME", help="default: all that are there; no name: none")
    attention.add_argument("--deterministic", action="store_true", help="the backward's deterministic mode")
    attention.add_argument(
        "--repeats", type=int, default=30, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    attention.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    attention.add_argument("--out", metavar="FILE", help="append the JSON lines to a file")
    attention.add_argument("--plot", metavar="FILE", help="draw bars (needs matplotlib)")
    attention.add_argument("--profile", action="store_true", help="each kernel's share of the device's limits")
    attention.add_argument("--tune", action="store_true", help="find the fastest tiles and write them into tiles.py")
    training = _add(bench, "training", "a whole step on the CPU against eager PyTorch", _bench_training)
    training.add_argument("--preset", choices=PRESETS, default="gpt2", help="default: %(default)s")
    training.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="pairs of steps per cell (default: %(default)s)"
    )
    training.add_argument(
        "--limit-s", type=float, default=150.0, metavar="S", help="for a process (default: %(default)s)"
    )
    training.add_argument("--dtype", choices=DTYPES, help="with --batch-size and --seq-len: this cell alone")
    training.add_argument("--batch-size", type=int, metavar="N")
    training.add_argument("--seq-len", type=int, metavar="N")
    training.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    training.add_argument("--out", metavar="FILE", help="write both to a file")
    memory = _add(bench, "memory", "what a buffer from the manager costs, against torch.empty", _bench_memory)
    memory.add_argument("--json", action="store_true", help="the same as data")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilegrad",
        description="Train transformers with exact, hand-derived backward passes, in memory planned to the byte.",
        epilog="tilegrad COMMAND --help says more of a command. docs/ and README.md say more of the rest.",
    )
    parser.add_argument("--version", action="version", version=f"tilegrad {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_training(commands)
    _add_checks(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    run: Command = args.run
    try:
        return run(args)
    except (ValueError, FileNotFoundError) as error:  # what a user gave is wrong, and the message says what is accepted
        _complain(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe went away, and nothing is left to say
        _silence(sys.stdout)
        return 1
    except OSError as error:  # a full disk, a folder that may not be written
        _complain(error)
        return 1
