"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ..text.spelling import did_you_mean, dtype_name
from ..training.keys import flag_value, keys
from .faults import said_already

if TYPE_CHECKING:
    from ..training.config import Values
    from ..training.ranks import Sharding

Command = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
PRESETS = ("tiny", "gpt2", "gpt2-medium", "gpt2-xl", "llama-135m")  # those of model/config.py, which imports torch
DTYPES = ("float32", "float64", "bfloat16")  # the dtypes of a model
_SHORT = ("steps", "batch_size", "seq_len", "learning_rate", "device", "dtype", "seed", "memory_budget", "init", "log")
SHORT = {"model.preset": "--preset", "data.files": "--data"}  # short flags of keys that are often set
SHORT |= {f"train.{name}": f"--{name.replace('_', '-')}" for name in _SHORT}

SEVERAL = {"data.files": "FILE", "train.freeze": "PATTERN", "lora.layers": "NAME"}  # flags of one or more words


class Parser(argparse.ArgumentParser):
    """Suggests the nearest command, choice or flag for a misspelt one."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), [str(choice) for choice in action.choices or ()])
            raise

    def error(self, message: str) -> NoReturn:
        """Exit as argparse does. With several ranks, only the first rank that fails prints the message."""
        if not said_already(f"{self.prog}: {message}"):
            super().error(message)
        self.exit(2)

    def take_words(self, args: argparse.Namespace, unknown: Sequence[str]) -> list[str]:
        """Give words after a flag to the argument that takes any number of words, because argparse gives it only words before
        the first flag. Returns all other words."""
        several = [action.dest for action in self._actions if action.nargs == "*" and not action.option_strings]
        if not several:
            return [*unknown]
        flags = [word for word in unknown if word.startswith("-") and word != "-"]
        setattr(args, several[0], [*getattr(args, several[0]), *(word for word in unknown if word not in flags)])
        return flags

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with a sentence about arguments that this command does not have."""
        flags = {name: name for action in self._actions for name in action.option_strings}
        short = {name.rpartition(".")[2]: name for name in flags}  # n_layer → --model.n_layer
        words = [f"{word}{did_you_mean(word.partition('=')[0], short | flags)}" for word in unknown]
        self.error(f"unrecognized arguments: {' '.join(words)}")


def add_command(commands: Commands, name: str, text: str, run: Command | None = None) -> Parser:
    command: Parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run, parser=command)
    return command


def add_dtype(
    command: argparse._ActionsContainer, text: str, *, default: str | None = None, choices: Sequence[str] | None = None
) -> None:
    """Add --dtype, which accepts torch's names and short ones: bf16, fp32."""
    command.add_argument("--dtype", type=dtype_name, help=text, default=default, choices=choices)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the model that a command reads: RUN, --best, --init, --no-averaged and --average."""
    text = "the folder of a run, a checkpoint in it, or a folder of weights"
    command.add_argument("run_folder", metavar="RUN", help=text)
    text = "the checkpoint with the lowest validation loss, not the newest"
    command.add_argument("--best", action="store_true", help=text)
    text = "the folder with the weights that the run's adapters were trained on, if it has moved"
    command.add_argument("--init", type=Path, metavar="DIR", help=text)
    text = "use the weights themselves, not their average (optimizer.ema)"
    command.add_argument("--no-averaged", dest="averaged", action="store_false", help=text)
    text = "use the mean of the weights of the run's newest N checkpoints"
    command.add_argument("--average", type=int, metavar="N", help=text)


def which_weights(args: argparse.Namespace) -> dict[str, Any]:
    """The choices that `add_model` adds."""
    return {name: getattr(args, name) for name in ("best", "init", "averaged", "average")}


def add_keys(command: argparse.ArgumentParser) -> None:
    """Add FILE, a run as TOML, and one flag for each key."""
    command.usage = f"{command.prog} [FILE] [--SECTION.KEY X ...] [options]"
    text = "a run as TOML; `tilegrad init FILE` writes one to begin with"
    command.add_argument("config", nargs="?", metavar="FILE", help=text)
    add_key_flags(command)


def add_key_flags(command: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add one flag for each key."""
    group = command.add_argument_group(
        "keys of a run",
        "each overrides the same key in FILE, and some have a short name; defaults are those of the preset tiny",
    )
    for key in keys():
        name = f"{key.section}.{key.name}"
        if name in without:
            continue
        names = (f"--{name}", SHORT[name]) if name in SHORT else (f"--{name}",)
        text = f"{key.meaning} (default: {key.default})"
        if name in SEVERAL:
            group.add_argument(*names, dest=name, nargs="+", metavar=SEVERAL[name], help=text)
        else:
            group.add_argument(*names, dest=name, type=flag_value, metavar="X", help=text)


def given_keys(args: argparse.Namespace) -> dict[str, Values]:
    """The keys that FILE and the flags give, by section; a flag overrides FILE."""
    from ..training.sections import read_toml

    content = read_toml(Path(args.config)) if args.config else {}
    for name, value in vars(args).items():
        section, dot, key = name.partition(".")
        if dot and value is not None:
            content[section] = {**content.get(section, {}), key: value}
    return content


def add_ranks(command: argparse.ArgumentParser) -> None:
    """Add the flags for several ranks, which torchrun starts."""
    text = "which tensors are sharded over the ranks of torchrun (default: %(default)s)"
    command.add_argument("--shard", choices=("none", "optimizer", "all"), default="optimizer", help=text)
    text = "MiB of gradients that one collective sums; affects rounding (default: %(default)s)"
    command.add_argument("--bucket-mb", type=float, default=64, metavar="MIB", help=text)
    text = "ranks that share each sequence, for models with rope (default: %(default)s)"
    command.add_argument("--context", type=int, default=1, metavar="N", help=text)


def sharding_of(args: argparse.Namespace) -> Sharding:
    if not 0 < args.bucket_mb <= 1 << 20:
        raise ValueError(f"bucket-mb: got {args.bucket_mb:g}; accepted: MiB, more than 0 and at most 2²⁰")
    return {"shard": args.shard, "bucket_bytes": int(args.bucket_mb * 2**20), "context": args.context}
