"""The command line. Each command parses its arguments and calls one package. torch is imported when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .. import __version__
from .arguments import Command, Parser
from .benches import add_benches
from .checks import add_checks
from .data import add_data
from .evaluation import add_evaluation
from .faults import complain, escape_what_cannot_be_shown, silence
from .generation import add_generation
from .memory import add_memory
from .runs import add_runs
from .weights import add_weights

# Every error that torch raises when memory runs out, on a CPU or on CUDA, contains one of these.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def build_parser() -> Parser:
    parser = Parser(
        prog="tilegrad",
        description="Train transformers with exact, hand-derived backward passes, in memory planned to the byte.",
        epilog="`tilegrad COMMAND --help` describes a command. README.md and docs/ describe everything else.",
    )
    parser.add_argument("--version", action="version", version=f"tilegrad {__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    add_runs(commands)
    add_data(commands)
    add_generation(commands)
    add_evaluation(commands)
    add_weights(commands)
    add_memory(commands)
    add_checks(commands)
    add_benches(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    escape_what_cannot_be_shown()
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    unknown = args.parser.take_words(args, unknown)
    if unknown:
        args.parser.refuse(unknown)
    run: Command | None = args.run
    if run is None:
        parser.print_help()
        return 0
    try:
        if getattr(args, "device", None) is not None:
            from ..engine.machine import check_device

            check_device(args.device)
        return run(args)
    except (ValueError, FileNotFoundError) as error:  # a wrong argument or file; the message says what is accepted
        complain(error)
        return 2
    except ImportError as error:  # a package is missing; a missing module of tilegrad is a bug
        if (error.name or "").startswith("tilegrad"):
            raise
        missing = f"{error.name}: not installed; pip install {error.name}"
        complain(missing if isinstance(error, ModuleNotFoundError) and error.name else error)
        return 2
    except (MemoryError, RuntimeError) as error:
        from ..training.config import RunEnded

        if isinstance(error, RunEnded):
            complain(error)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            complain("memory: not enough for these sizes; use a smaller batch_size, seq_len or model")
        else:
            raise
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has closed it
        silence(sys.stdout)
        return 1
    except OSError as error:  # a full disk, or a folder without write permission
        complain(error)
        return 1
