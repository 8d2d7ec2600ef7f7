"""A run, as a TOML file says it: sections [model], [train] and [data]. A key that is none of these is an error.

[model]
preset = "tiny"          # any ModelConfig, changed by the keys that follow
n_layer = 6
[train]
steps = 2000
[data]
files = ["book.txt"]     # none: the text that ships with the package

`example.toml` has every key. A run says nothing of ranks: the same file gives the same training on any number of them. What
is not given is the preset's, and five keys follow others:

    gradient_accumulation   the number of ranks, under torchrun
    seq_len        block_size
    warmup_steps   steps / 20, where steps is given
    dtype          bfloat16 on CUDA, float32 elsewhere
    vocab_size     the tokenizer's, where it is larger than the preset's

Sizes are bounded by LIMITS, and checked before anything is allocated for them.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

from ..engine.batch import LIMITS as BATCH_LIMITS
from ..model.config import LIMITS as MODEL_LIMITS
from ..model.config import PRESETS, ModelConfig, is_count
from ..model.layer import Linear
from ..text.spelling import did_you_mean, dtype_name
from ..text.untrusted import check_values, decoded, regular_file, shown, too_deep

MAY_CHANGE = frozenset({  # of [train], when a run goes on: the schedule's ends, what is said and kept, where it runs
    "steps", "learning_rate", "min_learning_rate", "eval_interval", "eval_batches", "checkpoint_interval",
    "keep_checkpoints", "log_interval", "sample_tokens", "memory_budget", "device",
})  # fmt: skip
_COUNTS = (  # of steps, or of what is done every few of them
    "steps", "warmup_steps", "eval_interval", "eval_batches", "checkpoint_interval", "keep_checkpoints", "log_interval",
    "sample_tokens",
)  # fmt: skip
LIMITS = {  # the largest of each key; docs/training.md gives the reasons
    **MODEL_LIMITS, **BATCH_LIMITS, **dict.fromkeys(_COUNTS, 10**9), "gradient_accumulation": 1 << 16,
    "seed": (1 << 63) - 1, "bpe_vocab_size": MODEL_LIMITS["vocab_size"],
}  # fmt: skip
MAX_STEP_TOKENS = 1 << 26  # of all micro-batches, whose tokens and targets are in memory together, 16 bytes each
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`gradient_accumulation` micro-batches of `batch_size`, counted over all ranks, make a step. Intervals are in steps, 0 =
    never. seq_len=0: the model's block_size, once it is in a RunConfig. warmup_steps=-1: a twentieth of the steps.
    dtype="auto": bfloat16 on CUDA, float32 elsewhere."""

    steps: int = 1000
    batch_size: int = 16
    seq_len: int = 0
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = -1
    weight_decay: float = 0.1
    max_norm: float = 1.0
    eval_interval: int = 100
    eval_batches: int = 8
    checkpoint_interval: int = 250
    keep_checkpoints: int = 3
    log_interval: int = 10
    sample_tokens: int = 100
    memory_budget: int | None = None
    device: str = "cpu"
    dtype: str = "auto"
    linear: Linear = "plain"
    deterministic: bool = True
    seed: int = 0
    init: str | None = None  # weights.py

    def __post_init__(self) -> None:
        if self.init is not None and not isinstance(self.init, str):
            raise ValueError(f"init: got {self.init!r}; accepted: None, or the name of a folder of weights")
        for name in ("steps", "batch_size", "gradient_accumulation", "keep_checkpoints", "log_interval"):
            _check_count(name, getattr(self, name), 1)
        if self.warmup_steps == -1 and not isinstance(self.warmup_steps, bool | float):
            object.__setattr__(self, "warmup_steps", self.steps // 20)
        elif not is_count(self.warmup_steps, LIMITS["warmup_steps"], 0):
            raise ValueError(
                f"warmup_steps: got {shown(self.warmup_steps)}; accepted: an int ≥ 0, or -1: a twentieth of the steps"
            )
        for name in ("seq_len", "eval_interval", "eval_batches", "checkpoint_interval", "sample_tokens", "seed"):
            _check_count(name, getattr(self, name), 0)
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "max_norm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: got {shown(value)}; accepted: a finite number ≥ 0")
        budget = self.memory_budget
        if budget is not None and not is_count(budget, 1 << 63):
            raise ValueError(f"memory_budget: got {shown(budget)}; accepted: None or a number of bytes ≥ 1")
        if not isinstance(self.device, str):
            raise ValueError(f"device: got {self.device!r}; accepted: cpu, cuda, or cuda:N")
        if not isinstance(self.dtype, str | torch.dtype) or (name := dtype_name(self.dtype)) not in ("auto", *DTYPES):
            raise ValueError(f"dtype: got {self.dtype!r}; accepted: 'auto', {', '.join(map(repr, DTYPES))}")
        automatic = "bfloat16" if self.device.startswith("cuda") else "float32"
        object.__setattr__(self, "dtype", automatic if name == "auto" else name)
        if self.linear not in get_args(Linear):
            raise ValueError(f"linear: got {self.linear!r}; accepted: 'plain' or 'fp8'")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic: got {self.deterministic!r}; accepted: True or False")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps: got {self.warmup_steps}; accepted: less than steps, {self.steps}")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Text files and folders, one after the other; none: the text that ships with the package. validation="windows" draws
    windows from the whole text, "end" takes its last tokens."""

    files: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 4096
    validation_fraction: float = 0.1
    validation: str = "windows"
    text_field: str = "text"

    def __post_init__(self) -> None:
        if not isinstance(self.files, list | tuple) or not all(isinstance(name, str) for name in self.files):
            given: object = self.files
            such = [given] if isinstance(given, str) else ["a.txt", "b.txt"]
            raise ValueError(f"files: got {given!r}; accepted: names of files, such as {such}")
        named = isinstance(self.tokenizer, str) and self.tokenizer.endswith(".json")
        if self.tokenizer not in ("bytes", "bpe") and not named:
            raise ValueError(f"tokenizer: got {self.tokenizer!r}; accepted: 'bytes', 'bpe', or a tokenizer.json")
        if not is_count(self.bpe_vocab_size, LIMITS["bpe_vocab_size"], 256):
            most = LIMITS["bpe_vocab_size"]
            raise ValueError(
                f"bpe_vocab_size: got {shown(self.bpe_vocab_size)}; accepted: an int ≥ 256, the bytes, at most {most:,}"
            )
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise ValueError(f"validation_fraction: got {fraction!r}; accepted: at least 0 and less than 1")
        if self.validation not in ("windows", "end"):
            raise ValueError(f"validation: got {self.validation!r}; accepted: 'windows' or 'end'")
        if not isinstance(self.text_field, str):
            raise ValueError(f"text_field: got {shown(self.text_field)}; accepted: the name of a field")
        object.__setattr__(self, "files", tuple(self.files))

    @property
    def vocab_size(self) -> int:
        """The tokenizer's; of a file it is known when the file is read."""
        return {"bytes": 256, "bpe": self.bpe_vocab_size}.get(self.tokenizer, 1)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All of a run: the model's shape, how it is trained, and on which data. docs/training.md lists every key. What does not
    fit together raises when it is made.

    >>> import tilegrad
    >>> tilegrad.RunConfig().train.seq_len == tilegrad.RunConfig().model.block_size
    True
    """

    model: ModelConfig = field(default_factory=lambda: PRESETS["tiny"])
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.train.seq_len == 0:
            object.__setattr__(self, "train", replace(self.train, seq_len=self.model.block_size))
        if self.model.vocab_size < self.data.vocab_size:
            raise ValueError(
                f"vocab_size: got {self.model.vocab_size}; accepted: at least the tokenizer's, {self.data.vocab_size}"
            )
        if self.train.seq_len > self.model.block_size:
            raise ValueError(
                f"seq_len: got {self.train.seq_len}; accepted: at most block_size, {self.model.block_size}"
            )
        t = self.train
        tokens = t.gradient_accumulation * t.batch_size * t.seq_len
        if tokens > MAX_STEP_TOKENS:
            got = f"{t.gradient_accumulation:,} × {t.batch_size:,} × {t.seq_len:,}, {tokens:,} tokens in a step"
            raise ValueError(
                f"gradient_accumulation × batch_size × seq_len: got {got}; accepted: at most {MAX_STEP_TOKENS:,}"
            )

    def plain(self) -> dict[str, Any]:
        """As JSON and TOML have it; `run_from` reads the same run from it."""
        return {section: _plain(values) for section, values in asdict(self).items()}


class RunEnded(RuntimeError):
    """A run that could not go on. The message says why, what is saved, and how to resume."""


def preset_run(name: str) -> RunConfig:
    """The settings that go with a preset: `tiny` is the demo's."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset: got {name!r}; accepted: {', '.join(PRESETS)}")
    model = PRESETS[name]
    if name == "tiny":
        settings = TrainConfig(
            steps=640, batch_size=8, learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=30,
            eval_interval=100, eval_batches=12, checkpoint_interval=200, log_interval=20,
        )  # fmt: skip
        return RunConfig(model, settings)
    settings = TrainConfig(steps=10_000, batch_size=8, learning_rate=6e-4, min_learning_rate=6e-5)
    return RunConfig(model, settings, DataConfig(tokenizer="bpe", bpe_vocab_size=8192))


