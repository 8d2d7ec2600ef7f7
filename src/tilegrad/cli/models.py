"""`tilegrad generate`, `chat` and `evaluate`: what a trained model does."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from .arguments import DTYPES, Commands, Parser, add_command, add_dtype, add_init
from .faults import complain

if TYPE_CHECKING:
    from ..training.chat import Chat

PROMPT = "Call me "  # the default of generate


def _generate(args: argparse.Namespace) -> int:
    from ..model.generate import WindowSlides
    from ..training.api import load

    if args.text is not None and args.prompt is not None:
        raise ValueError(f"prompt: got {args.text!r} and --prompt {args.prompt!r}; accepted: one of them")
    prompt = next((given for given in (args.text, args.prompt) if given is not None), PROMPT)
    model = load(args.run_folder, best=args.best, init=args.init)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WindowSlides)
        text = model.generate(
            prompt,
            args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
        )
    for warning in caught:
        complain(warning.message)
    print(text)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from ..training.api import load
    from ..training.chat import Chat, ContextFull

    if args.once is not None and not args.once.strip():
        raise ValueError(f"once: got {args.once!r}; accepted: a text")
    chat = Chat(
        load(args.run_folder, best=args.best, init=args.init),
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    if args.once is not None:
        _answer(chat, args.once)
        return 0
    by_hand = sys.stdin.isatty()
    if by_hand:
        print("/exit or Ctrl-D ends the conversation, /clear begins another.")
    while (line := _read_line("> " if by_hand else "")) not in (None, "/exit"):
        if line == "/clear":
            chat.clear()
        elif line:
            try:
                _answer(chat, line)
            except ContextFull as error:
                complain(f"{error}; /clear begins another conversation")
    return 0


def _answer(chat: Chat, text: str) -> None:
    try:
        for piece in chat.answer(text):
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
        raise
    print()
    if chat.cut is not None:
        complain(chat.cut)


def _read_line(prompt: str) -> str | None:
    """A line without spaces around it; None at the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401, input() then has arrow keys and a history
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt) as end:
        if prompt:
            print()  # so that the shell's prompt begins a new line
        if isinstance(end, KeyboardInterrupt):
            raise
        return None
    except UnicodeDecodeError as error:
        raise ValueError(f"input: got bytes that are not {error.encoding}: {error.reason}") from error


def _evaluate(args: argparse.Namespace) -> int:
    from ..text.table import table
    from ..training.api import evaluate
    from .progress import watch

    with watch(sys.stderr if args.json else sys.stdout) as show:
        found = evaluate(
            args.run_folder,
            args.data or (),
            best=args.best,
            init=args.init,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            device=args.device,
            dtype=args.dtype,
            show=lambda event, numbers: None if args.json and event == "data" else show(event, numbers),
        )
    if args.json:
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in asdict(found).items()}
        print(json.dumps(finite, indent=1))
        return 0
    rows = [("loss", f"{found.loss:.4f}")]
    if found.perplexity is not None:
        rows.append(("perplexity", f"{found.perplexity:,.2f}"))
    if found.bits_per_byte is not None:
        rows.append(("bits per byte", f"{found.bits_per_byte:.4f}"))
    if found.bytes is not None:
        rows.append(("bytes", f"{found.bytes:,}"))
    rows += [("tokens", f"{found.tokens:,}"), ("seconds", f"{found.seconds:.1f}")]
    print(table(("", "result"), rows))
    return 0


def add_models(commands: Commands) -> None:
    text = add_command(commands, "generate", "generate text with a trained model", _generate)
    _add_model(text)
    text.add_argument("text", nargs="?", metavar="PROMPT", help="the same as --prompt")
    text.add_argument("--prompt", help=f"the text to continue (default: {PROMPT!r})")
    text.add_argument(
        "--max-tokens", type=int, default=80, metavar="N", help="tokens to generate (default: %(default)s)"
    )
    text.add_argument(
        "--ignore-eos", action="store_true", help="continue after a token that ends a text (default: end before it)"
    )
    _add_sampling(text)

    chat = add_command(commands, "chat", "talk with a model, by its tokenizer's chat template", _chat)
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message, before the first of yours")
    chat.add_argument("--once", metavar="PROMPT", help="answer this and end")
    chat.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens of an answer (default: as many as the context has room for)"
    )
    _add_sampling(chat)

    evaluate = add_command(commands, "evaluate", "loss, perplexity and bits per byte of a model on any text", _evaluate)
    _add_model(evaluate)
    evaluate.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="text files and folders (default: what the run holds out for validation)",
    )
    evaluate.add_argument("--batch-size", type=int, metavar="N", help="windows in a batch (default: the run's)")
    evaluate.add_argument("--seq-len", type=int, metavar="N", help="tokens in a window (default: the run's)")
    evaluate.add_argument("--device", help="default: cuda where there is one, else cpu")
    add_dtype(evaluate, "default: the run's; for a folder of weights bfloat16 on CUDA, else float32", choices=DTYPES)
    evaluate.add_argument("--json", action="store_true", help="JSON instead of the table")


def _add_model(command: Parser) -> None:
    command.add_argument(
        "run_folder", metavar="RUN", help="the folder of a run, a checkpoint in it, or a folder of weights"
    )
    command.add_argument(
        "--best", action="store_true", help="the weights of the lowest validation loss, not the newest"
    )
    add_init(command)


def _add_sampling(command: Parser) -> None:
    command.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="0 = always the likeliest token (default: %(default)s)",
    )
    command.add_argument("--top-k", type=int, metavar="N", help="sample only from the N likeliest tokens")
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (default: %(default)s)"
    )
