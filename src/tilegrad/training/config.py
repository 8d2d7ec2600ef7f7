"""The values of a run, by section: [model], [train], [optimizer], [data] and [lora]. `sections.py` reads them from a TOML file,
flags or a dictionary. Every size is checked against LIMITS before memory is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

import torch

from ..data.conversations import Format
from ..data.packing import TooLong
from ..data.prepare import TrainOn
from ..engine.batch import LIMITS as BATCH_LIMITS
from ..engine.batch import check_decay, check_states
from ..kernels.checks import is_count, is_number
from ..kernels.muon import MuonConfig, Orthogonalization, Scale
from ..model.config import LIMITS as MODEL_LIMITS
from ..model.config import PRESETS, ModelConfig
from ..model.layer import Declare, HeadProducts, Kept, Linear, Masters, States
from ..model.lora import LoraConfig, adapter_parts
from ..model.transformer import check_frozen, declare
from ..text.spelling import dtype_name
from ..text.untrusted import check_choice, refuse, shown
from .loggers import LOGGERS
from .schedule import DECAYS_LAST, Schedule
from .stages import Stage, read_stages, resolved_stages

Optimizer = Literal["adamw", "muon"]
Values: TypeAlias = dict[str, Any]  # the keys of a section, with values as TOML and JSON have them
Sections: TypeAlias = Mapping[str, Mapping[str, Any]]  # section → key → value

INTERVALS = ("eval_interval", "checkpoint_interval", "log_interval")
COUNTS = ("steps", "eval_batches", "keep_checkpoints", "sample_tokens", "patience")
LIMITS = {  # the largest value of each key; docs/training.md gives the reasons
    **MODEL_LIMITS,
    **BATCH_LIMITS,
    **dict.fromkeys((*COUNTS, *INTERVALS, "warmup_steps", "decay_steps"), 10**9),
    "gradient_accumulation": 1 << 16,
    "epochs": 10_000,
    "documents": 1 << 16,
    "seed": (1 << 63) - 1,
    "bpe_vocab_size": MODEL_LIMITS["vocab_size"],
}
MAX_STEP_TOKENS = 1 << 26  # all micro-batches are in memory at once, 16 bytes for each token and its target
_CHOICES = {
    "format": ("auto", *get_args(Format)),
    "train_on": get_args(TrainOn),
    "too_long": ("auto", *get_args(TooLong)),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A step has `gradient_accumulation` micro-batches of `batch_size` sequences, counted over all ranks. Intervals are in
    steps; 0: never. A RunConfig replaces seq_len=0 by the model's block_size, warmup_steps=-1 by a twentieth of the steps, and
    dtype="auto" by bfloat16 on CUDA, else by float32. With the schedule "wsd" or "trapezoid" it replaces decay_steps=-1 by a
    fifth of the steps."""

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
    head: HeadProducts = "plain"
    deterministic: bool = True
    invariant: bool = False
    seed: int = 0
    init: str | None = None  # a folder of weights to begin with
    log: str | tuple[str, ...] = "auto"  # loggers besides log.jsonl; auto: TensorBoard, if it is installed
    epochs: int | None = None  # replaces steps, which are then computed when the data is read
    patience: int = 0  # the run ends after this many evaluations without a better validation loss; 0: never
    freeze: tuple[str, ...] = ()  # patterns of parameter names
    schedule: Schedule = "cosine"
    decay_steps: int = -1
    stages: tuple[Stage, ...] = ()
    masters: Masters = "float32"
    gradients: Kept = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.freeze, list | tuple) or not all(isinstance(name, str) and name for name in self.freeze):
            refuse(self, "freeze", "patterns of parameters' names, such as ['wte.*', 'blocks.0.*']")
        if self.init is not None and not isinstance(self.init, str):
            refuse(self, "init", "None, or the name of a folder of weights")
        for name in ("steps", "batch_size", "gradient_accumulation", "keep_checkpoints", "log_interval"):
            self._check_count(name, 1)
        if not is_count(self.warmup_steps, LIMITS["warmup_steps"], -1):
            refuse(self, "warmup_steps", "an int ≥ 0, or -1: a twentieth of the steps")
        for name in ("seq_len", *INTERVALS[:2], "eval_batches", "sample_tokens", "seed", "patience"):
            self._check_count(name, 0)
        if self.epochs is not None:
            self._check_count("epochs", 1)
        if self.patience and not (self.eval_interval and self.eval_batches):
            got = f"{self.patience} with eval_interval {self.eval_interval} and eval_batches {self.eval_batches}"
            raise ValueError(f"patience: got {got}; accepted: 0, or eval_interval and eval_batches ≥ 1")
        for name in ("learning_rate", "min_learning_rate", "weight_decay", "max_norm"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < math.inf:
                refuse(self, name, "a finite number ≥ 0")
        if self.memory_budget is not None and not is_count(self.memory_budget, 1 << 63):
            refuse(self, "memory_budget", "None or a number of bytes ≥ 1")
        if not isinstance(self.device, str):
            refuse(self, "device", "cpu, cuda, or cuda:N")
        if not isinstance(self.dtype, str | torch.dtype) or dtype_name(self.dtype) not in ("auto", *DTYPES):
            refuse(self, "dtype", f"'auto', {', '.join(map(repr, DTYPES))}")
        check_choice(self, "linear", get_args(Linear))
        check_choice(self, "head", get_args(HeadProducts), " or ")
        for name in ("deterministic", "invariant"):
            if not isinstance(getattr(self, name), bool):
                refuse(self, name, "True or False")
        given: object = self.log
        names = [*given] if isinstance(given, list | tuple) else [given]
        accepted = LOGGERS if isinstance(given, list | tuple) else ("auto", "none", *LOGGERS)
        if not all(isinstance(name, str) and name in accepted for name in names) or len({*names}) != len(names):
            refuse(self, "log", f"'auto', 'none', or {', '.join(LOGGERS)}, or a list of these")
        if isinstance(given, list):
            object.__setattr__(self, "log", tuple(given))
        if self.epochs is None and self.warmup_steps >= self.steps:
            refuse(self, "warmup_steps", f"less than steps, {self.steps}")
        States(masters=self.masters, gradients=self.gradients)
        self._check_schedule()
        object.__setattr__(self, "stages", read_stages(self.stages))

    def _check_schedule(self) -> None:
        check_choice(self, "schedule", get_args(Schedule))
        if not is_count(self.decay_steps, LIMITS["decay_steps"], -1):
            refuse(self, "decay_steps", "an int ≥ 0, or -1: a fifth of the steps")
        if self.decay_steps >= 0 and self.schedule not in DECAYS_LAST:
            names = " or ".join(map(repr, DECAYS_LAST))
            raise ValueError(
                f"decay_steps: got {self.decay_steps} with schedule {self.schedule!r}; accepted: -1, or schedule {names}"
            )
        if self.epochs is None and self.decay_steps > self.steps - max(self.warmup_steps, 0):
            raise ValueError(
                f"decay_steps: got {self.decay_steps} with steps {self.steps} and warmup_steps {self.warmup_steps}; "
                f"accepted: at most {self.steps - max(self.warmup_steps, 0)}"
            )

    def _check_count(self, name: str, least: int) -> None:
        if not is_count(getattr(self, name), LIMITS[name], least):
            refuse(self, name, f"an int ≥ {least}, at most {LIMITS[name]:,}")

    def with_steps(self, steps: int) -> TrainConfig:
        """These settings with this number of steps. If warmup_steps or decay_steps is -1, it is computed from `steps`."""
        decay = -(-steps // 5) if self.decay_steps == -1 and self.schedule in DECAYS_LAST else self.decay_steps
        warmup = steps // 20 if self.warmup_steps == -1 else self.warmup_steps
        return replace(self, steps=steps, warmup_steps=warmup, decay_steps=decay)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """name="muon": Muon for the matrices of the blocks (kernels/muon), AdamW for the rest. `ema` is the decay of an average of
    the weights (kernels/ema.py); 0: no average. `moments` is the dtype of AdamW's moments. The other keys are Muon's.
    matrix_learning_rate is the peak of Muon's learning rate; None: 0.02 with scale="spectral", learning_rate with scale="rms".
    Muon's rate follows the schedule of learning_rate, which is AdamW's rate."""

    name: Optimizer = "adamw"
    momentum: float = 0.95
    nesterov: bool = True
    orthogonalization: Orthogonalization = "newton_schulz"
    scale: Scale = "spectral"
    matrix_learning_rate: float | None = None
    cautious: bool = False
    momentum_warmup: int = 0
    ema: float = 0.0
    moments: Kept = "float32"

    def __post_init__(self) -> None:
        check_choice(self, "optimizer.name", get_args(Optimizer), " or ")
        rate = self.matrix_learning_rate
        if rate is not None and not (is_number(rate) and 0 <= rate < math.inf):
            refuse(self, "optimizer.matrix_learning_rate", "None, or a finite number ≥ 0")
        try:
            self.muon(1.0)
            States(self.moments)
        except ValueError as error:
            raise ValueError(f"optimizer.{error}") from error
        check_decay("optimizer.ema", self.ema)
        muon_keys = (f for f in fields(self) if f.name not in ("name", "ema", "moments"))
        changed = [f.name for f in muon_keys if getattr(self, f.name) != f.default]
        if self.name == "adamw" and changed:
            got = shown(getattr(self, changed[0]))
            raise ValueError(
                f"optimizer.{changed[0]}: got {got} with optimizer.name 'adamw'; accepted: its default, or name 'muon'"
            )

    def muon(self, learning_rate: float) -> MuonConfig:
        """Muon's settings. learning_rate: the peak of AdamW's learning rate."""
        rate = self.matrix_learning_rate
        if rate is None:
            rate = 0.02 if self.scale == "spectral" else learning_rate
        factor = rate / learning_rate if learning_rate else 0.0
        return MuonConfig(
            self.momentum,
            self.nesterov,
            self.orthogonalization,
            self.scale,
            learning_rate_factor=factor,
            cautious=self.cautious,
            momentum_warmup=self.momentum_warmup,
        )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """`files` are text files and folders, joined in order; none: the text that ships with the package. validation="windows"
    draws validation windows, or documents, from the whole text; "end" takes the last ones. `sections.settled`
    replaces format="auto", packing=None and too_long="auto" by the values that fit the files."""

    files: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    bpe_vocab_size: int = 4096
    validation_fraction: float = 0.1
    validation: str = "windows"
    text_field: str = "text"
    format: str = "auto"
    train_on: str = "assistant"
    packing: bool | None = None
    documents: int = 16
    too_long: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.files, list | tuple) or not all(isinstance(name, str) for name in self.files):
            given: object = self.files
            such = [given] if isinstance(given, str) else ["a.txt", "b.txt"]
            raise ValueError(f"files: got {given!r}; accepted: names of files, such as {such}")
        named = isinstance(self.tokenizer, str) and self.tokenizer.endswith(".json")
        if self.tokenizer not in ("bytes", "bpe") and not named:
            refuse(self, "tokenizer", "'bytes', 'bpe', or a tokenizer.json")
        if not is_count(self.bpe_vocab_size, LIMITS["bpe_vocab_size"], 256):
            refuse(self, "bpe_vocab_size", f"an int from 256 (one for each byte) to {LIMITS['bpe_vocab_size']:,}")
        if not is_number(self.validation_fraction) or not 0 <= self.validation_fraction < 1:
            refuse(self, "validation_fraction", "at least 0 and less than 1")
        check_choice(self, "validation", ("windows", "end"), " or ")
        if not isinstance(self.text_field, str) or not self.text_field:
            refuse(self, "text_field", "the name of a field")
        for name, accepted in _CHOICES.items():
            check_choice(self, name, accepted)
        if self.packing is not None and not isinstance(self.packing, bool):
            refuse(self, "packing", "true, false, or none (true for conversations)")
        if not is_count(self.documents, LIMITS["documents"], 2):
            refuse(self, "documents", f"an int from 2 to {LIMITS['documents']:,}, padding included")

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size; 1 for a tokenizer.json, which is not read here."""
        return {"bytes": 256, "bpe": self.bpe_vocab_size}.get(self.tokenizer, 1)


@dataclass(frozen=True, slots=True)
class AdapterConfig(LoraConfig):
    """Low-rank adapters (model/lora.py). `adapter` is a folder of PEFT's adapters to begin with."""

    adapter: str | None = None

    def __post_init__(self) -> None:
        LoraConfig.__post_init__(self)
        if self.adapter is not None and not isinstance(self.adapter, str):
            refuse(self, "lora.adapter", "None, or the name of a folder of adapters")


class StepOptions(TypedDict):
    """Keyword arguments of `Engine` and `StepSpec` that a run sets."""

    linear: Linear
    head: HeadProducts
    invariant: bool
    documents: int
    lora: LoraConfig | None
    freeze: tuple[str, ...]
    windows: tuple[int | None, ...]
    muon: MuonConfig | None
    ema: float
    states: States
    accumulate: bool


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run: the shape of the model, how it is trained, on which data, and with which adapters, if any.
    docs/training.md lists every key. Keys that do not fit together raise ValueError.

    >>> import tilegrad
    >>> tilegrad.RunConfig().train.seq_len == tilegrad.RunConfig().model.block_size
    True
    """

    model: ModelConfig = field(default_factory=lambda: PRESETS["tiny"])
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: AdapterConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        t = self.train
        automatic = "bfloat16" if t.device.startswith("cuda") else "float32"
        resolved = replace(
            t.with_steps(t.steps) if t.epochs is None else t,
            seq_len=t.seq_len or self.model.block_size,
            dtype=automatic if t.dtype == "auto" else dtype_name(t.dtype),
            freeze=tuple(t.freeze),
        )
        object.__setattr__(self, "train", resolved)
        object.__setattr__(self, "data", replace(self.data, files=tuple(self.data.files)))
        check_vocab_size(self, self.data.vocab_size)
        if self.train.seq_len > self.model.block_size:
            most = f"block_size, {self.model.block_size}{_of_weights(self)}"
            raise ValueError(f"seq_len: got {self.train.seq_len}; accepted: at most {most}")
        if self.lora is not None:
            adapter_parts(self.model, self.lora)  # raises for layers that this model does not have
        if self.lora is not None and self.muon is not None:
            raise ValueError(f"optimizer.name: got {self.optimizer.name!r} with [lora]; accepted: 'adamw'")
        try:
            dtype = DTYPES[self.train.dtype]
            check_states(self.states, dtype, muon=self.muon, lora=self.lora, ema=self.optimizer.ema)
        except ValueError as error:
            raise ValueError(f"{'optimizer.' * str(error).startswith('moments')}{error}") from error
        if self.muon is not None and self.optimizer.matrix_learning_rate and not self.train.learning_rate:
            raise ValueError(
                f"optimizer.matrix_learning_rate: got {self.optimizer.matrix_learning_rate} with learning_rate 0, whose "
                "schedule it follows; accepted: both > 0"
            )
        if freeze := self.train.freeze:
            at = Declare(self.model, 1, 1, torch.float32, torch.device("cpu"), lora=self.lora, freeze=freeze)
            check_frozen(declare(at), freeze)
        self._resolve_stages()
        t = self.train
        tokens = t.gradient_accumulation * t.batch_size * t.seq_len
        if t.patience and not self.data.validation_fraction:
            raise ValueError(
                f"patience: got {t.patience} with validation_fraction 0; accepted: 0, or a fraction above 0"
            )
        if tokens > MAX_STEP_TOKENS:
            got = f"{t.gradient_accumulation:,} × {t.batch_size:,} × {t.seq_len:,}, {tokens:,} tokens in a step"
            raise ValueError(
                f"gradient_accumulation × batch_size × seq_len: got {got}; accepted: at most {MAX_STEP_TOKENS:,}"
            )

    def _resolve_stages(self) -> None:
        t = self.train
        steps = t.steps if t.epochs is None else None
        stages = resolved_stages(t.stages, self.model, batch_size=t.batch_size, seq_len=t.seq_len, steps=steps)
        object.__setattr__(self, "train", replace(t, stages=stages))
        shorter = next((stage.seq_len for stage in stages if stage.seq_len != t.seq_len), None)
        if shorter is not None and (self.data.packing or self.data.format not in ("auto", "text")):
            raise ValueError(
                f"stages: got seq_len {shorter} with rows of documents; accepted: the run's value, {t.seq_len}, because "
                "documents are cut and packed into rows of this length; or data.packing false with data.format 'text'"
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention windows of the stages."""
        return tuple(dict.fromkeys(cast(int | None, stage.window) for stage in self.train.stages))

    @property
    def states(self) -> States:
        """The dtypes of moments, masters and gradients."""
        return States(self.optimizer.moments, self.train.masters, self.train.gradients)

    @property
    def muon(self) -> MuonConfig | None:
        """Muon's settings; None: AdamW updates every parameter."""
        return None if self.optimizer.name == "adamw" else self.optimizer.muon(self.train.learning_rate)

    @property
    def step_options(self) -> StepOptions:
        """The values that this run gives to the keyword arguments in `StepOptions`."""
        t = self.train
        return StepOptions(
            linear=t.linear,
            head=t.head,
            invariant=t.invariant,
            documents=self.documents,
            lora=self.lora,
            freeze=t.freeze,
            windows=self.windows,
            muon=self.muon,
            ema=self.optimizer.ema,
            states=self.states,
            accumulate=t.gradient_accumulation > 1,
        )

    @property
    def documents(self) -> int:
        """The most documents in a row, padding included; 0: rows are not packed."""
        return min(self.data.documents, self.train.seq_len) if self.data.packing else 0

    def plain(self) -> dict[str, Values]:
        """The sections as plain JSON and TOML values; `run_from` reads the same run from them."""
        return {section: _plain(values) for section, values in asdict(self).items() if values is not None}


def check_vocab_size(run: RunConfig, needed: int) -> None:
    if run.model.vocab_size < needed:
        got = f"{run.model.vocab_size}{_of_weights(run)}"
        raise ValueError(f"vocab_size: got {got}; accepted: at least the tokenizer's size, {needed}")


def _of_weights(run: RunConfig) -> str:
    """The part of an error that names the weights which the run begins with; "" if it begins with none."""
    return "" if run.train.init is None else f" of the weights in {run.train.init}"


class RunEnded(RuntimeError):
    """A run that failed. The message says why, what is saved, and how to resume."""


def _plain(value: Any) -> Any:
    """`value` with lists for tuples, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
