"""Reads a run from sections of keys, [model], [train], [optimizer], [data] and [lora]: a TOML file, flags or a dictionary. An
unknown key is an error.

[model]
preset = "tiny"          # any ModelConfig, changed by the keys that follow
n_layer = 6
[train]
steps = 2000
[data]
files = ["book.txt"]     # none: the text that ships with the package
[lora]                   # without a key: all parameters are trained, except those that train.freeze names
rank = 16

`example.toml` has every key. If gradient_accumulation is given, the same file gives the same training on any number of
ranks. A key that is not given has the value of the preset, or with train.init the value of `initial_run`, except these keys:

    gradient_accumulation   at least the number of ranks
    seq_len        block_size, if block_size is given
    warmup_steps   steps / 20, if steps or epochs is given
    decay_steps    steps / 5, if the schedule is wsd or trapezoid
    dtype          bfloat16 on CUDA, float32 on a CPU
    vocab_size     at least 256 for tokenizer = "bytes", and at least bpe_vocab_size for "bpe"
    learning_rate  with adapters 2e-4, and min_learning_rate 2e-5
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from ..data.documents import find_format
from ..model.config import PRESETS, ModelConfig
from ..model.lora import LoraConfig
from ..text.spelling import byte_count, did_you_mean, dtype_name
from ..text.untrusted import check_values, decoded, regular_file, shown, too_deep
from .config import (
    COUNTS,
    INTERVALS,
    LIMITS,
    AdapterConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    Sections,
    TrainConfig,
    Values,
)
from .stages import steps_of_epochs

MAY_CHANGE = frozenset(  # the keys that a resumed run may change
    (
        *(f"train.{name}" for name in (*INTERVALS, *COUNTS)),
        "train.epochs",
        "train.learning_rate",
        "train.min_learning_rate",
        "train.decay_steps",
        "train.memory_budget",
        "train.device",
        "train.log",
        "optimizer.matrix_learning_rate",
    )
)
_MAY_DIFFER_FROM_WEIGHTS = (  # keys of [model] that need not equal the config of the weights
    *("block_size", "window", "window_layers", "dropout", "norm_eps", "rope_theta", "rope_scaling", "loss"),
    "logit_softcap",
)
_AUTOMATIC = (  # a resumed run ignores these values and keeps the values that it has computed
    *(("warmup_steps", -1), ("decay_steps", -1), ("dtype", "auto")),
    *(("format", "auto"), ("packing", None), ("too_long", "auto")),
)
_ROUNDS = " (to round what it keeps, `tilegrad export` it and begin another run with --init)"
_ROUNDS_PRODUCTS = " (to round other products, `tilegrad export` it and begin another run with --init)"
_REMEDIES = dict.fromkeys(("moments", "masters", "gradients"), _ROUNDS) | dict.fromkeys(
    ("linear", "head"), _ROUNDS_PRODUCTS
)


def preset_run(name: str) -> RunConfig:
    """The run of a preset; `tilegrad demo` trains `tiny`."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset: got {name!r}; accepted: {', '.join(PRESETS)}")
    model = PRESETS[name]
    if name == "tiny":
        settings = TrainConfig(
            steps=640,
            batch_size=8,
            learning_rate=3e-3,
            min_learning_rate=3e-4,
            warmup_steps=30,
            eval_batches=12,
            checkpoint_interval=200,
            log_interval=20,
        )
        return RunConfig(model, settings)
    settings = TrainConfig(steps=10_000, batch_size=8, learning_rate=6e-4, min_learning_rate=6e-5)
    return RunConfig(model, settings, DataConfig(tokenizer="bpe", bpe_vocab_size=8192))


def initial_run(folder: Path) -> RunConfig:
    """Settings to fine-tune the weights in `folder`, with their model and tokenizer."""
    from ..pretrained.weights import open_weights  # imported only if weights are read

    source = open_weights(folder)
    if source.tokenizer is None:
        raise FileNotFoundError(f"{folder / 'tokenizer.json'}: no such file; accepted: weights with their tokenizer")
    settings = TrainConfig(
        steps=200,
        batch_size=4,
        seq_len=min(512, source.config.block_size),
        learning_rate=2e-5,
        min_learning_rate=2e-6,
        eval_interval=50,
        init=str(folder),
    )
    return RunConfig(source.config, settings, DataConfig(tokenizer=str(source.tokenizer)))


