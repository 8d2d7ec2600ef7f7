"""The command line: each command parses its arguments and makes one call. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from . import __version__

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _check_flash(args: argparse.Namespace) -> int:
    from .check import check_flash

    return 0 if check_flash(args.kernel, args.device, matrices=not args.brief) else 1


def _gradcheck(args: argparse.Namespace) -> int:
    from .gradcheck import LIMIT, check_attention, gradient_table

    results = check_attention(args.kernel)
    print("Gradients of attention against float64 central differences\n")
    print(gradient_table(results))
    failed = [r.tensor for r in results if not r.passed]
    print(f"\n{'FAIL: ' + ', '.join(failed) if failed else 'PASS'}: relative error at most {LIMIT:g}\n")
    return 1 if failed else 0


def _demo(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    print("Training comes in a later version; until then this shows what stands: the attention op and its gradients.\n")
    codes = [
        _check_flash(argparse.Namespace(kernel=None, device="cpu", brief=False)),
        _gradcheck(argparse.Namespace(kernel=None)),
    ]
    print(f"{'Everything passed' if not any(codes) else 'Something FAILED'} in {time.perf_counter() - start:.1f} s.")
    return max(codes)


def _add(commands: Commands, name: str, text: str, run: Command | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    return command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilegrad",
        description="Train transformers with exact, hand-derived backward passes, in memory planned to the byte.",
        epilog="tilegrad COMMAND --help says more of a command. docs/ and README.md say more of the rest.",
    )
    parser.add_argument("--version", action="version", version=f"tilegrad {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    _add(commands, "demo", "the main job in a minute or two, nothing needed from outside", _demo)

    check = _add(commands, "check", "compare kernels with whole matrices").add_subparsers(metavar="WHAT", required=True)
    flash = _add(check, "flash", "the specification's two cases of the FlashAttention-2 backward", _check_flash)
    flash.add_argument("--kernel", metavar="NAME", help="run this kernel instead of the one the table chooses")
    flash.add_argument("--device", default="cpu", help="where to run (default: %(default)s)")
    flash.add_argument("--brief", action="store_true", help="print only the comparison, not the matrices")

    gradcheck = _add(commands, "gradcheck", "check explicit gradients against float64 central differences", _gradcheck)
    gradcheck.add_argument("--kernel", metavar="NAME", help="run this kernel instead of the one the table chooses")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    run: Command = args.run
    try:
        return run(args)
    except ValueError as error:  # what a user gave is wrong, and the message says what is accepted
        print(f"tilegrad: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
