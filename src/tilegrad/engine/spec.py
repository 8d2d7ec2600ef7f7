"""`StepSpec`, the specification of a training step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch

from ..kernels.attention.context import Ranks, RanksToBe
from ..kernels.muon import MuonConfig
from ..model.block import Recomputed
from ..model.config import ModelConfig
from ..model.layer import FULL, Declare, HeadProducts, Linear, States
from ..model.lora import LoraConfig
from ..model.transformer import Transformer, check_frozen, declare

Recompute = tuple[frozenset[Recomputed], ...]  # for each block, what its backward recomputes; (): nothing
Shard = Literal["none", "optimizer", "all"]
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The model, the largest batch, how the step is computed, and the ranks: there are `world` ranks, and `context` of them
    share each sequence. `lora` adds adapters and freezes every other parameter. Parameters whose name matches a pattern of
    `freeze` (fnmatch) are frozen too. With `invariant`, the bits of a row of activations depend only on the tokens of its
    sequence up to that row. A training step may use an attention window of `windows` instead of the model's; None is no window.
    With accumulate=False, a step has one micro-batch.

    >>> import torch, tilegrad
    >>> from dataclasses import replace
    >>> from tilegrad.engine.planning import plan_model
    >>> spec = StepSpec(tilegrad.presets()["tiny"].model, 8, 64, torch.float32, torch.device("cpu"))
    >>> plan_model(replace(spec, world=4)).peak_bytes < plan_model(spec).peak_bytes
    True
    """

    config: ModelConfig
    batch_size: int
    seq_len: int
    dtype: torch.dtype
    device: torch.device
    recompute: Recompute = ()
    linear: Linear = "plain"
    deterministic: bool = True
    world: int = 1
    shard: Shard = "optimizer"
    bucket_bytes: int = BUCKET_BYTES
    context: int = 1
    documents: int = 0  # the most documents in a packed row; 0: a row is one sequence
    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()
    invariant: bool = False
    muon: MuonConfig | None = None  # None: AdamW for every parameter
    windows: tuple[int | None, ...] = ()
    ema: float = 0.0  # the decay of an average of the weights; 0: none
    states: States = FULL
    head: HeadProducts = "plain"
    accumulate: bool = True

    @property
    def shares_gradients(self) -> bool:
        """Whether gradients share memory with activations: nothing adds to them after the backward."""
        return not self.accumulate and self.world == 1

    @property
    def in_units(self) -> bool:
        """Whether a rank has the whole parameters and gradients of a block only while the block runs (dist/units.py)."""
        return self.world > 1 and self.shard == "all"

    def declare(
        self,
        ranks: Ranks | None = None,
        batch_size: int | None = None,
        local_seq_len: int | None = None,
        *,
        training: bool = True,
        accumulate: bool = True,
        window: int | Literal["model"] | None = "model",
    ) -> Transformer:
        """The model with handles instead of tensors, by default for the largest batch. `local_seq_len` is the number of tokens
        of each sequence on this rank. `ranks` share each sequence; without `ranks`, a model with context > 1 can only be
        traced. Evaluation (training=False) has no dropout and no float8. `window` is one of `windows`, or the model's."""
        config, linear, lora, head = self.config, self.linear, self.lora, self.head
        if window != "model" and window != config.window:
            config = replace(config, window=window)
        if not training:
            config, linear, head = replace(config, dropout=0.0), "plain", "plain"
            lora = None if lora is None else replace(lora, dropout=0.0)
        if ranks is None and self.context > 1:
            ranks = cast(Ranks, RanksToBe(self.context))
        at = Declare(
            config,
            batch_size or self.batch_size,
            local_seq_len or self.seq_len // self.context,
            self.dtype,
            self.device,
            accumulate=accumulate and not self.shares_gradients,
            linear=linear,
            deterministic=self.deterministic,
            context=ranks,
            documents=self.documents,
            lora=lora,
            freeze=self.freeze,
            invariant=self.invariant,
            windows=self.windows,
            states=replace(self.states, gradients="float32") if self.in_units else self.states,
            head=head,
            shares_gradients=self.shares_gradients,
        )
        model = declare(at, self.recompute)
        check_frozen(model, self.freeze)
        return model
