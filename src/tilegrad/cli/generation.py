"""`tilegrad generate` and `tilegrad chat`: text from a trained model."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import DTYPES, Commands, Parser, add_command, add_dtype, add_model, which_weights
from .faults import complain

if TYPE_CHECKING:
    from ..training.api import TrainedModel
    from ..training.chat import Chat
    from ..training.generated import Generated
    from ..training.generation import Generation, ModelSettings

_COMMAND = re.compile("/[a-z]+")
PROMPT = "Call me "  # the default prompt of `tilegrad generate`
_PROGRESS_S = 5.0  # seconds between two lines of progress


def _generate(args: argparse.Namespace) -> int:
    from ..training.generation import Generation

    if args.logprobs and not args.json:
        raise ValueError("logprobs: got --logprobs without --json; accepted: both, because only JSON has them")
    prompts = _prompts(args)
    generation = Generation(
        _load(args),
        prompts,
        max_tokens=args.max_tokens,
        stop=args.stop or (),
        eos=not args.no_eos,
        num_samples=args.num_samples,
        batch_size=args.batch_size,
        **_settings(args),
    )
    if generation.warning is not None:
        complain(generation.warning)
    started_at = time.perf_counter()
    streamed = generation.sequences == 1 and not args.json
    tokens = _stream(generation) if streamed else _print_all(generation, args)
    if args.verbose:
        seconds = time.perf_counter() - started_at
        complain(f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.1f} tokens/s")
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts from the command line, from a file or from stdin."""
    arguments = {"PROMPT": args.text or None, "--prompt": args.prompt, "--prompt-file": args.prompt_file}
    sources = {name: value for name, value in arguments.items() if value is not None}
    if len(sources) > 1:
        a, b, *_ = sources.items()
        raise ValueError(f"prompt: got {_quoted(*a)} and {_quoted(*b)}; accepted: one of them")
    if args.prompt_file is not None:
        return _lines(args.prompt_file)
    words: list[str] = args.text or [PROMPT if args.prompt is None else args.prompt]
    if words.count("-") > 1:
        raise ValueError("prompt: got '-', which reads stdin, more than once; accepted: once")
    return [_read_stdin() if word == "-" else word for word in words]


def _quoted(name: str, value: str | list[str]) -> str:
    words = shlex.join(value) if isinstance(value, list) else value
    return repr(words) if name == "PROMPT" else f"{name} {words!r}"


def _lines(name: str) -> list[str]:
    """The lines of a file, each a prompt; - is stdin."""
    from ..text.untrusted import decoded

    text = _read_stdin() if name == "-" else decoded(Path(name))
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    empty = next((number for number, line in enumerate(lines, 1) if not line), None)
    if empty is not None:
        raise ValueError(f"{name}: got no text in line {empty}; accepted: a prompt in each line")
    return lines


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: got bytes with {error.reason}; accepted: text in {error.encoding}") from error


def _stream(generation: Generation) -> int:
    """Print the prompt, and its continuation as tokens are drawn. Returns the number of drawn tokens."""
    print(generation.prompts[0], end="", flush=True)
    tokens = 0
    try:
        for tokens, piece in enumerate(generation.pieces(), 1):  # noqa: B007, counted
            print(piece.text, end="", flush=True)
    finally:  # after Ctrl-C too, so that the text ends with a newline
        print(flush=True)
    return tokens


def _print_all(generation: Generation, args: argparse.Namespace) -> int:
    """Print the sequences in order, each once all sequences before it are complete. Returns the number of drawn tokens."""
    from .progress import watch

    out = None if sys.stdout.isatty() else sys.stdout  # None: print to sys.stdout, which the bar replaces
    tokens, started_at, shown_at = 0, time.perf_counter(), time.perf_counter()
    several = generation.sequences > 1
    with watch(sys.stderr) as show:
        if several and sys.stderr.isatty():
            show("generate", {"sequence": 0, "sequences": generation.sequences, "tokens": 0, "tokens_per_second": 0.0})
        for number, generated in enumerate(generation.results(logprobs=args.logprobs), 1):
            tokens += len(generated.tokens)
            print(_as_json(generated) if args.json else _as_text(generated, number, generation), file=out, flush=True)
            now = time.perf_counter()
            if several and (sys.stderr.isatty() or now - shown_at > _PROGRESS_S):
                shown_at = now
                rate = tokens / (now - started_at)
                numbers = {"sequence": number, "sequences": generation.sequences, "tokens_per_second": rate}
                show("generate", numbers | {"tokens": tokens})
    return tokens


def _as_json(generated: Generated) -> str:
    content = asdict(generated)
    if generated.logprobs is None:
        del content["logprobs"]
    return json.dumps(content)  # this is ASCII, which every encoding of stdout has


def _as_text(generated: Generated, number: int, generation: Generation) -> str:
    return f"── {number} of {generation.sequences} ──\n{generated.prompt}{generated.text}"