def read_toml(path: Path) -> dict[str, Values]:
    """The sections of a TOML file; `run_from` checks their keys."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such configuration; `tilegrad init {path}` writes one to begin with")
    text = decoded(regular_file(path, "a configuration as TOML; give text to learn from with --data"))
    try:
        content = tomllib.loads(text)
    except RecursionError as error:
        raise too_deep(text, str(path)) from error
    except ValueError as error:
        raise ValueError(f"{path}: is not TOML: {error}; give text to learn from with --data") from error
    check_values(content, str(path), text)
    return content


def run_from(content: Sections, where: str, world: int = 1) -> RunConfig:
    """The run that a TOML file, flags or a dictionary describes. The value of a missing key follows from other keys or from
    the preset. `where` names the source in errors; `world` is the number of ranks that a new run starts with."""
    sections = checked(content, where)
    model, settings = sections["model"], sections["train"]
    preset, init = model.pop("preset", None), settings.get("init")
    base = preset_run("tiny" if preset is None else preset)
    if isinstance(init, str) and not {f.name for f in fields(ModelConfig)} <= model.keys():  # not a saved run
        base = initial_run(Path(init))
        _check_model({**model, **({} if preset is None else {"preset": preset})}, base.model, init)
    data = replace(base.data, **sections["data"])
    lora = _adapters(sections["lora"], settings.get("init"))
    vocab_size = max(base.model.vocab_size, data.vocab_size)
    derived: Values = {"gradient_accumulation": max(world, base.train.gradient_accumulation)}
    derived |= {"seq_len": 0} if "block_size" in model else {}
    derived |= {"warmup_steps": -1} if {"steps", "epochs"} & settings.keys() else {}
    derived |= {"dtype": "auto"} if "device" in settings else {}
    derived |= {"learning_rate": 2e-4, "min_learning_rate": 2e-5} if lora is not None else {}
    return RunConfig(
        replace(base.model, **{"vocab_size": vocab_size, **model}),
        replace(base.train, **{**derived, **settings}),
        data,
        lora,
        replace(base.optimizer, **sections["optimizer"]),
    )


def _check_model(values: Values, weights: ModelConfig, init: str) -> None:
    """Raise if a key of [model] contradicts the weights in `init`."""
    for name, value in values.items():
        if name == "preset":
            raise ValueError(
                f"preset: got {value!r} with init {init!r}; accepted: none, because the weights have their own model"
            )
        if name not in _MAY_DIFFER_FROM_WEIGHTS and value != getattr(weights, name):
            raise ValueError(
                f"{name}: got {shown(value)} with init {init!r}; accepted: {getattr(weights, name)}, the value of the weights"
            )


def _adapters(lora: Values, init: object) -> AdapterConfig | None:
    """The adapters of a run. Missing keys are read from the PEFT folder `adapter`; a saved run has all keys."""
    lora = {name: value for name, value in lora.items() if value is not None}
    if not lora:
        return None
    saved: Values = {}
    if isinstance(lora.get("adapter"), str) and not {f.name for f in fields(LoraConfig)} <= {*lora}:
        if not isinstance(init, str):
            raise ValueError(
                f"init: got None with lora.adapter {lora['adapter']!r}; accepted: the folder of the weights (--init DIR)"
            )
        from ..pretrained.adapters import open_adapter  # imported only if weights are read
        from ..pretrained.weights import open_weights

        saved = asdict(open_adapter(Path(lora["adapter"]), open_weights(Path(init))).lora)
    return AdapterConfig(**{**saved, **lora})


def checked(content: Sections, where: str) -> dict[str, Values]:
    """The values by section, with sizes in bytes, and with None instead of "none". Raises if a section or key is unknown."""
    kinds = {
        "model": ModelConfig,
        "train": TrainConfig,
        "optimizer": OptimizerConfig,
        "data": DataConfig,
        "lora": AdapterConfig,
    }
    check_values(content, where)
    for section in content:
        if section not in kinds or not isinstance(content[section], Mapping):
            got = f"[{section}]" if isinstance(content[section], Mapping) else f"{section!r} in no section"
            meant = did_you_mean(str(section), _shown_keys(kinds) | {s: f"[{s}]" for s in kinds})
            raise ValueError(f"{where}: got {got}{meant}; accepted: the sections {', '.join(f'[{s}]' for s in kinds)}")
    out: dict[str, Values] = {}
    for section, kind in kinds.items():
        accepted_keys = {f.name: f for f in fields(kind)}
        out[section] = dict(content.get(section, {}))
        for key, value in out[section].items():
            if key not in accepted_keys and (section, key) != ("model", "preset"):
                accepted = sorted({*accepted_keys, *(["preset"] if section == "model" else [])})
                meant = did_you_mean(str(key), _shown_keys(kinds) | {name: repr(name) for name in accepted})
                raise ValueError(f"{where}: got {key!r} in [{section}]{meant}; accepted: {', '.join(accepted)}")
            if value == "none" and key in accepted_keys and accepted_keys[key].default is None:
                out[section][key] = None
            elif key == "memory_budget" and isinstance(value, str):
                out[section][key] = byte_count(value)
            elif key in ("files", "freeze"):
                out[section][key] = [value] if isinstance(value, str) else value
            elif key == "layers" and isinstance(value, list | tuple) and len(value) == 1:
                out[section][key] = value[0]  # --lora.layers all
            elif key == "dtype" and isinstance(value, str | torch.dtype):
                out[section][key] = dtype_name(value)
    t = out["train"]
    saved = {f.name for f in fields(TrainConfig)} <= t.keys()  # a saved run has every key
    if not saved and "steps" in t and t.get("epochs") is not None:
        raise ValueError(f"epochs: got {shown(t['epochs'])} and steps {shown(t['steps'])}; accepted: one of them")
    return out


def _shown_keys(kinds: Mapping[str, type]) -> dict[str, str]:
    """key → key and section for an error, such as "'steps' in [train]"."""
    names = [(section, f.name) for section, kind in kinds.items() for f in fields(kind)]
    return {name: f"{name!r} in [{section}]" for section, name in [("model", "preset"), *names]}


def settled(run: RunConfig) -> RunConfig:
    """The run with the format of its files, and with the values of packing and too_long that follow from this format."""
    data = run.data
    format = find_format([Path(name) for name in data.files], data.text_field) if data.format == "auto" else data.format
    conversations = format != "text"
    if conversations and not data.files:
        raise ValueError(f"format: got {format!r} without files; accepted: 'text', or files (--data)")
    packing = conversations if data.packing is None else data.packing
    too_long = ("cut" if conversations else "split") if data.too_long == "auto" else data.too_long
    return replace(run, data=replace(data, format=format, packing=packing, too_long=too_long))


def with_steps(run: RunConfig, rows: Callable[[int], int]) -> RunConfig:
    """The run with `steps` computed from `epochs`, if it has epochs. `rows(n)` is the number of rows in n epochs. The last
    step may read a few rows of the next epoch."""
    t = run.train
    if t.epochs is None:
        return run
    sizes = {name: getattr(t, name) for name in ("batch_size", "seq_len", "gradient_accumulation")}
    steps = steps_of_epochs(t.stages, rows(t.epochs), **sizes)
    warmup = steps // 20 if t.warmup_steps == -1 else t.warmup_steps
    if steps > LIMITS["steps"] or warmup >= steps:
        raise ValueError(
            f"epochs: got {t.epochs}, which is {steps:,} steps, with warmup_steps {warmup}; accepted: more steps than "
            f"warmup_steps, and at most {LIMITS['steps']:,}"
        )
    train = t.with_steps(steps)
    if train.decay_steps > steps - warmup:
        raise ValueError(
            f"epochs: got {t.epochs}, which is {steps:,} steps, with warmup_steps {warmup} and decay_steps "
            f"{train.decay_steps}; accepted: at least as many steps as the sum of the two"
        )
    return replace(run, train=train)


def resumed(own: RunConfig, requested: Sections) -> RunConfig:
    """The run `own` with the changes in `requested`. Raises if a key that is not in MAY_CHANGE has another value."""
    changes: dict[str, Values] = {"train": {}, "optimizer": {}}
    own_values = own.plain()
    may_change = MAY_CHANGE | ({"train.init"} if own.lora is not None else set())  # the base weights may have moved
    for section, values in checked(requested, "resume").items():
        for name, value in sorted(values.items(), key=lambda item: item[0] == "stages"):  # stages end at the new steps
            if name == "preset":
                model = asdict(preset_run(value).model) | {"vocab_size": own.model.vocab_size} | values
                if any(model[key] != own_values["model"][key] for key in own_values["model"] if key not in values):
                    raise ValueError(
                        f"preset: got {value!r}; accepted: none when resuming, because the run has its own model"
                    )
                continue
            if name == "seq_len" and value == 0:
                value = own.model.block_size
            own_section = getattr(own, section)
            if isinstance(value, Mapping | list | tuple) and own_section is not None:
                # as in own_values: rope_scaling with its defaults, tuples as lists
                before = changes["train"] if name == "stages" else {}
                changed = replace(own_section, **before, **{name: value})
                value = replace(own, **{section: changed}).plain()[section][name]
            own_value = own_values.get(section, {}).get(name)
            if value == own_value or (name, value) in _AUTOMATIC:
                continue
            if f"{section}.{name}" not in may_change:
                shown_name = f"{section}.{name}" if section in ("lora", "optimizer") else name
                raise ValueError(
                    f"{shown_name}: got {value!r}; accepted: the run's value, {own_value!r}, when resuming"
                    f"{_REMEDIES.get(name, '')}"
                )
            changes[section][name] = value
            if name == "steps":
                changes[section].setdefault("epochs", None)
    train, optimizer = changes["train"], changes["optimizer"]
    return replace(own, train=replace(own.train, **train), optimizer=replace(own.optimizer, **optimizer))
