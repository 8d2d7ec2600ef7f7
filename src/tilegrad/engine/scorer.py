"""`Scorer` runs the forward of training in planned memory, without gradients.

    loss       the mean loss of a batch, with the same bits as Engine.evaluate
    logprobs   log p(target | the tokens up to this position), for each position

For example, a decoder samples tokens, and a scorer gives the log-probabilities of these tokens in the forward of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..kernels.cross_entropy.logprobs import token_logprobs_fwd, token_logprobs_workspace
from ..kernels.op import observe
from ..kernels.scratch import Scratch
from ..memory.planned.arena import MemoryPlan, plan_memory
from ..memory.planned.trace import bind, trace
from ..model.layer import Buffer, Declare
from ..model.transformer import Transformer, declare
from .batch import Batch, check_batch, check_spec, count_targets, load_batch
from .capture import CapturedProgram, keep, on_stream
from .inference import InferenceMemory, without_given
from .machine import check_fits, check_threads
from .spec import StepSpec


@dataclass(frozen=True, slots=True)
class Scoring:
    """A model, and the log-probabilities of the targets.       logprobs (N,)"""

    model: Transformer
    logprobs: Buffer
    scratch: Scratch

    @classmethod
    def declare(cls, spec: StepSpec, batch_size: int, seq_len: int) -> Scoring:
        config, lora = replace(spec.config, dropout=0.0), spec.lora
        at = Declare(
            config,
            batch_size,
            seq_len,
            spec.dtype,
            spec.device,
            documents=spec.documents,
            freeze=("*",),
            invariant=spec.invariant,
            lora=None if lora is None else replace(lora, dropout=0.0),
        )
        model = declare(at)
        shapes = token_logprobs_workspace(at.form(config.n_embd), model.head.w.value, invariant=at.invariant)
        return cls(
            model=model,
            logprobs=at.buffer("logprobs", (at.n,), at.accumulation_dtype, role="inputs"),  # read after the program
            scratch=at.scratch("logprobs", shapes),
        )

    def loss(self) -> None:
        self.model.head.forward(self.model.hidden_states())

    def score(self) -> None:
        n, head = self.model.hidden_states(), self.model.head
        token_logprobs_fwd(
            n,
            head.w.value,
            head.targets,
            logprobs=self.logprobs,
            invariant=head.invariant,
            softcap=head.terms.softcap,
            scratch=self.scratch,
        )


def plan_scorer(spec: StepSpec) -> MemoryPlan:
    """The memory plan of a scorer: weights, inputs, and the activations of one forward."""
    scoring = Scoring.declare(spec, spec.batch_size, spec.seq_len)

    def program() -> None:
        scoring.loss()
        if spec.config.loss == "cross_entropy":
            scoring.score()

    return plan_memory(trace(program, observe, [p.value for p in scoring.model.params.values()]))


class Scorer:
    """Computes losses and log-probabilities of batches of up to spec.batch_size × spec.seq_len tokens.

    >>> import torch
    >>> from tilegrad import Engine, ModelConfig
    >>> config = ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = Engine(config, batch_size=2, seq_len=4)
    >>> tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, -1]])
    >>> scorer = Scorer(engine.spec, engine.params)
    >>> scorer.loss(tokens, targets) == engine.evaluate(tokens, targets)
    True
    >>> logprobs = scorer.logprobs(tokens, targets)
    >>> logprobs.shape, float(logprobs[0, 2])
    (torch.Size([1, 3]), 0.0)
    """

    def __init__(self, spec: StepSpec, params: Mapping[str, Tensor]) -> None:
        """`params` by name are used in place if all are contiguous and have the planned dtype and device. Otherwise all are
        copied."""
        check_spec(spec)
        self.spec = spec
        declared = Scoring.declare(spec, spec.batch_size, spec.seq_len).model
        self.plan = without_given(plan_scorer(spec), declared.params, params)
        check_fits(self.plan.peak_bytes, spec.device)
        self._memory = InferenceMemory(self.plan, params)
        self._threads = torch.get_num_threads()
        self._bound: dict[tuple[int, int], tuple[Scoring, dict[str, CapturedProgram]]] = {}
        self._stream = torch.cuda.Stream(spec.device) if spec.device.type == "cuda" else None
        self._graph_pool = torch.cuda.graph_pool_handle() if self._stream is not None else None
        bind(declared, self._memory.view).fill_tables(spec.config)

    def loss(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Tensor | None = None) -> float:
        """The mean loss over the targets; 0 if the batch has no target."""
        scoring, programs, count = self._load(Batch(tokens, targets, cu_seqlens))
        self._run(scoring, programs, "loss")
        return float(scoring.model.head.loss) if count else 0.0

    def logprobs(self, tokens: Tensor, targets: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """log p(target) at each position, 0 where the target is −1.       tokens, targets, result (b, t)"""
        if self.spec.config.loss != "cross_entropy":
            raise ValueError(f"loss: got a model with {self.spec.config.loss!r}; accepted: 'cross_entropy'")
        scoring, programs, _ = self._load(Batch(tokens, targets, cu_seqlens))
        self._run(scoring, programs, "score")
        return scoring.logprobs.view(tokens.shape).clone()

    def _run(self, scoring: Scoring, programs: dict[str, CapturedProgram], program: Literal["loss", "score"]) -> None:
        """Run a program of `scoring`. On CUDA the second run captures a graph, which later runs replay."""
        run = getattr(scoring, program)
        if self._stream is None:
            run()
            return
        if program not in programs:
            programs[program] = CapturedProgram(run, [scoring.model], self._stream, self._graph_pool)
        with on_stream(self._stream):
            programs[program].run(capture=True)

    def _load(self, batch: Batch) -> tuple[Scoring, dict[str, CapturedProgram], int]:
        """(the scoring for the shape of this batch, with its inputs loaded; its captured programs; the number of targets)"""
        check_batch(batch, self.spec)
        check_threads(self._threads, self.spec.device)
        b, t = batch.tokens.shape
        if (b, t) not in self._bound:
            keep(self._bound, (b, t), (bind(Scoring.declare(self.spec, b, t), self._memory.view), {}))
        (scoring, programs), count = self._bound[b, t], count_targets(batch.targets)
        load_batch(scoring.model, batch, count)
        return scoring, programs, count
