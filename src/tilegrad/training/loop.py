"""A training run, from text to report: data → step → log → evaluation → checkpoint, resumable to the bit. run.py begins it.

SIGTERM, SIGHUP, Ctrl-C and a closed output end the run after the step in hand: it is saved, reported, and can be resumed. A
full disk, or ten steps in a row that are not finite, end it with `RunEnded`, which says what is saved.

Of several ranks, files, log, report and sample are rank 0's, and evaluation is dealt and summed. A stop asked of one rank is
agreed in the next step.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batches import Batches, batches_in_order, split, split_windows
from ..data.tokenizer import Tokenizer, decode_known
from ..data.tokens import TokenFile, unigram_entropy
from ..dist.mesh import Mesh
from ..engine.batch import count_targets
from ..engine.engine import Engine
from ..engine.optimizer import NonFiniteError, StepResult
from ..engine.parallel import Shard, check_agreed
from ..engine.planning import step_report
from ..memory.page import human
from ..model.generate import NonFiniteLogits, generate
from ..text.atomic import named, write_whole
from ..text.environment import environment
from .checkpoint import check_state, is_complete, load_into, read_state, save_checkpoint, save_same
from .config import DTYPES, RunConfig, RunEnded, run_from
from .folder import Best, best_of, resume_command, write_run
from .log import NoLog, RunLog, read_log, tensorboard_installed
from .report import run_report, run_tables
from .resident import Resident, held, resident
from .schedule import learning_rate
from .signals import stop_on_signals

Show = Callable[[str, dict[str, Any]], None]  # what happened ("start", "train", "validation", …), and its numbers


@dataclass(frozen=True, slots=True)
class RunResult:
    """`stopped_by`: the signal that ended the run before its last step, SIGPIPE where its output was closed; else None."""

    folder: Path
    steps: int
    train_loss: float
    validation_loss: float | None
    unigram_entropy: float
    planned_bytes: int
    measured: Resident
    sample: str
    report: Path
    stopped_by: str | None
    best: Best | None  # of the evaluations; None where there was none


@dataclass(frozen=True, slots=True)
class Ranks:
    mesh: Mesh
    shard: Shard
    bucket_bytes: int
    context: int


@dataclass(frozen=True, slots=True)
class _Before:
    """Where a step began, and what it was given."""

    step: int
    draws: int
    data: dict[str, Any]
    learning_rate: float
    tokens: int


class Run:
    def __init__(
        self, run: RunConfig, folder: Path, tokens: TokenFile, tokenizer: Tokenizer, show: Show, ranks: Ranks
    ) -> None:
        self.run, self.folder, self.tokenizer, self.show = run, folder, tokenizer, show
        self.mesh = mesh = ranks.mesh
        self.device = mesh.device if mesh.world > 1 else torch.device(run.train.device)
        self.tokens, self.tokenizer_sha256 = tokens, tokens.tokenizer_sha256
        self.entropy = unigram_entropy(tokens.tokens)
        t = run.train
        self.text, self.held_out = tokens.tokens, tokens.tokens
        training, self.validation = None, None  # numbers of windows; None: all
        if run.data.validation == "windows":
            share = run.data.validation_fraction
            training, self.validation = split_windows(self.text, t.seq_len, share, seed=t.seed)
        else:
            self.text, self.held_out = split(self.text, run.data.validation_fraction)
        self.batches = Batches(self.text, t.batch_size, t.seq_len, seed=t.seed, windows=training)
        if mesh.world > 1:
            check_agreed(mesh, {**run.plain(), "batches": self.batches.state()})
        _warm_up(t.device)
        before = held(self.device)
        sharing: Any = {"shard": ranks.shard, "bucket_bytes": ranks.bucket_bytes, "context": ranks.context}
        self.engine = Engine(
            run.model, t.batch_size, t.seq_len, t.device, DTYPES[t.dtype], t.seed, t.memory_budget,
            weight_decay=t.weight_decay, max_norm=t.max_norm or math.inf, linear=t.linear, deterministic=t.deterministic,
            mesh=mesh, **sharing,
        )  # fmt: skip
        self.sharding: dict[str, Any] = {"world": mesh.world, **sharing}
        self.group, self.groups = (
            mesh.rank // ranks.context,
            mesh.world // ranks.context,
        )  # of ranks that share sequences
        self.resident_before = before
        self.validation_loss: float | None = None
        self.best: Best | None = None
        self.train_loss = math.nan
        self.resumed_from: Path | None = None
        self.found: dict[str, Any] = {}  # files, documents, bytes and tokens of a new run's text
        self.saved: tuple[int, Path] | None = None  # the step of the newest checkpoint, and where it is
        self._start()
        self._check_state()

    def restore(self, path: Path) -> None:
        state = read_state(path)
        self.batches.restore(state["data"])
        if self.mesh.world == 1:
            load_into(path, self.engine.tensors())
        else:
            from .pieces import load_pieces  # torch's distributed checkpoint takes a second to load

            load_pieces(path, self.engine, self.mesh)
        self.engine.restore(state["engine"])
        self.train_loss = math.nan if state["train_loss"] is None else state["train_loss"]
        self.validation_loss, self.best = state["validation_loss"], best_of(self.folder)
        self.resumed_from = path
        self.saved = (self.engine.steps, path) if path.parent.name == "checkpoints" else None
        self._start()
        if state.get("finite"):  # saved amid steps that are not finite
            engine, data, loss = state["finite"]
            self.finite = engine, data, math.nan if loss is None else loss

    def go(self) -> RunResult:
        with self._begun() as self.log, stop_on_signals() as self.stopped:
            try:
                return self._go()
            except NonFiniteError as error:
                self._rewind()
                raise self._ended(f"{error}; the checkpoint is from before them") from error
            except OSError as error:
                reason = f"{error.filename or self.folder}: {error.strerror}"
                if self.mesh.world > 1:  # the other ranks are elsewhere, and a save needs all of them
                    raise self._not_saved(reason) from error
                raise self._ended(reason) from error

    def _begun(self) -> RunLog | NoLog:
        """The log of the run, whose folder says what runs in it."""
        if self.mesh.rank:
            return NoLog()
        write_run(self.folder, self.run)
        tensorboard = self.folder / "tensorboard" if tensorboard_installed() else None
        chosen = {f"{part}.{key}": value for part, keys in self.run.plain().items() for key, value in keys.items()}
        return RunLog(self.folder / "log.jsonl", tensorboard=tensorboard, hyper_parameters=chosen)

    def _go(self) -> RunResult:
        t, engine = self.run.train, self.engine
        if self.resumed_from is not None:
            self.log.append(engine.steps, "resume", {"checkpoint": self.resumed_from.name})
        if self.found:
            self.log.append(engine.steps, "data", self.found)
            self._tell("data", self.found)
        tokens = min(self.batches.windows * t.seq_len, len(self.text))
        self._tell("start", {
            "parameters": sum(g.numel() for g in engine.grads.values()), "tokens": tokens,
            "planned_bytes": engine.plan.peak_bytes, "unigram_entropy": self.entropy, "step": engine.steps, "steps": t.steps,
            "folder": str(self.folder), "resumed_from": None if self.resumed_from is None else str(self.resumed_from),
            "ranks": self.mesh.world, "micro_batches": t.gradient_accumulation,
            "idle_ranks": max(0, self.groups - t.gradient_accumulation) * self.mesh.world // self.groups,
        })  # fmt: skip
        while engine.steps < t.steps and not (self.stopped if self.mesh.world == 1 else engine.stop):
            self._step()
            if t.eval_interval and engine.steps % t.eval_interval == 0 and engine.steps < t.steps:
                self._evaluate()
            if t.checkpoint_interval and engine.steps % t.checkpoint_interval == 0 and engine.steps < t.steps:
                self._save()
        stopped_by = self._stopped_by()
        if stopped_by is None:
            self._evaluate()
        else:
            self._tell("stop", {"step": engine.steps, "signal": stopped_by})
        self._save()
        return self._finish(stopped_by)

    def _stopped_by(self) -> str | None:
        """The signal that ended the run; of several ranks the first one's that had any."""
        mine = self.stopped[0] if self.stopped else None
        if self.mesh.world == 1:
            return mine
        return next(filter(None, self.mesh.gather(mine)), None) if self.engine.stop else None

    def _tell(self, event: str, numbers: dict[str, Any]) -> None:
        """`show`; where nobody can see it any more, the run stops, and is silent from then on."""
        try:
            self.show(event, numbers)
        except OSError as error:
            self.show = lambda _event, _numbers: None
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise named(error, Path("output")) from error
            self.stopped.append("SIGPIPE" if error.errno == errno.EPIPE else "SIGHUP")

    def _ended(self, reason: str) -> RunEnded:
        """Save and report what can be, and say what was."""
        with suppress(OSError):
            self._save()
        with suppress(OSError):
            self._finish(None, sample="")
            reason += f"; the report: {self.folder / 'report.html'}"
        return self._not_saved(reason)

    def _not_saved(self, reason: str) -> RunEnded:
        """`reason`, and what was saved before."""
        if self.saved is None:
            return RunEnded(f"{reason}; nothing could be saved")
        step, path = self.saved
        return RunEnded(f"{reason}; saved: {path}, after {step:,} steps; go on with: {resume_command(self.folder)}")

    def _start(self) -> None:
        """No step is under way, and here is where a run of steps that are not finite would go back to."""
        optimizer = self.engine.optimizer
        self.under_way: deque[_Before] = deque()
        self.begun, self.skipped, self.in_a_row = 0.0, optimizer.skipped, optimizer.skipped_in_a_row
        self.finite = self.engine.state(), self.batches.state(), self.train_loss
        self.written: tuple[int, Path] | None = (
            None  # the step of what was saved last, in either folder, and where it is
        )

    def _rewind(self) -> None:
        """To before the first of the steps in a row that were not finite: they changed neither weights nor moments."""
        engine, data, self.train_loss = self.finite
        self.engine.restore(engine)
        self.batches.restore(data)
        self._start()

    def _step(self) -> None:
        """Submit a step, and record those that are done."""
        t, engine = self.run.train, self.engine
        rate = learning_rate(
            engine.steps, peak=t.learning_rate, floor=min(t.min_learning_rate, t.learning_rate),
            warmup_steps=t.warmup_steps, total_steps=t.steps,
        )  # fmt: skip
        position = engine.steps, engine.draws, self.batches.state()
        self.mesh.at(f"step {engine.steps}: reading data")
        self.tokens.check_length()
        pairs = self.batches.deal(t.gradient_accumulation, self.group, self.groups)
        before = _Before(*position, rate, t.gradient_accumulation * t.batch_size * t.seq_len)
        if self.stopped:
            engine.ask_to_stop()
        self.begun = time.perf_counter() if not self.under_way else self.begun
        self.under_way.append(before)
        try:
            engine.submit([x for x, _ in pairs], [y for _, y in pairs], rate)
        finally:
            self._record()

    def _record(self, *, wait: bool = False) -> None:
        """Log the steps that are done; `wait` for all."""
        try:
            self._log(self.engine.finished(wait=wait))
        except NonFiniteError:
            self._log(self.engine.finished())
            raise

    def _log(self, results: list[StepResult]) -> None:
        """Of the first step in a row that was not finite, keep where it began."""
        t, engine = self.run.train, self.engine
        for result in results:
            before = self.under_way.popleft()
            step, now = before.step + 1, time.perf_counter()
            seconds, self.begun = now - self.begun, now
            if math.isfinite(result.norm):
                self.in_a_row = 0
            else:
                if not self.in_a_row:
                    counters = {"steps": before.step, "skipped": self.skipped, "skipped_in_a_row": 0}
                    self.finite = {"seed": engine.seed, "draws": before.draws, **counters}, before.data, self.train_loss
                self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
            self.train_loss = result.loss
            numbers = {
                "loss": result.loss, "learning_rate": before.learning_rate, "gradient_norm": result.norm,
                "skipped": self.skipped, "tokens_per_second": before.tokens / seconds,
                "measured_bytes": self._resident().measured_bytes,
            }  # fmt: skip
            self.log.append(step, "train", numbers)
            if step % t.log_interval == 0 or step in (1, t.steps):
                seen = {"step": step, "steps": t.steps, "tokens_seen": step * before.tokens}
                self._tell("train", numbers | seen | {"planned_bytes": engine.plan.peak_bytes})

    def _evaluate(self) -> None:
        t, engine = self.run.train, self.engine
        self._record(wait=True)
        few = len(self.held_out) < t.seq_len + 1 if self.validation is None else not len(self.validation)
        if few or not t.eval_batches:
            return
        total, count = 0.0, 0.0
        self.tokens.check_length()
        own = batches_in_order(
            self.held_out, t.batch_size, t.seq_len, most=t.eval_batches, windows=self.validation,
            rank=self.group, world=self.groups,
        )  # fmt: skip
        for tokens, targets in engine.padded(list(own)):
            self.mesh.at(f"step {engine.steps}: evaluating")
            n = count_targets(targets)
            total += engine.evaluate(tokens, targets) * n
            count += n
        if self.mesh.world > 1:
            total, count = self.mesh.sum(total, count)
        self.validation_loss = total / count
        self.log.append(engine.steps, "validation", {"loss": self.validation_loss})
        self._tell("validation", {"step": engine.steps, "loss": self.validation_loss, "unigram_entropy": self.entropy})
        if self.validation_loss < (math.inf if self.best is None else self.best.validation_loss):
            path = self._checkpoint("best", keep=1)
            self.best = Best(path, engine.steps, self.validation_loss)

    def _save(self) -> None:
        engine = self.engine
        self._record(wait=True)
        if self.saved is not None and self.saved[0] == engine.steps:
            return
        path = self._checkpoint("checkpoints", keep=self.run.train.keep_checkpoints)
        self.saved = engine.steps, path
        self._tell("checkpoint", {"step": engine.steps, "path": str(path)})

    def _checkpoint(self, place: str, *, keep: int) -> Path:
        """Save, with links to the files of the checkpoint that was saved last where it has the same tensors."""
        folder, engine, mesh, state = self.folder / place, self.engine, self.mesh, self._state()
        step, source = self.written or (-1, self.folder)
        same = step == engine.steps and mesh.gather(is_complete(source))[0]
        if mesh.world > 1:
            from .pieces import save_pieces, save_same_pieces  # torch's distributed checkpoint takes a second to load

            if same:
                path = save_same_pieces(folder, source, engine, mesh, state, keep=keep)
            else:
                path = save_pieces(folder, engine, mesh, state, keep=keep)
        elif same:
            path = save_same(folder, source, state, keep=keep)
        else:
            path = save_checkpoint(folder, engine.steps, engine.tensors(), state, keep=keep)
        self.written = engine.steps, path
        return path

    def _check_state(self) -> None:
        """What a checkpoint will hold can be saved, and a resumed run reads the same configuration from it."""
        state = self._state()
        if self.mesh.world > 1:
            from .pieces import state_of_ranks

            state = state_of_ranks(self.engine, self.mesh, state)
        check_state(state)
        read = run_from(json.loads(json.dumps(state["run"])), "state['run']")
        if read != self.run:
            raise ValueError(f"run: got {self.run}; accepted: one that comes back from JSON, where this is {read}")

    def _state(self) -> dict[str, Any]:
        """What a resumed run needs beside the tensors, as plain JSON."""
        return {
            "engine": self.engine.state(),
            "data": self.batches.state(),
            "tokenizer_sha256": self.tokenizer_sha256,
            "run": self.run.plain(),
            "train_loss": _number(self.train_loss),
            "validation_loss": _number(self.validation_loss),
            "threads": torch.get_num_threads(),
            "finite": [*self.finite[:2], _number(self.finite[2])] if self.in_a_row else None,
        }

    def _finish(self, stopped_by: str | None, sample: str | None = None) -> RunResult:
        engine, report = self.engine, self.folder / "report.html"
        measured, params = self._resident(), engine.params  # of all ranks together
        self.mesh.at(f"step {engine.steps}: the report", alone=True)
        if self.mesh.rank:
            sample = ""
        else:
            sample = self._sample(params) if sample is None else sample
            write_whole(report, [self._report(measured, sample).encode("utf-8")])
        return RunResult(
            self.folder, engine.steps, self.train_loss, self.validation_loss, self.entropy, engine.plan.peak_bytes,
            measured, sample, report, stopped_by, self.best,
        )  # fmt: skip

    def _report(self, measured: Resident, sample: str) -> str:
        engine, t, world = self.engine, self.run.train, self.mesh.world
        memory = step_report(
            engine.plan, self.run.model, t.batch_size, t.seq_len, engine.dtype, engine.recompute, "Memory of one step",
            linear=engine.linear, deterministic=engine.deterministic, **self.sharding,
        )  # fmt: skip
        validation = f", validation {self.validation_loss:.4f}" if self.validation_loss is not None else ""
        best = "none"
        if self.best is not None:
            path = self.best.path.relative_to(self.folder)
            best = f"validation {self.best.validation_loss:.4f} after {self.best.step:,} steps, {path}"
        sequence = f", {world // self.groups} to a sequence" if self.groups < world else ""
        facts = {
            "model": f"{sum(g.numel() for g in engine.grads.values()):,} parameters, {self.run.model.n_layer} layers",
            "steps": f"{engine.steps:,} of {t.steps:,}",
            "loss": f"{self.train_loss:.4f}{validation}",
            "best": best,
            "unigram entropy": f"{self.entropy:.4f} nats",
            "memory": f"{human(engine.plan.peak_bytes)} planned, {human(sum(measured.arenas.values()))} of it resident, "
            f"and {human(measured.beside_bytes)} beside it",
            "device": f"{t.device}, {t.dtype}, {torch.get_num_threads()} threads, {world} rank{'s' * (world > 1)}{sequence}",
        }
        records = read_log(self.folder / "log.jsonl")
        tables = run_tables(self.run, records, environment(self.device, engine.dtype), measured)
        return run_report(
            f"tilegrad: {self.folder.name}", records, facts=facts, sample=sample, tables=tables,
            unigram_entropy=self.entropy, planned_bytes=engine.plan.peak_bytes, memory_page=memory.html(),
        )  # fmt: skip

    def _sample(self, params: dict[str, Tensor]) -> str:
        """What the model writes after the first held-out tokens."""
        t, model = self.run.train, self.run.model
        room = model.block_size // 2
        n = min(t.sample_tokens, model.block_size - room)
        begin = 0 if self.validation is None or not len(self.validation) else int(self.validation[0]) * t.seq_len
        source = self.held_out[begin:] if len(self.held_out) - begin >= room else self.text
        prompt = [int(token) for token in source[: min(room, 32)]]
        if not n or not prompt or not math.isfinite(self.train_loss):
            return ""
        options: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": t.seed}
        try:
            tokens = list(generate(model, params, prompt, n, **options))
        except NonFiniteLogits:  # these weights write nothing
            return ""
        return decode_known(self.tokenizer, [*prompt, *tokens])

    def _resident(self) -> Resident:
        return resident(self.engine.arenas.bytes, self.engine.plan.peak_bytes, self.resident_before, self.device)


def _warm_up(device: str) -> None:
    """A product and its threads: BLAS takes tens of megabytes with its first call, whatever the model."""
    if torch.device(device).type == "cpu":
        torch.ones(512, 512).mm(torch.ones(512, 512))


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
