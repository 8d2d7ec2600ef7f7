"""Stages of a run: each has its own batch size, sequence length and attention window for some steps (`train.stages`).

No stage has a larger batch_size or seq_len than the run, so one memory plan is enough for all stages. A stage cuts each window
of text of the run into seq_len / stage.seq_len pieces, so no stage reads held-out text or reads text twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

from ..kernels.checks import is_count
from ..model.config import ModelConfig
from ..text.spelling import did_you_mean
from ..text.untrusted import shown

MOST_STAGES = 1024
_MOST_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class Stage:
    """steps=None: to the end of the run. window=None: no window. A RunConfig replaces 0 and "model" by the values of [train]
    and [model]."""

    steps: int | None = None
    batch_size: int = 0
    seq_len: int = 0
    window: int | Literal["model"] | None = "model"


def read_stages(tables: object) -> tuple[Stage, ...]:
    """The stages in a list of tables from TOML or JSON."""
    if not isinstance(tables, list | tuple) or len(tables) > MOST_STAGES:
        got = f"{len(tables):,} stages" if isinstance(tables, list | tuple) else shown(tables)
        raise ValueError(
            f"stages: got {got}; accepted: a list of at most {MOST_STAGES:,} tables, such as "
            "[{steps = 100, seq_len = 64}, {window = 'none'}]"
        )
    return tuple(_read(number, table) for number, table in enumerate(tables, 1))


def _read(number: int, table: object) -> Stage:
    if isinstance(table, Stage):
        return table
    names = [field.name for field in fields(Stage)]
    if not isinstance(table, Mapping):
        raise ValueError(f"stages: got {shown(table)} as stage {number}; accepted: a table of {', '.join(names)}")
    for key in table:
        if key not in names:
            meant = did_you_mean(str(key), names)
            raise ValueError(f"stages: got {key!r} in stage {number}{meant}; accepted: {', '.join(names)}")
    values: dict[str, Any] = {key: None if value == "none" else value for key, value in table.items()}
    return Stage(**values)


def resolved_stages(
    stages: Sequence[Stage], model: ModelConfig, *, batch_size: int, seq_len: int, steps: int | None
) -> tuple[Stage, ...]:
    """The stages, with the run's values for the keys that a stage leaves out. The last stage has steps=None, so that it ends
    with the run also if a resumed run has more steps. steps: the steps of the run; None: the run has epochs."""
    out = []
    for number, stage in enumerate(stages, 1):

        def refuse(name: str, accepted: str, number: int = number, stage: Stage = stage) -> ValueError:
            return ValueError(
                f"stages: got {name} {shown(getattr(stage, name))} in stage {number}; accepted: {accepted}"
            )

        if stage.steps is None and number < len(stages):
            raise refuse("steps", "an int ≥ 1; only the last stage may leave it out: that stage ends with the run")
        if stage.steps is not None and not is_count(stage.steps, _MOST_STEPS):
            raise refuse("steps", f"an int ≥ 1, at most {_MOST_STEPS:,}")
        for name, most in (("batch_size", batch_size), ("seq_len", seq_len)):
            if not is_count(getattr(stage, name), most, 0):
                raise refuse(name, f"an int ≥ 1, at most the run's value, {most}; 0: the run's value")
        if stage.seq_len and seq_len % stage.seq_len:
            raise refuse(
                "seq_len", f"a divisor of the run's value, {seq_len}, because windows are cut into equal pieces"
            )
        window: object = stage.window
        as_model = window == model.window and not isinstance(window, bool)
        if window is not None and window != "model" and not as_model and not is_count(window, model.block_size):
            raise refuse("window", f"'none', 'model', or an int ≥ 1, at most block_size, {model.block_size}")
        if window != "model" and not as_model and model.window_layers == ():
            raise refuse("window", "none of its own, because window_layers is [] and no block has a window")
        out.append(
            replace(
                stage,
                batch_size=stage.batch_size or batch_size,
                seq_len=stage.seq_len or seq_len,
                window=model.window if stage.window == "model" else stage.window,
            )
        )
    _check_steps(out, steps)
    return (*out[:-1], *(replace(last, steps=None) for last in out[-1:]))


def _check_steps(stages: Sequence[Stage], steps: int | None) -> None:
    """Every stage must begin before the run ends, and the last stage must end with the run."""
    earlier, last = begins(stages)[-1], stages[-1].steps if stages else None
    if steps is None:
        if last is not None:
            raise ValueError(
                f"stages: got steps {last} in the last stage with epochs; accepted: a last stage without steps, "
                "because the steps follow from the epochs"
            )
        return
    if earlier >= steps:
        raise ValueError(f"stages: got {earlier:,} steps before the last stage; accepted: fewer than steps, {steps:,}")
    if last is not None and earlier + last != steps:
        raise ValueError(
            f"stages: got {earlier + last:,} steps in all; accepted: steps, {steps:,}, or a last stage without steps"
        )


def begins(stages: Sequence[Stage]) -> list[int]:
    """The first step of each stage; steps count from 0."""
    return [*accumulate((stage.steps or 0 for stage in stages[:-1]), initial=0)]


def stage_of(stages: Sequence[Stage], step: int) -> int:
    """The index of the stage of `step`."""
    return bisect_right(begins(stages), step) - 1


def steps_of_epochs(
    stages: Sequence[Stage], rows: int, *, batch_size: int, seq_len: int, gradient_accumulation: int
) -> int:
    """The number of steps that read `rows` rows of seq_len tokens. The last step may read a few rows more."""
    for number, stage in enumerate(stages[:-1], 1):
        pieces = seq_len // stage.seq_len
        rows -= -(-(stage.steps or 0) * gradient_accumulation // pieces) * stage.batch_size
        if rows <= 0:
            raise ValueError(
                f"stages: got {len(stages)} stages, and the epochs end in stage {number}; accepted: fewer steps before "
                "the last stage, or more epochs"
            )
    last = stages[-1] if stages else Stage(None, batch_size, seq_len)
    return begins(stages)[-1] + -(-rows * (seq_len // last.seq_len) // (last.batch_size * gradient_accumulation))
