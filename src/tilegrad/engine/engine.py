"""A model in planned memory, and its step: forward, loss, backward, clip, and AdamW or Muon.

Before the first step the model and its optimizer are declared on handles, traced and planned. Then each role (such as params,
grads, activations) gets one allocation. Together the allocations have `plan.peak_bytes` bytes; on a GPU, cuBLAS's workspace and
a copy of the batch are outside the plan (`planning.unplanned_bytes`). A smaller batch uses the beginning of each buffer.

    loss = Σ over targets of nll / total_targets         so that micro-batches of any lengths add up to one large batch

On CUDA `submit` launches the step as one graph (engine/capture.py) and returns before the step is done. On a CPU the step is
done when `submit` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ..kernels.fp8_linear.state import JUMPS
from ..kernels.muon import MuonConfig
from ..memory.planned.arena import Arenas, MemoryPlan
from ..memory.planned.trace import bind
from ..model.config import ModelConfig
from ..model.layer import FULL, HeadProducts, Linear, States
from ..model.lora import LoraConfig
from ..model.transformer import Transformer
from .batch import Batch, check_batch, check_seed, check_some, check_spec, count_targets, load_batch, micro_batches
from .capture import DeviceStep, StepQueue, on_stream
from .dist.mesh import Mesh
from .initialise import initialise
from .machine import check_device, check_fits, check_threads
from .optimizer import AdamW, StepResult
from .parallel import check_micro_batches, check_same, make_strategy
from .recompute import choose_recompute
from .results import Results
from .spec import BUCKET_BYTES, Shard, StepSpec
from .step import accumulate_gradients


class Engine:
    """Trains one model. `params` and `grads` are views of the arenas by name. With dtype=bfloat16, `params` and `grads` are
    float32: on CUDA the layers compute with bfloat16 copies of the params, on a CPU the ops round what they read. dtype=None is
    bfloat16 on CUDA, float32 on a CPU. capture=False runs a CUDA step op by op, with the same bits, for a debugger. On a GPU,
    deterministic=False lets the backward of attention add in any order; on a CPU the order is always the same.

    linear="fp8" computes the outputs and input gradients of the linear layers of the blocks in float8. "fp8-all" also computes
    the gradients of their weights in float8. head="fp8" computes the products of the head in float8. All three need a GPU with
    float8, and are experimental (docs/training.md). `jumps` counts how often a magnitude grew too fast for its scale.

    With a `mesh` of several ranks (engine/parallel) each rank gives its own micro-batches, and the step covers all of
    them. shard="optimizer" gives each of n ranks 1/n of the moments, "none" all moments, and "all" 1/n of everything.
    Gradients are summed in buckets of `bucket_bytes`, which affects rounding. On several ranks `params` are the copies that
    layers compute with, a step is not captured, and after `optimizer_step` the attribute `loss` covers all ranks. With
    context=n, n neighbouring ranks share each sequence: they give the same micro-batches, and each computes 1/n of the tokens.
    With float8 on several ranks, the ranks agree on the scales at the end of `gradients`, and `forward` is refused.

    With documents=n, rows are packed: the `cu_seqlens` of a batch has the ends of up to n documents in each row (batch.py).
    Tokens attend only to their own document, and positions begin at 0 in each document.

    lora=LoraConfig(…) trains adapters of the blocks' linear layers (model/lora.py) and freezes every other parameter.
    freeze=("wte.*", …) freezes the parameters whose names match a pattern. A frozen parameter has no gradient, master or
    moment; on CUDA it is in the compute dtype. `params` has all parameters, `grads` only the trained ones.

    With invariant=True the bits of a row of activations and of its logits depend only on the tokens of its sequence up to that
    row: not on the size of the batch, other sequences, later tokens, or the number of threads. On CUDA this needs
    Triton.

    muon=MuonConfig(…) updates the matrices of the blocks by Muon (kernels/muon), and every other parameter by AdamW.
    ema=0.999 keeps an average of the weights (kernels/ema.py). In the context `engine.state.averaged` the engine computes with
    this average.

    states=States(moments="bfloat16", masters="none", gradients="bfloat16") keeps fewer bytes for each parameter
    (model/layer.py): 8 instead of 18 in bfloat16 on CUDA. `params` and `grads` are then bfloat16.

    windows=(32, None, …) are attention windows that training steps may use instead of the model's window: `window` chooses one.

    With accumulate=False, a step has one micro-batch. On one rank the gradients then share memory with the activations, and
    `backward` overwrites `grads`. They are valid from `gradients` or `backward` to the update, or to the next forward.

    >>> import torch, tilegrad
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=2, seq_len=4)
    >>> tokens = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    >>> losses = [engine.step(tokens[:, :-1], tokens[:, 1:], learning_rate=1e-2) for _ in range(50)]
    >>> losses[-1] < 0.1 < losses[0]
    True

    The examples below continue with `x, y = tokens[:, :-1], tokens[:, 1:]`.
    """

    plan: MemoryPlan
    """Every buffer of the step with its bytes and its address; `plan.peak_bytes` is what the engine allocates, once."""

    grads: dict[str, Tensor]
    """The gradients of the trained parameters, by name: float32 or float64, or bfloat16 with States(gradients="bfloat16").
    `gradients` and `backward` write them, `optimizer_step` reads them. They are views of the arena and may be changed before
    the update. After `gradients` on several ranks, only the slices of this rank are summed."""

    loss: float
    """The mean loss of the last step or forward."""

    steps: int
    """The number of updates so far, including steps in flight and skipped steps."""

    def __init__(
        self,
        model_config: ModelConfig,
        batch_size: int,
        seq_len: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        seed: int = 0,
        memory_budget: int | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float = 1.0,
        linear: Linear = "plain",
        deterministic: bool = True,
        capture: bool = True,
        mesh: Mesh | None = None,
        shard: Shard = "optimizer",
        bucket_bytes: int = BUCKET_BYTES,
        context: int = 1,
        documents: int = 0,
        lora: LoraConfig | None = None,
        freeze: Sequence[str] = (),
        invariant: bool = False,
        muon: MuonConfig | None = None,
        windows: Sequence[int | None] = (),
        ema: float = 0.0,
        states: States = FULL,
        head: HeadProducts = "plain",
        accumulate: bool = True,
    ) -> None:
        # Longer than 60 lines because it has 28 options.
        check_device(str(device))
        mesh = Mesh(device, alone=True) if mesh is None else mesh
        self.device = torch.empty(0, device=mesh.device if mesh.world > 1 else device).device
        if dtype is None:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        spec = StepSpec(
            model_config, batch_size, seq_len, dtype, self.device,
            linear=linear, deterministic=deterministic or self.device.type == "cpu",
            world=mesh.world, shard=shard, bucket_bytes=bucket_bytes, context=context, documents=documents,
            lora=lora, freeze=tuple(freeze) if isinstance(freeze, list) else cast(tuple[str, ...], freeze),
            invariant=invariant, muon=muon, ema=ema, states=states, head=head, accumulate=accumulate,
            windows=tuple(windows) if isinstance(windows, list) else cast(tuple[int | None, ...], windows),
        )  # fmt: skip
        check_spec(spec)
        check_seed(seed)
        choice, self.plan = choose_recompute(spec, memory_budget)
        self.spec = spec = replace(spec, recompute=choice)
        adamw = AdamW(betas, eps, weight_decay, max_norm)
        check_same(mesh, spec, adamw, seed)
        self.config, self.batch_size, self.seq_len, self.dtype = model_config, batch_size, seq_len, dtype
        self.linear, self.deterministic, self.recompute = linear, spec.deterministic, spec.recompute
        self.seed, self.capture = seed, capture
        check_fits(self.plan.peak_bytes, self.device)
        self.arenas = Arenas(self.plan)
        self.ranks = make_strategy(spec, mesh, adamw, self.arenas.view)
        self.optimizer = self.ranks.optimizer
        self._bound: dict[tuple[int, int, bool, bool, int | None], Transformer] = {}
        self._window, self._threads = model_config.window, torch.get_num_threads()
        self._pending: Transformer | None = None  # the model of the last forward, until its backward
        self._has_gradients = False  # whether a backward has written `grads` since the last update
        self._device_steps: dict[tuple[tuple[tuple[int, int], ...], int | None], DeviceStep] = {}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graph_pool = torch.cuda.graph_pool_handle() if self._stream is not None else None
        self._queue = StepQueue(self._stream) if self._stream is not None and mesh.world == 1 else None
        self._results = Results(self.optimizer, self._queue)
        self._rounded = -1  # the version of the params that the compute copies were rounded from
        self.draws = self._total = self._count = self.steps = 0  # draws: how often dropout's seeds were drawn
        self.loss = 0.0
        self._averaged = False  # whether `params` and their average are exchanged now (engine/state.py)
        model = self._model(batch_size, seq_len // context)
        initialise(model, self.ranks, spec, seed, masters=self._has_masters(model))
        self.grads = {name: p.kept_grad for name, p in model.params.items() if p.kept_grad is not None}
        self._scales, self._jumps = model.scales, model.jumps
        self.ranks.scales = {f"scale.{name}": state for name, state in model.scales.items()}

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name. Waits for parameters that other ranks are sending. With shard="all" they are copies, and all
        ranks must read them together.

        >>> engine.params["wte.weight"].shape
        torch.Size([5, 16])
        """
        self._settle()
        return self.ranks.whole_params()

    @property
    def window(self) -> int | None:
        """The attention window of training steps: the model's window until another of `windows` is assigned. Evaluation always
        uses the model's window.

        >>> engine.window is None
        True
        """
        return self._window

    @window.setter
    def window(self, window: int | None) -> None:
        accepted = list(dict.fromkeys((self.config.window, *self.spec.windows)))
        if window not in accepted or isinstance(window, bool):
            raise ValueError(f"window: got {window!r}; accepted: {', '.join(map(repr, accepted))}, as planned")
        self._window = window

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        total_targets: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> float:
        """The mean loss over the targets of this call, or 0 without targets. `total_targets` is the number of targets in the
        whole step, by default of this call.

        >>> loss = engine.forward(x, y)
        """
        if self._scales and self.ranks.mesh.world > 1:
            raise RuntimeError(
                f"forward: got float8 with {self.ranks.mesh.world} ranks, which agree on the scales once a step; call "
                "gradients(tokens, targets)"
            )
        batch = Batch(tokens, targets, cu_seqlens)
        self._check([batch])
        self._settle()
        with self._on_stream():
            model = self._load(batch, total_targets)
            with self.ranks.around("forward"):
                model.forward()
            self.optimizer.loss.copy_(model.head.loss)
            self.ranks.sum_loss(model.head.loss)
            self._pending, self.loss = model, self._mean_loss(model)
        return self.loss

    def backward(self) -> None:
        """Add the gradients of Σ nll / total_targets, over the targets of the last forward, to `grads`.

        >>> engine.zero_gradients()
        >>> loss = engine.forward(x, y)
        >>> engine.backward()
        """
        if self._pending is None:
            raise RuntimeError(
                "backward: got no forward since the last backward, gradients, evaluate or refused batch; call "
                "forward(tokens, targets) first"
            )
        if self.ranks.summed:
            raise RuntimeError(
                "backward: got gradients that are already summed over the ranks; call optimizer_step or "
                "zero_gradients first"
            )
        model, self._pending = self._pending, None
        with self._on_stream(), self.ranks.around("backward"):
            model.backward()
        self._has_gradients = True

    def zero_gradients(self) -> None:
        """Zero every gradient, before the first `backward` of a step. `gradients` and `step` do not need this call.

        >>> engine.zero_gradients()
        >>> float(engine.grads["wte.weight"].norm())
        0.0
        """
        if self.spec.shares_gradients:
            raise RuntimeError(
                "zero_gradients: got an engine with accumulate=False, whose `backward` overwrites the gradients; leave "
                "the call out"
            )
        self.ranks.forget_sums()
        self.arenas.bytes["grads"].zero_()

    def gradients(
        self,
        tokens: Tensor | Sequence[Tensor],
        targets: Tensor | Sequence[Tensor],
        *,
        cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
    ) -> float:
        """Forward and backward of one batch, or of a list of micro-batches as if they were one batch. The first micro-batch
        overwrites the gradients, so zeroing is not needed, and the others add to them. Returns the mean loss. A rank may have
        no micro-batch if another rank has one.

        >>> loss = engine.gradients([x[:1], x[1:]], [y[:1], y[1:]])
        """
        batches = micro_batches(tokens, targets, cu_seqlens)
        self._check(batches)
        check_micro_batches(len(batches), self.spec)
        ranks, first_draw, loss = self.ranks, self.draws, 0.0
        total, all_batches = ranks.count(sum(count_targets(batch.targets) for batch in batches), len(batches))
        unpadded = len(batches)
        batches = ranks.padded(batches)

        def models() -> Iterator[Transformer]:
            nonlocal loss
            for i, batch in enumerate(batches):
                self.draws = first_draw + ranks.number_of(i)
                model = self._load(batch, total, accumulate=i > 0)
                yield model
                loss += self._mean_loss(model) * (self._count / total if total else 0.0)

        @contextmanager
        def around(i: int) -> Iterator[None]:
            with ranks.around("step", accumulate=i > 0, last=i == len(batches) - 1):
                yield
            if i == unpadded - 1:
                ranks.keep_largest()

        if not batches:
            self.zero_gradients()
        with self._on_stream():
            if not batches:
                self.optimizer.loss.zero_()
            accumulate_gradients(models(), loss=self.optimizer.loss, around=around)
            if not batches:
                self._model(self.batch_size, self.seq_len // self.spec.context).scale_step()
                ranks.sum_gradients()
            ranks.agree_on_largest()
        self.draws, self.loss, self._has_gradients = first_draw + all_batches, loss, True
        return loss

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip the gradients to a global norm of `max_norm`, then update by AdamW, or by Muon and AdamW. Returns the norm
        before clipping. A step with a non-finite loss or gradient changes neither weights nor moments; ten such steps in a row
        raise NonFiniteError.

        >>> loss = engine.gradients(x, y)
        >>> norm = engine.optimizer_step(learning_rate=1e-3)
        """
        self._refuse_averaged("optimizer_step")
        result = self._update(learning_rate)
        self._results.count([result])
        return result.norm

    def step(
        self,
        tokens: Tensor | Sequence[Tensor],
        targets: Tensor | Sequence[Tensor],
        learning_rate: float,
        *,
        cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
    ) -> float:
        """`submit` a step, and wait for it. Returns the mean loss.

        >>> loss = engine.step(x, y, learning_rate=1e-3)
        """
        self.submit(tokens, targets, learning_rate, cu_seqlens=cu_seqlens)
        self.loss = self._results.take_last().loss
        return self.loss

    def submit(
        self,
        tokens: Tensor | Sequence[Tensor],
        targets: Tensor | Sequence[Tensor],
        learning_rate: float,
        *,
        cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """`gradients`, then `optimizer_step`; on CUDA without waiting for the device. `finished` returns the result.

        >>> engine.submit(x, y, learning_rate=1e-3)
        """
        self._refuse_averaged("step")
        if self._queue is None:
            self.gradients(tokens, targets, cu_seqlens=cu_seqlens)
            self._results.record([self._update(learning_rate)])
            return
        batches = micro_batches(tokens, targets, cu_seqlens)
        check_some(len(batches))
        check_micro_batches(len(batches), self.spec)
        self._check(batches)
        step = self._device_step(tuple((x.shape[0], x.shape[1]) for x, *_ in batches), self._queue.stream)
        seeds = [step.models[0].draw_seeds(self.seed, self.draws + i) for i in range(len(batches))]
        self.draws += len(batches)
        self.steps += 1
        with self._on_stream():
            self._round_weights(step.models[0])
            awaited = self._queue.submit(step, batches, seeds, learning_rate, capture=self.capture)
        self._rounded = self._version()
        self._results.record(awaited)

    def finished(self, *, wait: bool = False) -> list[StepResult]:
        """Results of the submitted steps that are done, oldest first, each once; `wait` waits for all of them. Ten skipped
        steps in a row raise NonFiniteError.

        >>> engine.submit(x, y, learning_rate=1e-3)
        >>> engine.finished(wait=True)[-1].loss < 0.1
        True
        """
        self._results.collect(wait=wait)
        return self._results.take()

    def evaluate(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Tensor | None = None) -> float:
        """The mean loss of a batch, on this rank and without dropout. `backward` can't follow this call.

        >>> engine.evaluate(x, y) < 0.1
        True
        """
        batch = Batch(tokens, targets, cu_seqlens)
        self._check([batch])
        self._settle()
        with self._on_stream():
            model = self._load(batch, None, training=False)
            with self.ranks.around("forward", training=False):
                model.forward()
            self.ranks.sum_loss(model.head.loss)
            return self._mean_loss(model)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a resumed run needs, as views of the arenas. Frozen parameters are left out, because the run loads
        them from their source again. So a run with adapters saves the adapters and their moments.

        >>> {"wte.weight", "m.wte.weight", "v.wte.weight", "adam_step"} <= set(engine.tensors())
        True
        """
        self._begin_average()
        trained = {name: x for name, x in self.params.items() if name in self.ranks.trained}
        return {**trained, **self.optimizer.tensors(), **self.ranks.scales}

    @property
    def jumps(self) -> dict[str, int]:
        """tensor in float8 → how often its largest magnitude has grown 100-fold from one step to the next, if ever.

        >>> engine.jumps
        {}
        """
        counts = {name: int(state[JUMPS]) for name, state in self._scales.items()}
        return {name: count for name, count in counts.items() if count}

    def _settle(self) -> None:
        """Wait for the parameters that other ranks are sending."""
        if self.ranks.sharded:
            with self._on_stream():
                self.ranks.settle()

    def _refuse_averaged(self, name: str) -> None:
        if self._averaged:
            raise RuntimeError(
                f"{name}: got a call inside `averaged`, which has swapped the weights; call {name} outside"
            )

    def _begin_average(self) -> None:
        """Before the first update, set the average of the weights to the weights, which the caller may have changed."""
        self._refuse_averaged("tensors")
        if self.spec.ema and float(self.optimizer.adam_step) == 0.0:
            self.optimizer.begin_average()

    def _model(self, b: int, t: int, *, training: bool = True, accumulate: bool = True) -> Transformer:
        """The model bound to the beginning of every buffer, for b sequences, t tokens of each on this rank."""
        check_threads(self._threads, self.device)
        window = self._window if training else self.config.window
        key = b, t, training, accumulate, window
        if key not in self._bound:
            handles = self.spec.declare(
                self.ranks.context, b, t, training=training, accumulate=accumulate, window=window
            )
            self._bound[key] = bind(handles, self.ranks.view)
        return self._bound[key]

    def _check(self, batches: list[Batch]) -> None:
        """Check batches before any buffer changes. The last forward is forgotten, because its buffers will be overwritten."""
        self._pending, self._has_gradients = None, False
        for batch in batches:
            check_batch(batch, self.spec)

    def _load(self, batch: Batch, total: int | None, *, training: bool = True, accumulate: bool = True) -> Transformer:
        """The model for a checked batch, with the batch loaded. total: the targets of the step; None: those of the batch."""
        count = count_targets(batch.targets)
        if total is not None and total < count:
            raise ValueError(f"total_targets: got {total}; accepted: at least the {count} targets of this call")
        self._count, self._total = count, count if total is None else total
        local = self.ranks.local(batch)
        model = self._model(*local.tokens.shape, training=training, accumulate=accumulate)
        load_batch(model, local, self._total)
        for buffer, seed in zip(model.seeds, model.draw_seeds(self.seed, self.draws), strict=True):
            buffer.fill_(seed)
        self.draws += training
        self._round_weights(model)
        return model

    def _round_weights(self, model: Transformer) -> None:
        """Update the compute copies if something other than the optimizer has changed the params."""
        if self._rounded != self._version() and self._has_masters(model):
            model.round_weights()
            self._rounded = self._version()

    def _has_masters(self, model: Transformer) -> bool:
        """Whether this rank has all master weights; otherwise it has slices of them, which the optimizer rounds."""
        return self.ranks.has_params and isinstance(model.trained[0].master, Tensor)

    def _version(self) -> int:
        """torch's version counter of the params arena."""
        return int(self.arenas.bytes["params"]._version)

    def _device_step(self, shapes: tuple[tuple[int, int], ...], stream: torch.cuda.Stream) -> DeviceStep:
        key = shapes, self._window
        if key not in self._device_steps:
            models = [self._model(b, t, accumulate=i > 0) for i, (b, t) in enumerate(shapes)]
            self._device_steps[key] = DeviceStep(models, self.optimizer, stream, self._graph_pool)
        return self._device_steps[key]

    def _update(self, learning_rate: float) -> StepResult:
        """Update with the current gradients, and wait for the result."""
        if self.spec.shares_gradients and not self._has_gradients:
            raise RuntimeError(
                "optimizer_step: got accumulate=False and no gradients since the last update, forward, evaluate or "
                "refused batch; call gradients(tokens, targets) first"
            )
        self._has_gradients = False
        self.steps += 1
        with self._on_stream():
            self.loss = self.ranks.update(learning_rate, self.loss)
            jumps = 0 if self._jumps is None else int(self._jumps)
            result = StepResult(self.loss, float(self.optimizer.norm), jumps)
        self._rounded = self._version() if self.optimizer.rounded is not None else -1
        return result

    def _on_stream(self) -> AbstractContextManager[None]:
        return on_stream(self._stream)

    def _mean_loss(self, model: Transformer) -> float:
        return float(model.head.loss) * self._total / self._count if self._count else 0.0
