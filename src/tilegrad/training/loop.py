"""The training loop: step → log → evaluation → checkpoint → report. A resumed run has the same bits as one that was never
stopped. run.py starts the loop.

SIGTERM, SIGHUP, Ctrl-C and a closed output end the run after the current step; the run is saved, gets its report, and can be
resumed. A full disk, or ten consecutive steps that are not finite, end it with `RunEnded`, which says what is saved.

With several ranks, rank 0 writes the files, the log, the report and the sample. All ranks stop after the same step.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..data.documents import Numbers, Show
from ..data.tokenizer import decode_known, eos_token_ids
from ..engine.engine import Engine
from ..engine.optimizer import NonFiniteError, StepResult
from ..engine.parallel import check_agreed
from ..engine.planning import step_report
from ..engine.state import counters, restore_counters
from ..memory.page import human
from ..text.atomic import write_whole
from ..text.environment import environment
from ..text.untrusted import naming
from .checkpointer import Checkpointer
from .config import DTYPES, RunConfig, RunEnded
from .dataset import Dataset
from .evaluation import Evaluator
from .folder import Best, resume_command, write_run
from .frozen import BaseWeights
from .generation import NonFiniteLogits, draw
from .log import RunLog, read_log
from .loggers import chosen_loggers
from .metrics import InFlight, Metrics, Position, SkippedSteps
from .ranks import Ranks
from .report import run_report, run_tables
from .resident import Resident, process_memory, resident
from .schedule import learning_rate
from .sections import run_from
from .signals import stop_on_signals
from .stages import begins, stage_of
from .start import Start
from .state import RunState


@dataclass(frozen=True, slots=True)
class RunResult:
    """`stopped_by`: the signal that ended the run before its last step, or SIGPIPE if its output was closed; None if neither
    happened. `ended_early`: why `patience` ended the run before its last step; None if it did not."""

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
    best: Best | None  # None: there was no evaluation
    ended_early: str | None = None


def engine_of(config: RunConfig, ranks: Ranks) -> Engine:
    """The engine of a run, with new weights."""
    t = config.train
    return Engine(
        config.model,
        t.batch_size,
        t.seq_len,
        t.device,
        DTYPES[t.dtype],
        t.seed,
        t.memory_budget,
        weight_decay=t.weight_decay,
        max_norm=t.max_norm or math.inf,
        deterministic=t.deterministic,
        mesh=ranks.mesh,
        **config.step_options,
        **ranks.sharding,
    )


class Run:
    def __init__(
        self, start: Start, dataset: Dataset, show: Show, ranks: Ranks, base: BaseWeights | None = None
    ) -> None:
        self.base = base  # the frozen weights of a run with adapters
        self.frozen_sha256: str | None = None  # sha256 of the run's own copy of other frozen parameters
        self.start, self.config, self.folder, self.show = start, start.config, start.folder, show
        self.dataset, self.ranks, self.mesh = dataset, ranks, ranks.mesh
        t, mesh = self.config.train, ranks.mesh
        self.device = mesh.device if mesh.world > 1 else torch.device(t.device)
        if mesh.world > 1:
            resumed_from = "" if start.saved is None else start.saved[0].name
            agreed = {"batches": dataset.batches.state(), "resume": resumed_from}
            check_agreed(mesh, {**self.config.plain(), **agreed})
        _warm_up(self.device)
        self.memory_before = process_memory(self.device)
        self.engine = engine_of(self.config, ranks)
        self.parameters = sum(math.prod(p.master.shape) for p in self.engine.spec.declare().params.values())
        self.trained_parameters = sum(g.numel() for g in self.engine.grads.values())
        self.evaluator = Evaluator(dataset, self.engine, ranks, t)
        self.checkpointer = Checkpointer(self.folder, self.engine, mesh, t.keep_checkpoints)
        self.train_loss = math.nan
        self.evaluations_since_best = 0
        self._enter_stage()
        self._reset()
        self._check_state()
        if start.saved is not None:
            self._restore(*start.saved)

    def train(self) -> RunResult:
        with self._open_log() as log, stop_on_signals() as self.stopped:
            self.metrics = Metrics(self.show, log, self.stopped)
            try:
                return self._train()
            except NonFiniteError as error:
                self._rewind()
                raise self._fail(f"{error}; the checkpoint is from before these steps") from error
            except OSError as error:
                reason = f"{error.filename or self.folder}: {error.strerror}"
                if self.mesh.world > 1:  # a save needs all ranks, and the others are at another point
                    raise self._failure(reason) from error
                raise self._fail(reason) from error

    def _open_log(self) -> AbstractContextManager[RunLog | None]:
        """Write run.json and open the log, on rank 0 only."""
        if self.mesh.rank:
            return nullcontext()
        write_run(self.folder, self.config)
        names, sections = chosen_loggers(self.config.train.log), self.config.plain().items()
        hyper_parameters = {f"{part}.{key}": value for part, keys in sections for key, value in keys.items()}
        return RunLog(self.folder / "log.jsonl", loggers=names, hyper_parameters=hyper_parameters)

    def _train(self) -> RunResult:
        t, engine = self.config.train, self.engine
        self._show_start()
        while (
            engine.steps < t.steps
            and not (self.stopped if self.mesh.world == 1 else engine.ranks.stop)
            and self._ended_early() is None
        ):
            self._step()
            if t.eval_interval and engine.steps % t.eval_interval == 0 and engine.steps < t.steps:
                self._evaluate()
            if t.checkpoint_interval and engine.steps % t.checkpoint_interval == 0 and engine.steps < t.steps:
                self._save()
        stopped_by = self._stopped_by()
        if stopped_by is None and self._ended_early() is None:
            self._evaluate()
        elif stopped_by is None:
            self.metrics.emit("early", {"step": engine.steps, "reason": self._ended_early()})
        else:
            self.metrics.emit("stop", {"step": engine.steps, "signal": stopped_by})
        self._save()
        return self._finish(stopped_by)

    def _show_start(self) -> None:
        t, engine, ranks = self.config.train, self.engine, self.ranks
        resumed_from = None if self.start.saved is None else self.start.saved[0]
        if resumed_from is not None:
            self.metrics.log(engine.steps, "resume", {"checkpoint": resumed_from.name})
        if self.dataset.summary:
            self.metrics.log(engine.steps, "data", self.dataset.summary)
            self.metrics.emit("data", self.dataset.summary)
        numbers = {
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
            "tokens": self.dataset.training_tokens,
            "planned_bytes": engine.plan.peak_bytes,
            "unigram_entropy": self.dataset.entropy,
            "step": engine.steps,
            "steps": t.steps,
            "epochs": t.epochs,
            "folder": str(self.folder),
            "resumed_from": None if resumed_from is None else str(resumed_from),
            "ranks": self.mesh.world,
            "micro_batches": t.gradient_accumulation,
            "idle_ranks": max(0, ranks.groups - t.gradient_accumulation) * self.mesh.world // ranks.groups,
        }
        self.metrics.emit("start", numbers)

    def _stopped_by(self) -> str | None:
        """The signal that ended the run; with several ranks, the signal of the lowest rank that got one."""
        mine = self.stopped[0] if self.stopped else None
        if self.mesh.world == 1:
            return mine
        return next(filter(None, self.mesh.gather(mine)), None) if self.engine.ranks.stop else None

    def _ended_early(self) -> str | None:
        """Why no more steps follow: the validation loss was not better in `patience` evaluations."""
        patience, best = self.config.train.patience, self.checkpointer.best
        if not patience or self.evaluations_since_best < patience or best is None:
            return None
        count = f"{self.evaluations_since_best} evaluation{'s' * (self.evaluations_since_best > 1)}"
        return f"no better validation loss than {best.validation_loss:.4f}, after {best.step:,} steps, in {count}"

    def _fail(self, reason: str) -> RunEnded:
        """Save and report as much as possible, and say what was saved."""
        with suppress(OSError):
            self._save()
        with suppress(OSError):
            self._finish(None, sample="")
            reason += f"; the report: {self.folder / 'report.html'}"
        return self._failure(reason)

    def _failure(self, reason: str) -> RunEnded:
        if self.checkpointer.newest is None:
            return RunEnded(f"{reason}; nothing could be saved")
        step, path = self.checkpointer.newest
        return RunEnded(f"{reason}; saved: {path}, after {step:,} steps; resume with: {resume_command(self.folder)}")

    def _reset(self) -> None:
        """Begin at the current position, with no step in flight."""
        optimizer = self.engine.optimizer
        position = Position(counters(self.engine), self.dataset.batches.state(), self.train_loss)
        self.in_flight: deque[InFlight] = deque()
        self.step_started_at = 0.0
        self.jumps = 0
        self.skipped = SkippedSteps(optimizer.skipped, optimizer.skipped_in_a_row, position)
        self.checkpointer.forget_last()

    def _restore(self, path: Path, state: RunState) -> None:
        with naming(path):
            self._enter_stage(state["engine"]["steps"])
            self.dataset.batches.restore(state["data"])
        self.checkpointer.restore(path, state)
        self.train_loss = _nan_if_none(state["train_loss"])
        self.evaluator.loss = state["validation_loss"]
        self.evaluations_since_best = state.get("evaluations_since_best", 0)
        self._reset()
        if saved := state.get("finite"):  # saved while steps were being skipped
            engine, data, loss = saved
            self.skipped.last_finite_state = Position(engine, data, _nan_if_none(loss))

    def _rewind(self) -> None:
        """Return to the position before the current sequence of skipped steps."""
        engine, data, self.train_loss = self.skipped.last_finite_state
        restore_counters(self.engine, engine)
        self._enter_stage()
        self.dataset.batches.restore(data)
        self._reset()

    def _enter_stage(self, step: int | None = None) -> None:
        """Set batch_size, seq_len and window to those of the stage of `step`, by default the next step. Called before a
        position is saved or restored, because a position may be between the pieces of a row."""
        stages = self.config.train.stages
        if stages:
            stage = stages[stage_of(stages, self.engine.steps if step is None else step)]
            self.dataset.batches.resize(stage.batch_size, stage.seq_len)
            self.engine.window = cast(int | None, stage.window)

    def _log_stage(self) -> None:
        """Log the stage of the next step if the stage begins with it. In the log, steps count from 1."""
        stages, step = self.config.train.stages, self.engine.steps
        if stages and step in begins(stages):
            number = stage_of(stages, step)
            values = {name: value for name, value in asdict(stages[number]).items() if name != "steps"}
            self.metrics.log(step + 1, "stage", {"stage": number + 1, **values})
            self.metrics.emit("stage", {"step": step + 1, "stage": number + 1, "stages": len(stages), **values})

    def _step(self) -> None:
        """Submit a step, and log the steps that are done."""
        t, engine, batches = self.config.train, self.engine, self.dataset.batches
        floor = min(t.min_learning_rate, t.learning_rate)
        rate = learning_rate(
            engine.steps,
            peak=t.learning_rate,
            floor=floor,
            warmup_steps=t.warmup_steps,
            total_steps=t.steps,
            schedule=t.schedule,
            decay_steps=max(t.decay_steps, 0),
        )
        self._log_stage()
        data, seen = batches.state(), batches.tokens_read
        self.mesh.at(f"step {engine.steps}: reading data")
        self.dataset.file.check_length()
        own = batches.deal(t.gradient_accumulation, self.ranks.group, self.ranks.groups)
        if self.stopped:
            engine.ranks.stop = True
        if not self.in_flight:
            self.step_started_at = time.perf_counter()
        now = batches.tokens_read
        self.in_flight.append(InFlight(engine.steps, engine.draws, data, rate, now - seen, now))
        try:
            tokens, targets, cu_seqlens = [x for x, _, _ in own], [y for _, y, _ in own], [z for _, _, z in own]
            engine.submit(tokens, targets, rate, cu_seqlens=cu_seqlens)
        finally:
            self._enter_stage()
            self._record()

    def _record(self, *, wait: bool = False) -> None:
        """Log the steps that are done; with `wait`, all steps in flight."""
        try:
            self._log(self.engine.finished(wait=wait))
        except NonFiniteError:
            self._log(self.engine.finished())
            raise

    def _log(self, results: list[StepResult]) -> None:
        t, engine = self.config.train, self.engine
        for result in results:
            before = self.in_flight.popleft()
            step, now = before.step + 1, time.perf_counter()
            seconds, self.step_started_at = now - self.step_started_at, now
            self.skipped.count(result.norm, before, engine.seed, self.train_loss)
            self.train_loss = result.loss
            numbers: Numbers = {
                "loss": result.loss,
                "learning_rate": before.learning_rate,
                "gradient_norm": result.norm,
                "skipped": self.skipped.total,
                "tokens_per_second": before.tokens / seconds,
                "measured_bytes": self._resident().measured_bytes,
            }
            self.metrics.log(step, "train", numbers)
            if result.jumps:
                self._log_jumps(step, result.jumps)
            if step % t.log_interval == 0 or step in (1, t.steps):
                progress = {"step": step, "steps": t.steps, "tokens_seen": before.tokens_seen}
                self.metrics.emit("train", numbers | progress | {"planned_bytes": engine.plan.peak_bytes})

    def _log_jumps(self, step: int, jumps: int) -> None:
        """Log how many magnitudes have jumped, and show a message once in a run: each such tensor was cut off at its old
        scale."""
        values = {"jumps": jumps, "tensors": ", ".join(self.engine.jumps)}
        self.metrics.log(step, "float8", values)
        if not self.jumps:
            self.metrics.emit("float8", {"step": step, **values})
        self.jumps += jumps

    def _evaluate(self) -> None:
        self._record(wait=True)
        step, loss = self.engine.steps, self.evaluator.run()
        if loss is not None:
            weights = {"weights": "averaged"} if self.engine.spec.ema else {}
            self.metrics.log(step, "validation", {"loss": loss, **weights})
            shown = {"step": step, "loss": loss, "unigram_entropy": self.dataset.entropy, **weights}
            self.metrics.emit("validation", shown)
            best = self.checkpointer.best  # after a resume, its step may be later than the current step
            better = self.checkpointer.is_best(loss) or (best is not None and best.step >= step)
            self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1
            self.checkpointer.save_if_best(self._state(), loss)

    def _save(self) -> None:
        self._record(wait=True)
        if path := self.checkpointer.save(self._state()):
            self.metrics.emit("checkpoint", {"step": self.engine.steps, "path": str(path)})

    def _check_state(self) -> None:
        """Check that the state can be saved, and that a resumed run reads the same configuration from it."""
        state = self._state()
        self.checkpointer.check(state)
        restored = run_from(json.loads(json.dumps(state["run"])), "state['run']")
        if restored != self.config:
            raise ValueError(f"run: got {self.config}; accepted: one that JSON restores; this one becomes {restored}")

    def _state(self) -> RunState:
        """The state that a resumed run needs besides the tensors, as plain JSON."""
        engine, data, loss = self.skipped.last_finite_state
        state: RunState = {
            "engine": counters(self.engine),
            "data": self.dataset.batches.state(),
            "tokenizer_sha256": self.dataset.file.tokenizer_sha256,
            "run": self.config.plain(),
            "train_loss": _none_if_not_finite(self.train_loss),
            "validation_loss": _none_if_not_finite(self.evaluator.loss),
            "evaluations_since_best": self.evaluations_since_best,
            "threads": torch.get_num_threads(),
            "finite": [engine, data, _none_if_not_finite(loss)] if self.skipped.in_a_row else None,
        }
        if self.base is not None:
            state["base"] = self.base.state()
        if self.frozen_sha256 is not None:
            state["frozen_sha256"] = self.frozen_sha256
        return state

    def _finish(self, stopped_by: str | None, sample: str | None = None) -> RunResult:
        engine, report = self.engine, self.folder / "report.html"
        measured = self._resident()
        with self.evaluator.weights():
            params = engine.params  # reading params is a collective operation, and so is leaving the context `weights`
            self.mesh.at(f"step {engine.steps}: a sample", alone=True)
            if self.mesh.rank:
                sample = ""
            elif sample is None:
                sample = self._sample(params)
        self.mesh.at(f"step {engine.steps}: the report", alone=True)
        if not self.mesh.rank:
            write_whole(report, [self._report(measured, sample).encode("utf-8")])
        return RunResult(
            folder=self.folder,
            steps=engine.steps,
            train_loss=self.train_loss,
            validation_loss=self.evaluator.loss,
            unigram_entropy=self.dataset.entropy,
            planned_bytes=engine.plan.peak_bytes,
            measured=measured,
            sample=sample,
            report=report,
            stopped_by=stopped_by,
            best=self.checkpointer.best,
            ended_early=None if stopped_by else self._ended_early(),
        )

    def _report(self, measured: Resident, sample: str) -> str:
        engine = self.engine
        memory = step_report(engine.plan, engine.spec, "Memory of one step")
        records = read_log(self.folder / "log.jsonl")
        tables = run_tables(self.config, records, environment(self.device, engine.dtype), measured)
        return run_report(
            f"tilegrad: {self.folder.name}",
            records,
            facts=self._facts(measured),
            sample=sample,
            tables=tables,
            unigram_entropy=self.dataset.entropy,
            planned_bytes=engine.plan.peak_bytes,
            memory_page=memory.html(),
        )

    def _facts(self, measured: Resident) -> dict[str, str]:
        engine, t, world = self.engine, self.config.train, self.mesh.world
        loss, saved = self.evaluator.loss, self.checkpointer.best
        validation = "" if loss is None else f", validation {loss:.4f}"
        best = "none"
        if saved is not None:
            path = saved.path.relative_to(self.folder)
            best = f"validation {saved.validation_loss:.4f} after {saved.step:,} steps, {path}"
        context = self.ranks.sharding["context"]
        ranks = f"{world} rank{'s' * (world > 1)}" + (f", {context} to a sequence" if context > 1 else "")
        arenas = human(sum(measured.arenas.values()))
        some = self.trained_parameters < self.parameters
        trained = f", {self.trained_parameters:,} of them trained" if some else ""
        return {
            "model": f"{self.parameters:,} parameters{trained}, {self.config.model.n_layer} layers",
            "steps": f"{engine.steps:,} of {t.steps:,}" + (f": {early}" if (early := self._ended_early()) else ""),
            "loss": f"{self.train_loss:.4f}{validation}",
            "best": best,
            "unigram entropy": f"{self.dataset.entropy:.4f} nats",
            "memory": f"{human(engine.plan.peak_bytes)} planned, {arenas} of it resident, "
            f"and {human(measured.unplanned_bytes)} outside the plan",
            "device": f"{t.device}, {t.dtype}, {torch.get_num_threads()} threads, {ranks}",
        }

    def _sample(self, params: dict[str, Tensor]) -> str:
        """A continuation of the first held-out tokens, up to a token that ends a text."""
        t, model = self.config.train, self.config.model
        room = model.block_size // 2
        prompt, n = self.dataset.prompt(room), min(t.sample_tokens, model.block_size - room)
        if not n or not prompt or not math.isfinite(self.train_loss):
            return ""
        try:
            lora, ends = self.engine.spec.lora, eos_token_ids(self.folder / "data", self.dataset.tokenizer)
            tokens = list(draw(model, params, prompt, n, eos=ends, lora=lora, temperature=0.8, top_k=50, seed=t.seed))
        except NonFiniteLogits:  # these weights generate nothing
            return ""
        return decode_known(self.dataset.tokenizer, [*prompt, *tokens])

    def _resident(self) -> Resident:
        return resident(self.engine.arenas.bytes, self.engine.plan.peak_bytes, self.memory_before, self.device)


def _warm_up(device: torch.device) -> None:
    """Multiply two matrices before memory is measured, because the first call of BLAS allocates tens of megabytes."""
    if device.type == "cpu":
        torch.ones(512, 512).mm(torch.ones(512, 512))


def _nan_if_none(value: float | None) -> float:
    return math.nan if value is None else value


def _none_if_not_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
