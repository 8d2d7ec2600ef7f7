"""A model in planned memory, and its step: forward, loss, backward, clip, AdamW.

Before the first step the model is declared on handles, traced and planned; then each role (params, grads, optimizer,
inputs, activations) is one allocation, `plan.peak_bytes` in all, and nothing is allocated any more. A smaller batch uses
the beginning of each buffer. Parameters of two and more dimensions lie first in their arena, so that weight decay and the
optimizer are one pass over a flat range each.

    loss = Σ over targets of nll / total_targets         so that micro-batches of any lengths add up to one large batch
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.adamw import adamw_step, global_norm
from ..kernels.residual import copy_fwd
from ..kernels.rope import rope_table
from ..memory.planned.arena import Arenas, MemoryPlan
from ..memory.planned.trace import bind
from ..model.config import ModelConfig
from ..model.transformer import Transformer, declare
from .budget import choose_recompute, plan_model

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
MAX_SKIPPED = 10


class NonFiniteError(RuntimeError):
    """Ten steps in a row had a loss or a gradient that was not finite."""


class Engine:
    """Trains one model. `params` and `grads` are views of the arenas by name; in bfloat16 both are float32 and the layers
    compute with rounded copies of the params.

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
        _check_sizes(model_config, batch_size, seq_len, dtype)
        self.config, self.batch_size, self.seq_len, self.dtype, self.seed = (
            model_config,
            batch_size,
            seq_len,
            dtype,
            seed,
        )
        self.device = torch.empty(0, device=device).device
        self.betas, self.eps, self.weight_decay, self.max_norm = betas, eps, weight_decay, max_norm
        form = (model_config, batch_size, seq_len, dtype, self.device)
        self.recompute = choose_recompute(*form, memory_budget)
        self.plan: MemoryPlan = plan_model(*form, self.recompute)
        self.arenas = Arenas(self.plan)
        self._bound: dict[tuple[int, int, bool, bool], Transformer] = {}
        self._threads = torch.get_num_threads()
        self._pending: Transformer | None = None
        self._total = self._count = 0
        self.steps = self.draws = self.skipped = self.skipped_in_a_row = 0
        self.loss = 0.0  # of the last forward: one that is not finite must not reach the weights

        model = self._model(batch_size, seq_len)
        self.params: dict[str, Tensor] = {name: p.master for name, p in model.params.items()}
        self.grads: dict[str, Tensor] = {name: p.grad for name, p in model.params.items()}
        self._flatten()
        self._initialise(model)

    # ── the step ──

    def forward(self, tokens: Tensor, targets: Tensor, total_targets: int | None = None) -> float:
        """The mean loss over this call's targets; 0 where there is none. `total_targets` is the whole step's count."""
        model = self._load(tokens, targets, total_targets)
        model.forward()
        self._pending = model
        return self._mean_loss(model)

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss without dropout and without a backward to follow."""
        model = self._load(tokens, targets, None, training=False)
        model.forward()
        self._pending, kept = None, self.loss
        value, self.loss = self._mean_loss(model), kept
        return value

    def backward(self) -> None:
        """Add d(Σ loss)/total_targets of the last forward to the gradients."""
        if self._pending is None:
            raise RuntimeError("backward: got no forward since the last backward; call forward(tokens, targets) first")
        model, self._pending = self._pending, None
        model.backward()

    def step(
        self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor], learning_rate: float | None = None
    ) -> float:
        """Forward and backward of one batch, or of a list of micro-batches as if they were one: gradients add to what is
        there. With a learning rate they take its place, and it ends with `optimizer_step`. Returns the mean loss."""
        if learning_rate is None:
            return self._accumulate(tokens, targets, accumulate=True)
        loss = self.gradients(tokens, targets)
        self.optimizer_step(learning_rate)
        return loss

    def gradients(self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor]) -> float:
        """`zero_gradients` and `step`, without the passes over memory that zeros would take: the first micro-batch writes
        the gradients."""
        return self._accumulate(tokens, targets, accumulate=False)

    def zero_gradients(self) -> None:
        self.arenas.bytes["grads"].zero_()

    def optimizer_step(self, learning_rate: float) -> float:
        """Clip to a global norm of `max_norm`, then AdamW. Returns the norm before clipping. A loss or gradient that is
        not finite changes neither weights nor moments; ten in a row raise."""
        global_norm(self._flat["grads"], norm=self._norm, scratch=self._optimizer_scratch)
        if not math.isfinite(self.loss):
            self._norm.fill_(math.nan)
        adamw_step(
            self._norm, learning_rate, self._decayed, self.weight_decay, self.max_norm, self.betas, self.eps,
            params=self._flat["params"], grads=self._flat["grads"], m=self._flat["m"], v=self._flat["v"],
            step=self._adam_step, scratch=self._optimizer_scratch,
        )  # fmt: skip
        norm = float(self._norm)
        self._rounded = -1  # torch's fused AdamW does not count as a change of the arena
        self.steps += 1
        if math.isfinite(norm):
            self.skipped_in_a_row = 0
            return norm
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise NonFiniteError(
                f"the loss or the gradient was not finite in {MAX_SKIPPED} steps in a row (loss {self.loss}, norm {norm}): "
                "weights are as before the first of them; lower the learning rate or look at the data"
            )
        return norm

    # ── state, for checkpoints ──

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as views of the arenas."""
        moments = {f"{kind}.{name}": self._moment(kind, name) for kind in ("m", "v") for name in self.params}
        return {**self.params, **moments, "adam_step": self._adam_step}

    def state(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("seed", "steps", "draws", "skipped", "skipped_in_a_row")}

    def restore(self, state: dict[str, int]) -> None:
        for name in self.state():
            setattr(self, name, int(state[name]))

    # ── inside ──

    def _accumulate(
        self, tokens: Tensor | Sequence[Tensor], targets: Tensor | Sequence[Tensor], *, accumulate: bool
    ) -> float:
        batches = list(zip(_listed(tokens), _listed(targets), strict=True))
        total = sum(self._targets_in(y) for _, y in batches)
        if not batches and not accumulate:
            self.zero_gradients()
        loss = 0.0
        for i, (x, y) in enumerate(batches):
            model = self._load(x, y, total, accumulate=accumulate or i > 0)
            model.step()
            loss += self._mean_loss(model) * (self._count / total if total else 0.0)
        self._pending = None
        self.loss = loss
        return loss

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

    def _load(
        self, tokens: Tensor, targets: Tensor, total: int | None, *, training: bool = True, accumulate: bool = True
    ) -> Transformer:
        b, t = self._check_batch(tokens, targets)
        model = self._model(b, t, training=training, accumulate=accumulate)
        model.tokens.copy_(tokens)
        model.head.targets.view(b, t).copy_(targets)
        self._count = self._targets_in(targets)
        self._total = self._count if total is None else total
        if self._total < self._count:
            raise ValueError(f"total_targets: got {total}; accepted: at least the {self._count} targets of this call")
        model.head.inv_total.fill_(1.0 / self._total if self._total else 0.0)
        for i, seed in enumerate(model.seeds):
            seed.fill_(_drop_seed(self.seed, self.draws, i))
        self.draws += training
        self._round_weights(model)
        return model

    def _mean_loss(self, model: Transformer) -> float:
        self.loss = float(model.head.loss) * self._total / self._count if self._count else 0.0
        return self.loss

    def _round_weights(self, model: Transformer) -> None:
        """The compute copies of the weights, where there are any, made anew when a master has changed."""
        if self._rounded == self.arenas.bytes["params"]._version:
            return
        for p in model.params.values():
            if p.value.dtype != p.master.dtype:
                copy_fwd(p.master, y=p.value)
        self._rounded = self.arenas.bytes["params"]._version

    def _flatten(self) -> None:
        """Flat ranges over the arenas: the masters, their gradients and moments have one layout."""
        wide = torch.promote_types(self.dtype, torch.float32)
        offsets = self.plan.arenas["params"].offsets
        last = max(self.params, key=lambda name: offsets[name])
        n = offsets[last] // wide.itemsize + self.params[last].numel()
        self._offsets = {name: offsets[name] // wide.itemsize for name in self.params}
        self._decayed = min((self._offsets[name] for name, p in self.params.items() if p.ndim < 2), default=n)
        handles = self.plan.trace.handles.values()
        optimizer: dict[str, Any] = {h.name: self.arenas.view(h) for h in handles if h.role == "optimizer"}
        self._flat: dict[str, Tensor] = {kind: optimizer[f"optimizer.{kind}"] for kind in ("m", "v")}
        for role in ("params", "grads"):
            self._flat[role] = self.arenas.bytes[role][: n * wide.itemsize].view(wide)
        self._adam_step: Tensor = optimizer["optimizer.step"]
        self._norm: Tensor = optimizer["optimizer.norm"]
        self._optimizer_scratch: dict[str, Tensor] = {
            name.removeprefix("optimizer.scratch."): x
            for name, x in optimizer.items()
            if name.startswith("optimizer.scratch.")
        }
        self._rounded = -1

    def _moment(self, kind: str, name: str) -> Tensor:
        start, p = self._offsets[name], self.params[name]
        return self._flat[kind][start : start + p.numel()].view(p.shape)

    def _initialise(self, model: Transformer) -> None:
        """N(0, 0.02), projections onto the residual stream over √(2·n_layer); norms 1, biases 0."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, p in self.params.items():
            if ".ln" in f".{name}":
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            elif name.endswith("bias"):
                p.zero_()
            else:
                onto_stream = name.endswith(("attn.proj.weight", "ffn.down.weight"))
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if onto_stream else 0.02
                for part in p.view(-1).split(1 << 20):  # no second copy of a large matrix, on any device
                    part.copy_(torch.randn(part.shape, generator=generator).mul_(std))
        for block in model.blocks[:1]:
            rope = block.attention.rope
            if rope is not None:
                rope_table(self.config.rope_theta, rope.head_dim, self.config.block_size, cos=rope.cos, sin=rope.sin)

    def _targets_in(self, targets: Tensor) -> int:
        return int((targets >= 0).sum())

    def _check_batch(self, tokens: Tensor, targets: Tensor) -> tuple[int, int]:
        for name, x in (("tokens", tokens), ("targets", targets)):
            if (
                not isinstance(x, Tensor)
                or x.ndim != 2
                or x.dtype not in (torch.int64, torch.int32, torch.uint8, torch.int16)
            ):
                got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name}: got {got}; accepted: a tensor of ints, (b, t)")
        b, t = tokens.shape
        if not (1 <= b <= self.batch_size and 1 <= t <= self.seq_len):
            limit = f"(1 … {self.batch_size}, 1 … {self.seq_len})"
            raise ValueError(
                f"tokens: got shape {tuple(tokens.shape)}; accepted: (b, t) in {limit}, as the engine was planned"
            )
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets: got shape {tuple(targets.shape)}; accepted: that of tokens, {tuple(tokens.shape)}"
            )
        if tokens.device.type == "cpu" or os.environ.get("TILEGRAD_CHECK") == "1":
            _check_range("tokens", tokens, 0, self.config.vocab_size)
            _check_range("targets", targets, -1, self.config.vocab_size)
        return b, t


def _check_range(name: str, x: Tensor, low: int, vocab_size: int) -> None:
    smallest, largest = (int(end) for end in x.aminmax())
    if smallest >= low and largest < vocab_size:
        return
    wrong = ((x < low) | (x >= vocab_size)).nonzero()[0].tolist()
    value = int(x[tuple(wrong)])
    ignored = "; −1 marks a position without a target" if name == "targets" else ""
    torch_like = " (torch's −100 means nothing here)" if value == -100 else ""
    raise ValueError(f"{name}: got {value} at {wrong}{torch_like}; accepted: 0 … {vocab_size - 1}{ignored}")


def _check_sizes(config: ModelConfig, batch_size: int, seq_len: int, dtype: torch.dtype) -> None:
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: got {value!r}; accepted: an int ≥ 1")
    if seq_len > config.block_size:
        raise ValueError(f"seq_len: got {seq_len}; accepted: at most block_size, {config.block_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype}; accepted: {', '.join(map(str, _DTYPES))}")


def _listed(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def _drop_seed(seed: int, draw: int, layer: int) -> int:
    digest = hashlib.sha256(f"{seed}:{draw}:{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
