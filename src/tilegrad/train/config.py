"""A run, as a TOML file says it: sections [model], [train] and [data]. A key that is none of these is an error.

[model]
preset = "tiny"          # any ModelConfig, changed by the keys that follow
n_layer = 6
[train]
steps = 2000
[data]
files = ["book.txt"]     # none: the text that ships with the package
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..model.config import PRESETS, ModelConfig

MAY_CHANGE = frozenset({  # of [train], when a run goes on: the schedule's ends, what is said and kept, where it runs
    "steps", "learning_rate", "min_learning_rate", "eval_interval", "eval_batches", "checkpoint_interval",
    "keep_checkpoints", "log_interval", "sample_tokens", "memory_budget", "device",
})  # fmt: skip
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """`gradient_accumulation` micro-batches of `batch_size` make a step. Intervals are in steps, 0 = never."""

    steps: int = 1000
    batch_size: int = 16
    seq_len: int = 128
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 50
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
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "gradient_accumulation", "keep_checkpoints", "log_interval"):
            if not _int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: an int ≥ 1")
        for name in ("warmup_steps", "eval_interval", "eval_batches", "checkpoint_interval", "sample_tokens", "seed"):
            if not _int(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: an int ≥ 0")
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "max_norm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}: got {value!r}; accepted: a number ≥ 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: got {self.dtype!r}; accepted: {', '.join(map(repr, DTYPES))}")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps: got {self.warmup_steps}; accepted: less than steps, {self.steps}")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Text files, one after the other; none: the text that ships with the package."""

    files: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 4096
    validation_fraction: float = 0.1

    @property
    def vocab_size(self) -> int:
        return 256 if self.tokenizer == "bytes" else self.bpe_vocab_size


@dataclass(frozen=True, slots=True)
class RunConfig:
    model: ModelConfig = field(default_factory=lambda: PRESETS["tiny"])
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def __post_init__(self) -> None:
        if self.model.vocab_size < self.data.vocab_size:
            raise ValueError(
                f"vocab_size: got {self.model.vocab_size}; accepted: at least the tokenizer's, {self.data.vocab_size}"
            )
        if self.train.seq_len > self.model.block_size:
            raise ValueError(
                f"seq_len: got {self.train.seq_len}; accepted: at most block_size, {self.model.block_size}"
            )

    def plain(self) -> dict[str, Any]:
        """As JSON and TOML have it."""
        return asdict(self) | {"data": asdict(self.data) | {"files": list(self.data.files)}}


def preset_run(name: str) -> RunConfig:
    """The settings that go with a preset: `tiny` is the demo's."""
    if name not in PRESETS:
        raise ValueError(f"preset: got {name!r}; accepted: {', '.join(PRESETS)}")
    model = PRESETS[name]
    if name == "tiny":
        settings = TrainConfig(
            steps=640, batch_size=8, seq_len=128, learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=30,
            eval_interval=100, eval_batches=12, checkpoint_interval=200, log_interval=20,
        )  # fmt: skip
        return RunConfig(model, settings)
    settings = TrainConfig(
        steps=10_000,
        batch_size=8,
        seq_len=model.block_size,
        learning_rate=6e-4,
        min_learning_rate=6e-5,
        warmup_steps=500,
    )
    return RunConfig(model, settings, DataConfig(tokenizer="bpe", bpe_vocab_size=8192))


def read_run(path: Path, preset: str | None = None) -> RunConfig:
    """A run from its TOML file. `preset` stands in for one that [model] does not name."""
    return run_from(read_toml(path), str(path), preset)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from error


def resumed(own: RunConfig, asked: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The run `own` as it goes on: with what is asked for, by section. What is not in MAY_CHANGE is refused where it is
    another than the run's own."""
    changes = {}
    for section, values in asked.items():
        for name, value in values.items():
            mine = own.plain()[section][name]
            if value == mine:
                continue
            if section != "train" or name not in MAY_CHANGE:
                raise ValueError(f"{name}: got {value!r}; accepted: the run's own, {mine!r}, when resuming")
            changes[name] = value
    return replace(own, train=replace(own.train, **changes))


def run_from(content: dict[str, Any], where: str, preset: str | None = None) -> RunConfig:
    sections = {"model": ModelConfig, "train": TrainConfig, "data": DataConfig}
    for section in content:
        if section not in sections or not isinstance(content[section], dict):
            raise ValueError(
                f"{where}: got [{section}]; accepted: the sections {', '.join(f'[{s}]' for s in sections)}"
            )
    model = dict(content.get("model", {}))
    named = model.pop("preset", preset)
    base = preset_run(named) if named is not None else None
    for section, kind in sections.items():
        known = {f.name for f in fields(kind)}
        given = model if section == "model" else content.get(section, {})
        for key in given:
            if key not in known:
                raise ValueError(f"{where}: got {key!r} in [{section}]; accepted: {', '.join(sorted(known))}")
    data = dict(content.get("data", {}))
    if "files" in data:
        data["files"] = tuple(data["files"])
    base = base or RunConfig()
    if named is None and model:
        chosen = (
            ModelConfig.from_dict(model) if {"vocab_size", "n_layer"} <= model.keys() else replace(base.model, **model)
        )
    else:
        chosen = replace(base.model, **model)
    return RunConfig(chosen, replace(base.train, **content.get("train", {})), replace(base.data, **data))


def _int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
