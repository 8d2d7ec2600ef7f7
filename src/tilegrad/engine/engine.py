"""A model in planned memory, and its step: forward, loss, backward, clip, AdamW.

Before the first step the model and its optimizer are declared on handles, traced and planned; then each role (params,
grads, optimizer, inputs, activations) is one allocation, `plan.peak_bytes` in all, and nothing is allocated any more. A
smaller batch uses the beginning of each buffer.

    loss = Σ over targets of nll / total_targets         so that micro-batches of any lengths add up to one large batch

    forward, backward        one batch in two calls; backward adds to the gradients
    gradients                one batch or a list of micro-batches in one call; overwrites the gradients
    optimizer_step           clip and AdamW
    step                     gradients, then optimizer_step
    submit, finished         a step, and the results of those that are done

On CUDA `submit` puts the step on the device as one graph (engine/capture.py) and comes back; results follow some steps
behind. On a CPU a step is done when `submit` comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dist.mesh import Mesh
from ..memory.planned.arena import Arenas, MemoryPlan
from ..memory.planned.trace import bind
from ..model.config import ModelConfig
from ..model.layer import Linear
from ..model.transformer import Transformer, declare
from .batch import check_batch, check_linear, check_sizes, check_some, count_targets, micro_batches
from .capture import DeviceStep, StepQueue
from .machine import check_device, check_fits
from .optimizer import NonFiniteError, StepResult
from .parallel import BUCKET_BYTES, Batch, Parallel, Run, Shard, check_agreed, check_same, digest, optimizer_of
from .planning import plan_model
from .recompute import choose_recompute


def default_dtype(device: torch.device) -> torch.dtype:
    """What an engine computes in unless told: bfloat16 on CUDA, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Engine:
    """Trains one model. `params` and `grads` are views of the arenas by name. In bfloat16 both are float32: the layers
    compute with rounded copies of the params on CUDA, and on a CPU ops round what they read. dtype=None is bfloat16 on CUDA,
    float32 on a CPU. capture=False runs a CUDA step op by op: the same bits, for whoever looks at it with a debugger.
    linear="fp8" forms the forward products of the blocks in float8, on GPUs that have it. deterministic=False lets attention
    add in any order on a GPU; a CPU never does.

    With a `mesh` of several ranks (engine/parallel.py) each rank gives its own micro-batches, and the step is that of all of
    them. shard="optimizer" leaves each rank 1/world of the moments, "none" all of them. Buckets of `bucket_bytes` of gradients
    are summed at once; they are a part of what decides the bits. There `params` are what layers compute with, a step is not
    captured, and the loss is that of all ranks after the optimizer's step. context=n: n neighbouring ranks share each sequence;
    they give the same micro-batches, and each computes its rows.

    >>> import torch, tilegrad
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=2, seq_len=4)
    >>> tokens = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    >>> losses = [engine.step(tokens[:, :-1], tokens[:, 1:], learning_rate=1e-2) for _ in range(50)]
    >>> losses[-1] < 0.1 < losses[0]
    True
    """

    plan: MemoryPlan
    """Every buffer of the step with its bytes and its place; `plan.peak_bytes` is what the engine allocates, once."""

    grads: dict[str, Tensor]
    """By name, float32 or better: what `gradients` and `backward` have written, and `optimizer_step` reads. Views of the arena:
    they can be changed in place before the update. Of several ranks, after `gradients`, only this rank's slices are sums."""

    loss: float
    """The mean loss of the last step or forward."""

    def __init__(
        self, model_config: ModelConfig, batch_size: int, seq_len: int, device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None, seed: int = 0, memory_budget: int | None = None, *,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1, max_norm: float = 1.0,
        linear: Linear = "plain", deterministic: bool = True, capture: bool = True,
        mesh: Mesh | None = None, shard: Shard = "optimizer", bucket_bytes: int = BUCKET_BYTES, context: int = 1,
    ) -> None:  # fmt: skip
        check_device(str(device))
        mesh = Mesh(device, alone=True) if mesh is None else mesh
        over_ranks: Any = {"world": mesh.world, "shard": shard, "bucket_bytes": bucket_bytes}
        self.device = torch.empty(0, device=mesh.device if mesh.world > 1 else device).device
        if dtype is None:
            dtype = default_dtype(self.device)
        check_sizes(model_config, batch_size, seq_len, dtype)
        self.config, self.batch_size, self.seq_len = model_config, batch_size, seq_len
        self.dtype, self.seed, self.capture = dtype, seed, capture
        self.linear: Linear = linear
        self.deterministic = deterministic = deterministic or self.device.type == "cpu"
        check_linear(linear, dtype, self.device)
        options: Any = {"linear": linear, "deterministic": deterministic, "context": context, **over_ranks}
        sizes = (model_config, batch_size, seq_len, dtype, self.device)
        self.recompute = choose_recompute(*sizes, memory_budget, **options)
        check_same(mesh, {
            "model": asdict(model_config), "batch_size": batch_size, "seq_len": seq_len, "dtype": dtype, "seed": seed,
            "shard": shard, "bucket_bytes": bucket_bytes, "context": context, "recompute": self.recompute,
            "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm,
        })  # fmt: skip
        self.plan = plan_model(*sizes, self.recompute, **options)
        check_fits(self.plan.peak_bytes, self.device)
        self.arenas = Arenas(self.plan)
        self._context = mesh.neighbours(context) if context > 1 else None
        declared = partial(self._declare, batch_size, seq_len // context)
        optimizer, units = optimizer_of(
            declared(), rank=mesh.rank, **over_ranks, betas=betas, eps=eps, weight_decay=weight_decay, max_norm=max_norm
        )
        self._ranks = Parallel(
            mesh, declared, optimizer, units, self.arenas.view, self._context, shard=shard, bucket_bytes=bucket_bytes
        )
        self.optimizer = self._ranks.optimizer
        self._bound: dict[tuple[int, int, bool, bool], Transformer] = {}
        self._threads = torch.get_num_threads()
        self._pending: Transformer | None = None
        self._total = self._count = 0
        self._device_steps: dict[tuple[tuple[int, int], ...], DeviceStep] = {}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._queue = StepQueue(self._stream) if self._stream is not None and mesh.world == 1 else None
        self._results: list[StepResult] = []
        self._submitted = 0
        self._rounded = -1  # version of the params of which the compute copies are made
        self.draws = 0  # of dropout's seeds
        self.loss = 0.0  # of the last forward: one that is not finite must not reach the weights

        model = self._model(batch_size, seq_len // context)
        kept = self._masters_kept(model)
        self._params = {name: p.master if kept else p.value for name, p in model.params.items()}
        self.grads = {name: p.grad for name, p in model.params.items()}
        self._scales = model.scales
        generator = torch.Generator().manual_seed(seed)
        if kept:
            model.initialise(model_config, generator)
        else:
            model.fill_tables(model_config)
        if mesh.world > 1:
            drawn = self._params.values() if kept else self._draw(model, generator)
            check_agreed(mesh, {"initial weights": digest(drawn)})

    def _draw(self, model: Transformer, generator: torch.Generator) -> Iterator[Tensor]:
        """Each parameter as its layer declares it, whole, once this rank has kept its part: only ranks keep parts."""
        for name, p in model.params.items():
            whole = torch.empty(p.value.shape)
            p.init.fill(whole, generator)
            self.write_param(name, whole)
            yield whole

    @property
    def params(self) -> dict[str, Tensor]:
        """By name, once those under way have arrived. Where everything is sharded, copies that all ranks ask for together."""
        self.settle()
        return self._ranks.whole(self._params)

    def write_param(self, name: str, value: Tensor) -> None:
        """A parameter from outside, of any dtype and device, on every rank."""
        if self._ranks.units is None:
            self.params[name].copy_(value)
        self._ranks.place(name, value)

    def settle(self) -> None:
        """Wait for the parameters that other ranks are sending."""
        if self._ranks.sharded:
            with self._on_stream():
                self._ranks.settle()

    @property
    def stop(self) -> bool:
        """Set on one rank, it is set on all after the next step."""
        return self._ranks.stop

    def ask_to_stop(self) -> None:
        self._ranks.stop = True

    @property
    def steps(self) -> int:
        """Steps of the optimizer begun, also those it skipped."""
        return self._submitted

    # ── the step ──

    def forward(self, tokens: Tensor, targets: Tensor, total_targets: int | None = None) -> float:
        """The mean loss over this call's targets; 0 where there is none. `total_targets` is the whole step's count."""
        self._check([(tokens, targets)])
        self.settle()
        with self._on_stream():
            model = self._load(tokens, targets, total_targets)
            with self._ranks.around("forward"):
                model.forward()
            self.optimizer.loss.copy_(model.head.loss)
            self._ranks.sum_rows(model.head.loss)
            self._pending, self.loss = model, self._mean_loss(model)
        return self.loss

    def backward(self) -> None:
        """Add d(Σ loss)/total_targets of the last forward to the gradients."""
        if self._pending is None:
            raise RuntimeError(
                "backward: got no forward since the last backward, or gradients, an evaluate or a refused batch came "
                "between; call forward(tokens, targets) first"
            )
        if self._ranks.summed:
            raise RuntimeError(
                "backward: got gradients that are summed over the ranks already; accepted: after optimizer_step, or after "
                "zero_gradients"
            )
        model, self._pending = self._pending, None
        with self._on_stream(), self._ranks.around("backward"):
            model.backward()

    def gradients(self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor]) -> float:
        """Forward and backward of one batch, or of a list of micro-batches as if they were one, without the pass over memory
        that zeros would take: the first overwrites the gradients, the next add to them. Returns the mean loss. A rank may have
        no micro-batch where another one has."""
        batches = micro_batches(tokens, targets)
        self._check(batches)
        ranks = self._ranks
        total, taken = ranks.count(sum(count_targets(y) for _, y in batches), len(batches))
        batches = ranks.padded(batches)
        if not batches:
            self.zero_gradients()
        loss, first = 0.0, self.draws
        with self._on_stream():
            self.optimizer.loss.zero_()
            for i, (x, y) in enumerate(batches):
                self.draws = first + ranks.deal(i)
                model = self._load(x, y, total, accumulate=i > 0)
                with ranks.around("step", accumulate=i > 0, last=i == len(batches) - 1):
                    model.step()
                self.optimizer.loss.add_(model.head.loss)
                loss += self._mean_loss(model) * (self._count / total if total else 0.0)
            if not batches:
                ranks.sum_all()
        self.draws, self.loss = first + taken, loss
        return loss

    def step(
        self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor], learning_rate: float
    ) -> float:
        """`submit`, and wait for it. Returns the mean loss."""
        self.submit(tokens, targets, learning_rate)
        self._collect(wait=True)
        self.loss = self._results.pop().loss
        return self.loss

    def submit(
        self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor], learning_rate: float
    ) -> None:
        """`gradients`, then `optimizer_step`; on CUDA without waiting for the device. `finished` gives what came of it."""
        if self._queue is None:
            self.gradients(tokens, targets)
            self._record([self._update(learning_rate)])
            return
        batches = micro_batches(tokens, targets)
        check_some(len(batches))
        self._check(batches)
        step = self._device_step(tuple((x.shape[0], x.shape[1]) for x, _ in batches), self._queue.stream)
        seeds = [step.models[0].draw_seeds(self.seed, self.draws + i) for i in range(len(batches))]
        self.draws += len(batches)
        self._submitted += 1
        with self._on_stream():
            self._round_weights(step.models[0])
            awaited = self._queue.submit(step, batches, seeds, learning_rate, capture=self.capture)
        self._rounded = self._version()
        self._record(awaited)

    def finished(self, *, wait: bool = False) -> list[StepResult]:
        """Results of submitted steps, oldest first, each once; `wait` for all. Ten skipped in a row raise NonFiniteError."""
        self._collect(wait=wait)
        results, self._results = self._results, []
        return results

    def padded(self, batches: list[Batch]) -> list[Batch]:
        """With batches without a target, where each of them needs all ranks: as many as the rank with the most has."""
        return self._ranks.padded(batches)

    def zero_gradients(self) -> None:
        self._ranks.forget_sums()
        self.arenas.bytes["grads"].zero_()

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip to a global norm of `max_norm`, then AdamW. Returns the norm before clipping. A loss or gradient that is
        not finite changes neither weights nor moments; ten in a row raise."""
        result = self._update(learning_rate)
        self._count_steps([result])
        return result.norm

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss without dropout and without a backward to follow, of this rank's batch, or its group's."""
        self._check([(tokens, targets)])
        self.settle()
        with self._on_stream():
            model = self._load(tokens, targets, None, training=False)
            with self._ranks.around("forward", training=False):
                model.forward()
            self._ranks.sum_rows(model.head.loss)
            return self._mean_loss(model)

    # ── state, for checkpoints ──

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as views of the arenas."""
        scales = {f"scale.{name}": state for name, state in self._scales.items()}
        return {**self.params, **self.optimizer.tensors(), **scales}

    def pieces(self, *, shared: bool = False) -> dict[str, Run]:
        """What a rank saves and loads instead of `tensors`: runs of flattened tensors, (run, offset, whole length). They are
        what this rank owns; of tensors that every rank has whole, all, or with `shared` this rank's share."""
        self.settle()
        return self._ranks.pieces(self._params, shared=shared)

    def pieces_written(self) -> None:
        """The runs of `pieces` were written: the other ranks get them."""
        with self._on_stream():
            self._ranks.spread()
        self._rounded = -1

    def state(self) -> dict[str, int]:
        """Counters; waits for the steps under way, whose results `finished` still gives."""
        self._collect(wait=True)
        return {"seed": self.seed, "draws": self.draws, **self.optimizer.state()}

    def restore(self, state: dict[str, int]) -> None:
        if self._queue is not None:
            self._queue.finished(wait=True)
        self._results = []
        self.seed, self.draws, self._submitted = int(state["seed"]), int(state["draws"]), int(state["steps"])
        self.optimizer.restore(state)
        self._ranks.step = self._submitted

    # ── inside ──

    def _declare(self, b: int, t: int, *, training: bool = True, accumulate: bool = True) -> Transformer:
        """The model on handles, for b sequences of which this rank has t tokens. Evaluation drops nothing, and rounds nothing
        to float8."""
        config, linear = (self.config, self.linear) if training else (replace(self.config, dropout=0.0), "plain")
        return declare(
            config, b, t, self.dtype, self.device, self.recompute,
            accumulate=accumulate, linear=linear, deterministic=self.deterministic, context=self._context,
        )  # fmt: skip

    def _model(self, b: int, t: int, *, training: bool = True, accumulate: bool = True) -> Transformer:
        """The model bound to the beginning of every buffer, for b sequences of which this rank has t tokens."""
        if torch.get_num_threads() != self._threads and self.device.type == "cpu":
            raise RuntimeError(
                f"threads: got torch.get_num_threads() = {torch.get_num_threads()}; accepted: {self._threads}, for which "
                f"this engine's memory was planned (torch.set_num_threads({self._threads}), or a new engine)"
            )
        key = b, t, training, accumulate
        if key not in self._bound:
            handles = self._declare(b, t, training=training, accumulate=accumulate)
            self._bound[key] = bind(handles, self._ranks.view)
        return self._bound[key]

    def _check(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Refuse a batch before any buffer changes. The last forward is forgotten: its buffers are about to be used anew."""
        self._pending = None
        for tokens, targets in batches:
            check_batch(tokens, targets, self.batch_size, self.seq_len, self.config.vocab_size)

    def _load(
        self, tokens: Tensor, targets: Tensor, total: int | None, *, training: bool = True, accumulate: bool = True
    ) -> Transformer:
        """The model for this batch, which was checked, with its inputs in place."""
        count = count_targets(targets)
        if total is not None and total < count:
            raise ValueError(f"total_targets: got {total}; accepted: at least the {count} targets of this call")
        self._count, self._total = count, count if total is None else total
        tokens, targets = self._ranks.rows(tokens, targets)
        b, t = tokens.shape
        model = self._model(b, t, training=training, accumulate=accumulate)
        model.tokens.copy_(tokens)
        model.head.targets.view(b, t).copy_(targets)
        model.head.inv_total.fill_(1.0 / self._total if self._total else 0.0)
        for buffer, seed in zip(model.seeds, model.draw_seeds(self.seed, self.draws), strict=True):
            buffer.fill_(seed)
        self.draws += training
        self._round_weights(model)
        return model

    def _round_weights(self, model: Transformer) -> None:
        """The compute copies, where someone else than AdamW has changed the params; masters that are sharded round theirs."""
        if self._rounded != self._version() and self._masters_kept(model):
            model.round_weights()
            self._rounded = self._version()

    def _masters_kept(self, model: Transformer) -> bool:
        """Whole, on this rank; else it has a part of them."""
        return self._ranks.units is None and isinstance(model.embedding.wte.master, Tensor)

    def _version(self) -> int:
        """torch's count of the changes of the params."""
        return int(self.arenas.bytes["params"]._version)

    def _device_step(self, shapes: tuple[tuple[int, int], ...], stream: torch.cuda.Stream) -> DeviceStep:
        if shapes not in self._device_steps:
            models = [self._model(b, t, accumulate=i > 0) for i, (b, t) in enumerate(shapes)]
            self._device_steps[shapes] = DeviceStep(models, self.optimizer, stream)
        return self._device_steps[shapes]

    def _update(self, learning_rate: float) -> StepResult:
        """Of the gradients as they are; waits for it."""
        self._submitted += 1
        with self._on_stream():
            if self._ranks.mesh.world == 1:
                self.optimizer.update(learning_rate)
            else:
                self.loss = self._ranks.update(learning_rate)
            result = StepResult(self.loss, float(self.optimizer.norm))
        self._rounded = self._version() if self.optimizer.rounded is not None else -1
        return result

    def _collect(self, *, wait: bool) -> None:
        if self._queue is not None:
            self._record(self._queue.finished(wait=wait))

    def _record(self, results: list[StepResult]) -> None:
        """Results for `finished`, which gives them out even where counting them raises."""
        self._results.extend(results)
        self._count_steps(results)

    def _count_steps(self, results: list[StepResult]) -> None:
        """Where ten in a row were skipped, the steps still under way are too; then the guard is released, for whoever goes on
        all the same, and the error raised."""
        try:
            for result in results:
                self.optimizer.count(result)
        except NonFiniteError:
            if self._queue is not None:
                self._queue.finished(wait=True)
            self.optimizer.in_a_row.zero_()
            raise

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """All of an engine's work on CUDA is on one stream, after what the caller put on the current one, and before what
        he puts there next."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _mean_loss(self, model: Transformer) -> float:
        return float(model.head.loss) * self._total / self._count if self._count else 0.0