def initial_run(folder: Path) -> RunConfig:
    """Fine-tuning of the weights in `folder`: its model and tokenizer, small steps, windows of 512 tokens at most."""
    from ..pretrained.weights import open_weights  # loaded when weights are asked for

    source = open_weights(folder)
    if source.tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'}: no such file; accepted: weights with their tokenizer")
    settings = TrainConfig(
        steps=200, batch_size=4, seq_len=min(512, source.config.block_size), learning_rate=2e-5, min_learning_rate=2e-6,
        eval_interval=50, init=str(folder),
    )  # fmt: skip
    return RunConfig(source.config, settings, DataConfig(tokenizer=str(source.tokenizer)))


def read_run(path: Path) -> RunConfig:
    """A run from its TOML file."""
    return run_from(read_toml(path), str(path))


def read_toml(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such configuration; `tilegrad init {path}` writes one to begin with")
    text = decoded(regular_file(path, "a configuration as TOML; text to learn from goes behind --data"))
    try:
        content = tomllib.loads(text)
    except RecursionError as error:
        raise too_deep(text, str(path)) from error
    except ValueError as error:
        raise ValueError(f"{path}: is not TOML: {error}; text to learn from goes behind --data") from error
    check_values(content, str(path), text)
    return content


def run_from(content: Mapping[str, Mapping[str, Any]], where: str) -> RunConfig:
    """A run from what a TOML file or flags say of it, by section. What they don't say is the preset's, or tiny's."""
    given = checked(content, where)
    model, settings, data = given["model"], given["train"], given["data"]
    base = preset_run(model.pop("preset", "tiny"))
    if isinstance(settings.get("init"), str) and "n_layer" not in model:  # a saved run says all of its model
        base = initial_run(Path(settings["init"]))
    text = replace(base.data, **data)
    model.setdefault("vocab_size", max(base.model.vocab_size, text.vocab_size))
    if "block_size" in model:
        settings.setdefault("seq_len", 0)
    if "steps" in settings:
        settings.setdefault("warmup_steps", -1)
    if "device" in settings:
        settings.setdefault("dtype", "auto")
    world = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun's
    settings.setdefault("gradient_accumulation", max(world, base.train.gradient_accumulation))
    return RunConfig(replace(base.model, **model), replace(base.train, **settings), text)


def checked(content: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """What is given, by section, its sizes in bytes and "none" as None; a key that is none of a section's is an error."""
    kinds = {"model": ModelConfig, "train": TrainConfig, "data": DataConfig}
    check_values(content, where)
    for section in content:
        if section not in kinds or not isinstance(content[section], Mapping):
            got = f"[{section}]" if isinstance(content[section], Mapping) else f"{section!r} in no section"
            meant = did_you_mean(str(section), _shown_keys(kinds) | {s: f"[{s}]" for s in kinds})
            raise ValueError(f"{where}: got {got}{meant}; accepted: the sections {', '.join(f'[{s}]' for s in kinds)}")
    out: dict[str, dict[str, Any]] = {}
    for section, kind in kinds.items():
        known = {f.name: f for f in fields(kind)}
        out[section] = dict(content.get(section, {}))
        for key, value in out[section].items():
            if key not in known and (section, key) != ("model", "preset"):
                accepted = sorted({*known, *(["preset"] if section == "model" else [])})
                meant = did_you_mean(str(key), _shown_keys(kinds) | {name: repr(name) for name in accepted})
                raise ValueError(f"{where}: got {key!r} in [{section}]{meant}; accepted: {', '.join(accepted)}")
            if value == "none" and key in known and known[key].default is None:
                out[section][key] = None
            elif key == "memory_budget" and isinstance(value, str):
                out[section][key] = byte_count(value)
            elif key == "files":
                out[section][key] = [value] if isinstance(value, str) else value
            elif key == "dtype" and isinstance(value, str | torch.dtype):
                out[section][key] = dtype_name(value)
    return out


def _shown_keys(kinds: Mapping[str, type]) -> dict[str, str]:
    """Of every section's keys: 'steps' in [train]."""
    names = [(section, f.name) for section, kind in kinds.items() for f in fields(kind)]
    return {name: f"{name!r} in [{section}]" for section, name in [("model", "preset"), *names]}


def byte_count(text: str, name: str = "memory_budget") -> int:
    """1500000000, 1.5GB, 1400MiB."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{name}: got {text!r}; accepted: bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        ) from None


def resumed(own: RunConfig, asked: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The run `own` as it goes on: with what is asked for, by section. What is not in MAY_CHANGE is refused where it is
    another than the run's own."""
    changes, mine = {}, own.plain()
    for section, values in checked(asked, "resume").items():
        for name, value in values.items():
            if name == "preset":
                model = asdict(preset_run(value).model) | {"vocab_size": own.model.vocab_size} | values
                if any(model[key] != mine["model"][key] for key in mine["model"] if key not in values):
                    raise ValueError(
                        f"preset: got {value!r}; accepted: none when resuming, for the run has its own model"
                    )
                continue
            if name == "seq_len" and value == 0:
                value = own.model.block_size
            if isinstance(value, Mapping | list | tuple):  # as the run has it: every key of rope_scaling, lists
                value = replace(own, **{section: replace(getattr(own, section), **{name: value})}).plain()[section][
                    name
                ]
            if value == mine[section][name] or (name, value) in (("warmup_steps", -1), ("dtype", "auto")):
                continue
            if section != "train" or name not in MAY_CHANGE:
                raise ValueError(
                    f"{name}: got {value!r}; accepted: the run's own, {mine[section][name]!r}, when resuming"
                )
            changes[name] = value
    return replace(own, train=replace(own.train, **changes))


def _plain(value: Any) -> Any:
    """With lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _check_count(name: str, value: object, least: int) -> None:
    if not is_count(value, LIMITS[name], least):
        raise ValueError(f"{name}: got {shown(value)}; accepted: an int ≥ {least}, at most {LIMITS[name]:,}")