def _chat(args: argparse.Namespace) -> int:
    from ..training.chat import Chat

    if args.once is not None and not args.once.strip():
        raise ValueError(f"once: got {args.once!r}; accepted: a text")
    chat = Chat(_load(args), system=args.system, max_tokens=args.max_tokens, **_settings(args))
    if args.once is not None:
        _answer(chat, args.once)
        return 0
    interactive = sys.stdin.isatty()
    if interactive:
        print("/exit or Ctrl-D ends the conversation, /reset begins another, /system TEXT changes the system message.")
    while (line := _read_line("> " if interactive else "")) not in (None, "/exit"):
        command, _, rest = line.partition(" ")
        if line == "/reset":
            chat.reset()
        elif command == "/system":
            chat.system = rest.strip() or None
        elif _COMMAND.fullmatch(command):
            complain(f"{line}: no such command; accepted: /reset, /system TEXT, /exit")
        elif line:
            try:
                _answer(chat, line)
            except ValueError as error:
                complain(error)
    return 0


def _answer(chat: Chat, text: str) -> None:
    try:
        for piece in chat.answer(text):
            if chat.dropped is not None:
                complain(chat.dropped)
                chat.dropped = None
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
        raise
    print()
    if chat.cut is not None:
        complain(chat.cut)


def _read_line(prompt: str) -> str | None:
    """A line of input without spaces around it; None at the end of the input."""
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
        raise ValueError(f"input: got bytes with {error.reason}; accepted: text in {error.encoding}") from error


def _load(args: argparse.Namespace) -> TrainedModel:
    from ..training.api import load

    model = load(args.run_folder, **which_weights(args))
    if model.weights != "raw":
        complain(f"weights: {model.weights}")
    return model


def _settings(args: argparse.Namespace) -> ModelSettings:
    """The settings that `generate` and `chat` have in common."""
    from ..engine.machine import device_or_default

    return {
        "device": device_or_default(args.device),
        "dtype": args.dtype,
        "invariant": args.invariant,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "seed": args.seed,
    }


def add_generation(commands: Commands) -> None:
    generate = add_command(commands, "generate", "generate text with a trained model", _generate)
    add_model(generate)
    text = f"texts to continue; - reads stdin (default: {PROMPT!r})"
    generate.add_argument("text", nargs="*", metavar="PROMPT", help=text)
    generate.add_argument("--prompt", metavar="TEXT", help="same as one PROMPT")
    generate.add_argument("--prompt-file", metavar="FILE", help="a file with a prompt in each line; - reads stdin")
    text = "most new tokens of a sequence (default: %(default)s)"
    generate.add_argument("--max-tokens", type=int, default=80, metavar="N", help=text)
    text = "sequences for each prompt (default: %(default)s)"
    generate.add_argument("--num-samples", type=int, default=1, metavar="N", help=text)
    generate.add_argument("--batch-size", type=int, metavar="N", help="sequences at a time (default: at most 32)")
    text = "end a sequence before this text; may be given several times"
    generate.add_argument("--stop", action="append", metavar="TEXT", help=text)
    text = "continue after a token that ends a text (default: end before it)"
    generate.add_argument("--no-eos", action="store_true", help=text)
    generate.add_argument("--json", action="store_true", help="print a line of JSON for each sequence")
    generate.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each token")
    generate.add_argument("--verbose", action="store_true", help="print tokens per second, on stderr")
    _add_sampling(generate)

    chat = add_command(commands, "chat", "talk with a model, using its tokenizer's chat template", _chat)
    add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message, which comes before your first message")
    chat.add_argument("--once", metavar="PROMPT", help="answer this message and exit")
    text = "most tokens of an answer (default: as many as fit in the context)"
    chat.add_argument("--max-tokens", type=int, metavar="N", help=text)
    _add_sampling(chat)


def _add_sampling(command: Parser) -> None:
    for flag, default, text in (
        ("--temperature", 0.8, "0 = always the likeliest token"),
        ("--top-p", 1.0, "sample only from the likeliest tokens whose total probability reaches X"),
        ("--min-p", 0.0, "sample only from tokens with at least X times the largest probability"),
        ("--repetition-penalty", 1.0, "above 1: tokens that the text already contains are less likely"),
    ):
        command.add_argument(flag, type=float, default=default, metavar="X", help=f"{text} (default: %(default)s)")
    command.add_argument("--top-k", type=int, metavar="N", help="sample only from the N likeliest tokens")
    text = "the same seed gives the same text (default: %(default)s)"
    command.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    command.add_argument("--device", help="where to run (default: cuda if there is a GPU, else cpu)")
    add_dtype(
        command, "compute in this dtype (default: bfloat16 on CUDA, else the dtype of the weights)", choices=DTYPES
    )
    command.add_argument("--invariant", action="store_true", help="the same bits in any batch and in training; slower")
