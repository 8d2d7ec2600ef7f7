"""The progress of a run: a live bar in a terminal if rich is installed, else lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from ..memory.page import human

if TYPE_CHECKING:
    from ..data.documents import Numbers, Show

_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "k"), (1, ""))


def _time(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03; below an hour, minutes and seconds, such as 2:03."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}" if minutes >= 60 else f"{minutes}:{s:02}"


def _line(n: Numbers, elapsed: float, left: float) -> str:
    memory = f"memory {human(n['planned_bytes'])} planned, {human(n['measured_bytes'])} measured"
    skipped = f"  {n['skipped']} skipped" if n["skipped"] else ""
    return (
        f"step {n['step']:>6,} of {n['steps']:,}  loss {n['loss']:7.4f}  lr {n['learning_rate']:.1e}  "
        f"|g| {n['gradient_norm']:6.3f}  {n['tokens_per_second']:>8,.0f} tok/s  {n['tokens_seen']:,} tokens seen  "
        f"{_time(elapsed)} elapsed, {_time(left)} left  {memory}{skipped}"
    )


def _short(n: Numbers) -> str:
    """`_line` in short form, for a bar of 80 columns. The planned bytes, which were shown at the start, are left out."""
    seen, unit = next((n["tokens_seen"] / size, unit) for size, unit in _UNITS if n["tokens_seen"] >= size)
    mib = n["measured_bytes"] / 2**20
    memory = f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.1f} GiB"
    return f"loss {n['loss']:.3f} {n['tokens_per_second']:,.0f} tok/s {seen:.{1 if unit else 0}f}{unit} tok {memory}"


def _message(event: str, n: Numbers) -> str | None:
    """The line to print for an event, or None."""
    if event == "start":
        resumed = f", resumed from {n['resumed_from']} at step {n['step']:,}" if n["resumed_from"] else ""
        share = n["trained_parameters"] / n["parameters"]
        trained = f", of which {n['trained_parameters']:,} are trained ({share:.2%})" if share < 1 else ""
        idle = f"{n['idle_ranks']} of {n['ranks']} ranks have no micro-batch: gradient_accumulation is {n['micro_batches']}\n"
        epochs, steps = n.get("epochs", 0), n["steps"]
        length = f"{epochs} epoch{'s' * (epochs > 1)}: {steps:,} step{'s' * (steps > 1)}\n" if epochs else ""
        return (idle if n["idle_ranks"] else "") + (
            f"{length}{n['parameters']:,} parameters{trained}, {n['tokens']:,} tokens to learn from, "
            f"{human(n['planned_bytes'])} planned{resumed}\n"
            f"The text's unigram entropy, the loss of knowing only token frequencies: {n['unigram_entropy']:.4f} nats"
        )
    if event == "prepare":
        return str(n["doing"])
    if event == "data":
        return described(n)
    if event == "stage":
        window = "no window" if n["window"] is None else f"a window of {n['window']:,}"
        batch = f"batches of {n['batch_size']:,} × {n['seq_len']:,} tokens, {window}"
        return f"step {n['step']:>6,}  stage {n['stage']} of {n['stages']} begins: {batch}"
    if event == "float8":
        return (
            f"step {n['step']:>6,}  float8: the largest magnitude of {n['jumps']} tensors grew 100-fold in a step "
            f"({n['tensors']}); numbers beyond the limit of their scale were cut off (later steps are in log.jsonl)"
        )
    if event == "early":
        return f"step {n['step']:>6,}  ended early: {n['reason']}"
    if event == "validation":
        below = n["unigram_entropy"] - n["loss"]
        where = f"{abs(below):.2f} {'below' if below > 0 else 'above'} the unigram entropy"
        weights = f" of the {n['weights']} weights" if "weights" in n else ""
        return f"step {n['step']:>6,}  validation loss {n['loss']:.4f}{weights}, {where}"
    if event == "evaluate":
        return f"{n['batch']:,} of {n['batches']:,} batches, loss so far {n['loss']:.4f}"
    if event == "generate":
        rate = f"{n['tokens_per_second']:,.1f} tokens/s"
        return f"{n['sequence']:,} of {n['sequences']:,} sequences, {n['tokens']:,} tokens, {rate}"
    if event == "stop":
        return f"{n['signal']} after step {n['step']:,}: saving"
    return None


def described(n: Numbers) -> str:
    """A description of the data of a run: the files that were read, how documents end, and how they fill rows."""
    left_out = f"; {n['left_out']:,} files of other kinds are left out" if n["left_out"] else ""
    kind = f"conversation{'s' * (n['documents'] != 1)} ({n['format']})" if n.get("format") else None
    kind = kind or f"document{'s' * (n['documents'] != 1)}"
    documents = f"{n['documents']:,} {kind} in {n['files']:,} file{'s' * (n['files'] != 1)}"
    lines = [f"{documents}, {n['bytes']:,} bytes, {n['tokens']:,} tokens{left_out}", *_ends(n), *_rows(n)]
    return "\n".join(lines)


def _ends(n: Numbers) -> Iterator[str]:
    """The chat template, and the token that ends a document."""
    if n.get("format"):
        yield f"Chat template: {n['template'] or 'none; the completion follows the prompt'}"
    if n.get("eos") and n.get("template"):
        yield f"EOS {n['eos']!r} ends a conversation if the template writes no special token at its end"
    elif n.get("eos"):
        yield f"EOS {n['eos']!r} ends each " + ("conversation" if n.get("format") else "document")
    elif "eos" in n:
        yield "The tokenizer has no EOS: a blank line ends each document"


def _rows(n: Numbers) -> Iterator[str]:
    """How many documents fill the rows, and how many are cut or left out."""
    if "rows" not in n:
        return
    yield (
        f"{n['pieces'] - n['held_out']:,} to train on and {n['held_out']:,} for validation; {n['trained']:,} targets in "
        f"{n['rows']:,} row{'s' * (n['rows'] != 1)}, {n['padding']:.1%} padding"
    )
    if n["cut"]:
        yield f"Longer than a row and cut: {n['cut']:,}, which lose {n['cut_tokens']:,} tokens (data.too_long)"
    if n["dropped"]:
        yield f"Longer than a row and left out: {n['dropped']:,} (data.too_long)"
    if n["untrained"]:
        yield f"Left out, because nothing in them is trained on: {n['untrained']:,}"


@contextmanager
def watch(stream: TextIO | None = None) -> Iterator[Show]:
    """Yields the callback that shows the events of a run on `stream`, by default stdout."""
    out = stream or sys.stdout
    if out.isatty() and find_spec("rich") is not None:
        with _rich(out) as bar:
            yield bar
        return

    started_at, first_step = time.monotonic(), 0

    def show(event: str, numbers: Numbers) -> None:
        nonlocal started_at, first_step
        if event == "start":
            started_at, first_step = time.monotonic(), numbers["step"]
        message = _message(event, numbers)
        if event == "train":
            elapsed, done = time.monotonic() - started_at, numbers["step"] - first_step
            message = _line(numbers, elapsed, elapsed / done * (numbers["steps"] - numbers["step"]))
        if message:
            print(message, file=out, flush=True)

    yield show


@contextmanager
def _rich(out: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    numbers_column = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    times = (TimeElapsedColumn(), TimeRemainingColumn(compact=True), TextColumn("left"))
    columns = (BarColumn(bar_width=4), MofNCompleteColumn(), numbers_column, *times)
    # The time left follows from the mean speed since the start, because sequences of a batch end together.
    bar = Progress(*columns, console=Console(file=out, highlight=False), speed_estimate_period=float("inf"))
    bar.start()
    try:
        task = bar.add_task("", total=None)

        def show(event: str, numbers: Numbers) -> None:
            message = _message(event, numbers)
            if event == "evaluate":
                bar.update(task, total=numbers["batches"], completed=numbers["batch"], description=message)
            elif event == "generate":
                bar.update(task, total=numbers["sequences"], completed=numbers["sequence"], description=message)
                bar.advance(task, 0)  # starts the mean speed at the first event, when no sequence is complete
            elif message:
                bar.console.print(message)
            if event == "start":
                bar.reset(task, total=numbers["steps"], completed=numbers["step"])
            elif event == "train":
                bar.update(task, completed=numbers["step"], description=_short(numbers))

        yield show
    finally:
        with suppress(OSError):  # the terminal is gone
            bar.stop()
