"""A model in planned memory, and its step: forward, loss, backward, clip, AdamW.

Before the first step the model and its optimizer are declared on handles, traced and planned; then each role (params,
grads, optimizer, inputs, activations) is one allocation, `plan.peak_bytes` in all, and nothing is allocated any more. A
smaller batch uses the beginning of each buffer.

    loss = Σ over targets of nll / total_targets         so that micro-batches of any lengths add up to one large batch

    forward, backward        one batch in two calls; backward adds to the gradients
    gradients                one batch or a list of micro-batches in one call; overwrites the gradients
    optimizer_step           clip and AdamW
    step                     gradients, then optimizer_step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..memory.planned.arena import Arenas, MemoryPlan
from ..memory.planned.trace import bind
from ..model.config import ModelConfig
from ..model.transformer import Transformer, declare
from .batch import check_batch, check_sizes, count_targets, micro_batches
from .optimizer import Optimizer
from .planning import plan_model
from .recompute import choose_recompute


class Engine:
    """Trains one model. `params` and `grads` are views of the arenas by name. In bfloat16 both are float32: the layers
    compute with rounded copies of the params on CUDA, and on a CPU ops round what they read.

    >>> import torch, tilegrad
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=2, seq_len=4)
    >>> tokens = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    >>> losses = [engine.step(tokens[:, :-1], tokens[:, 1:], learning_rate=1e-2) for _ in range(50)]
    >>> losses[-1] < 0.1 < losses[0]
    True
    """

    def __init__(
        self, model_config: ModelConfig, batch_size: int, seq_len: int, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, seed: int = 0, memory_budget: int | None = None, *,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.1, max_norm: float = 1.0,
    ) -> None:  # fmt: skip
        check_sizes(model_config, batch_size, seq_len, dtype)
        self.config, self.batch_size, self.seq_len = model_config, batch_size, seq_len
        self.dtype, self.seed, self.device = dtype, seed, torch.empty(0, device=device).device
        sizes = (model_config, batch_size, seq_len, dtype, self.device)
        self.recompute = choose_recompute(*sizes, memory_budget)
        self.plan: MemoryPlan = plan_model(*sizes, self.recompute)
        self.arenas = Arenas(self.plan)
        handles = Optimizer.declare(
            declare(*sizes).params.values(), betas=betas, eps=eps, weight_decay=weight_decay, max_norm=max_norm
        )
        self.optimizer = bind(handles, self.arenas.view)
        self._bound: dict[tuple[int, int, bool, bool], Transformer] = {}
        self._threads = torch.get_num_threads()
        self._pending: Transformer | None = None
        self._total = self._count = 0
        self._rounded = -1  # version of the params of which the compute copies are made
        self.draws = 0  # of dropout's seeds
        self.loss = 0.0  # of the last forward: one that is not finite must not reach the weights

        model = self._model(batch_size, seq_len)
        self.params: dict[str, Tensor] = {name: p.master for name, p in model.params.items()}
        self.grads: dict[str, Tensor] = {name: p.grad for name, p in model.params.items()}
        model.initialise(model_config, torch.Generator().manual_seed(seed))

    @property
    def steps(self) -> int:
        """Steps of the optimizer, also those it skipped."""
        return self.optimizer.steps

    # ── the step ──

    def forward(self, tokens: Tensor, targets: Tensor, total_targets: int | None = None) -> float:
        """The mean loss over this call's targets; 0 where there is none. `total_targets` is the whole step's count."""
        self._check([(tokens, targets)])
        model = self._load(tokens, targets, total_targets)
        model.forward()
        self._pending, self.loss = model, self._mean_loss(model)
        return self.loss

    def backward(self) -> None:
        """Add d(Σ loss)/total_targets of the last forward to the gradients."""
        if self._pending is None:
            raise RuntimeError(
                "backward: got no forward since the last backward, or gradients, an evaluate or a refused batch came "
                "between; call forward(tokens, targets) first"
            )
        model, self._pending = self._pending, None
        model.backward()

    def gradients(self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor]) -> float:
        """Forward and backward of one batch, or of a list of micro-batches as if they were one, without the pass over memory
        that zeros would take: the first overwrites the gradients, the next add to them. Returns the mean loss."""
        batches = micro_batches(tokens, targets)
        self._check(batches)
        total = sum(count_targets(y) for _, y in batches)
        if not batches:
            self.zero_gradients()
        loss = 0.0
        for i, (x, y) in enumerate(batches):
            model = self._load(x, y, total, accumulate=i > 0)
            model.step()
            loss += self._mean_loss(model) * (self._count / total if total else 0.0)
        self.loss = loss
        return loss

    def step(
        self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor], learning_rate: float
    ) -> float:
        """`gradients`, then `optimizer_step`. Returns the mean loss."""
        loss = self.gradients(tokens, targets)
        self.optimizer_step(learning_rate)
        return loss

    def zero_gradients(self) -> None:
        self.arenas.bytes["grads"].zero_()

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip to a global norm of `max_norm`, then AdamW. Returns the norm before clipping. A loss or gradient that is
        not finite changes neither weights nor moments; ten in a row raise."""
        self._rounded = -1  # torch's fused AdamW does not count as a change of the arena
        return self.optimizer.step(learning_rate, self.loss)

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss without dropout and without a backward to follow."""
        self._check([(tokens, targets)])
        model = self._load(tokens, targets, None, training=False)
        model.forward()
        return self._mean_loss(model)

    # ── state, for checkpoints ──

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as views of the arenas."""
        return {**self.params, **self.optimizer.tensors()}

    def state(self) -> dict[str, int]:
        return {"seed": self.seed, "draws": self.draws, **self.optimizer.state()}

    def restore(self, state: dict[str, int]) -> None:
        self.seed, self.draws = int(state["seed"]), int(state["draws"])
        self.optimizer.restore(state)

    # ── inside ──

    def _model(self, b: int, t: int, *, training: bool = True, accumulate: bool = True) -> Transformer:
        """The model bound to the beginning of every buffer, for b sequences of t tokens."""
        if torch.get_num_threads() != self._threads and self.device.type == "cpu":
            raise RuntimeError(
                f"threads: got torch.get_num_threads() = {torch.get_num_threads()}; accepted: {self._threads}, for which "
                f"this engine's memory was planned (torch.set_num_threads({self._threads}), or a new engine)"
            )
        key = b, t, training, accumulate
        if key not in self._bound:
            config = self.config if training else replace(self.config, dropout=0.0)
            handles = declare(config, b, t, self.dtype, self.device, self.recompute, accumulate=accumulate)
            self._bound[key] = bind(handles, self.arenas.view)
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
        b, t = tokens.shape
        model = self._model(b, t, training=training, accumulate=accumulate)
        count = count_targets(targets)
        if total is not None and total < count:
            raise ValueError(f"total_targets: got {total}; accepted: at least the {count} targets of this call")
        self._count, self._total = count, count if total is None else total
        model.tokens.copy_(tokens)
        model.head.targets.view(b, t).copy_(targets)
        model.head.inv_total.fill_(1.0 / self._total if self._total else 0.0)
        model.draw_seeds(self.seed, self.draws)
        self.draws += training
        if self._rounded != self.arenas.bytes["params"]._version:
            model.round_weights()
            self._rounded = self.arenas.bytes["params"]._version
        return model

    def _mean_loss(self, model: Transformer) -> float:
        return float(model.head.loss) * self._total / self._count if self._count else 0.0
