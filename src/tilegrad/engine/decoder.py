"""`Decoder`: sequences that a model continues, in planned memory.

    prefill({slot: prompt})     reads prompts into the cache of their slots, and draws the next token of each
    submit()                    reads the token that each active slot drew last, and draws the next token
    finished()                  returns the tokens that were drawn, oldest first

The two programs, prefill and step (model/decoding.py), are traced and planned before anything is allocated. Sizes are fixed: a
slot has room for `capacity` tokens, and kernels read the number of tokens in a slot from `positions` on the device. So on CUDA
the step is one graph, captured when the step runs the second time. From then on a step allocates nothing on the device, and the
host reads tokens without waiting for the newest step. The prefill has one graph for each number of tokens, which is rounded up
(`prefill_rows`), so that prompts of many lengths share few graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.op import observe
from ..kernels.philox import signed
from ..memory.managed.pressure import memory_limit
from ..memory.planned.arena import MemoryPlan, plan_memory
from ..memory.planned.trace import bind, trace
from ..model.config import ModelConfig
from ..model.decoding import Decoding, declare_decoding
from ..model.layer import CacheSize
from ..model.lora import LoraConfig
from ..text.untrusted import shown
from .batch import LIMITS, check_invariant, check_sizes, write_documents
from .capture import CapturedProgram, RecordedProgram, keep, on_stream
from .inference import InferenceMemory, without_given
from .machine import check_device, check_threads, too_large, what_is_largest
from .recompute import most
from .sampling import Sampling
from .spec import StepSpec

_LEAST_PREFILL = 64  # on CUDA a prefill has a multiple of this many rows, or prefill_tokens rows
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}  # tokens that a prefill reads at once by default (`decoder_spec`)


class Prompt(NamedTuple):
    """sequence   the number of the sequence. The noise of a draw depends on this number, the seed and `draws`
    draws      how many tokens of the sequence were drawn before. This is 0 for a new sequence
    """

    tokens: Sequence[int]
    sequence: int = 0
    draws: int = 0
    sampling: Sampling = Sampling()


class Drawn(NamedTuple):
    """The tokens that these slots drew. A token is −1 if its logits were not finite."""

    slots: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The specification of a decoder: the model, its slots, the most tokens that one prefill reads, and how it is computed.
    With `penalties`, sequences may have a repetition penalty, which takes batch_size · vocab_size bytes."""

    config: ModelConfig
    batch_size: int
    capacity: int
    prefill_tokens: int
    dtype: torch.dtype
    device: torch.device
    penalties: bool = False
    lora: LoraConfig | None = None
    invariant: bool = False

    def declare(self, prefill_tokens: int | None = None) -> Decoding:
        """A program on handles: the prefill of `prefill_tokens` tokens, or the step if prefill_tokens is None."""
        return declare_decoding(
            self.config,
            CacheSize(self.batch_size, self.capacity),
            self.dtype,
            self.device,
            prefill_tokens=prefill_tokens,
            penalties=self.penalties,
            lora=self.lora,
            invariant=self.invariant,
        )


def decoder_spec(
    config: ModelConfig,
    batch_size: int,
    capacity: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    prefill_tokens: int | None = None,
    penalties: bool = False,
    lora: LoraConfig | None = None,
    invariant: bool = False,
) -> DecoderSpec:
    """A checked specification. prefill_tokens=None: enough tokens for the longest prompt, and for several short prompts."""
    device = torch.device(device)
    check_device(str(device))
    check_sizes(config, dtype, batch_size=batch_size, capacity=capacity)
    if prefill_tokens is None:
        prefill_tokens = max(capacity, batch_size, min(batch_size * capacity, PREFILL_TOKENS[device.type]))
    if prefill_tokens < capacity:
        raise ValueError(f"prefill_tokens: got {prefill_tokens}; accepted: at least capacity, {capacity}")
    check_invariant(StepSpec(config, batch_size, capacity, dtype, device, lora=lora, invariant=invariant))
    return DecoderSpec(config, batch_size, capacity, prefill_tokens, dtype, device, penalties, lora, invariant)


def plan_decoder(spec: DecoderSpec) -> MemoryPlan:
    """The memory plan of a decoder: weights, cache, state, and the activations of both programs."""
    prefill, step = spec.declare(spec.prefill_tokens), spec.declare()

    def program() -> None:
        prefill.run()
        step.run()

    weights = [p.value for p in prefill.model.params.values()]
    return plan_memory(trace(program, observe, (weights, prefill.model.blocks, prefill.sampler.state)))


@dataclass(frozen=True, slots=True)
class Slots:
    """The host's copies of `positions` and `draws` of the programs, and of four fields of `State` (model/decoding.py). Steps in
    flight count as done."""

    positions: Tensor
    draws: Tensor
    active: Tensor
    seeds: Tensor
    sequences: Tensor
    settings: Tensor

    @classmethod
    def empty(cls, batch_size: int) -> Slots:
        positions, draws, active, seeds, sequences = (torch.zeros(batch_size, dtype=torch.int64) for _ in range(5))
        settings = torch.tensor(Sampling().row(), dtype=torch.float32).repeat(batch_size, 1)
        return cls(positions, draws.fill_(-1), active, seeds, sequences, settings)

    def begin(self, slot: int, prompt: Prompt) -> None:
        """Set the slot to its state after a prefill: the prompt is in the cache, and the next token is drawn."""
        self.positions[slot], self.draws[slot], self.active[slot] = len(prompt.tokens), prompt.draws + 1, 1
        self.seeds[slot] = signed(prompt.sampling.seed)
        self.sequences[slot] = prompt.sequence
        self.settings[slot] = torch.tensor(prompt.sampling.row(), dtype=torch.float32)

    def end(self, slot: int) -> None:
        """Draw no more tokens in this slot. Until the slot's next prompt, steps compute its row from an arbitrary token, and
        nobody reads the result."""
        self.positions[slot], self.draws[slot], self.active[slot] = 0, -1, 0


def prefill_rows(tokens: int, spec: DecoderSpec) -> int:
    """The number of rows of a prefill of `tokens` tokens. On CUDA fewer than max(tokens / 4, _LEAST_PREFILL) rows are added, up
    to prefill_tokens rows in all. An added row reads token 0 and writes nothing to the cache."""
    if spec.device.type == "cpu":
        return tokens
    multiple = max(_LEAST_PREFILL, 1 << max(tokens.bit_length() - 3, 0))
    return min(-(-tokens // multiple) * multiple, spec.prefill_tokens)


def largest_batch(spec: DecoderSpec, limit: int | None = None) -> tuple[dict[str, int | None], str]:
    """The most slots whose plan takes at most `limit` bytes, as data and as a sentence. limit=None is the device's memory."""
    limit = memory_limit(spec.device) if limit is None else limit

    def nbytes(batch_size: int) -> int:
        tokens = max(spec.prefill_tokens, batch_size)
        return plan_decoder(replace(spec, batch_size=batch_size, prefill_tokens=tokens)).peak_bytes

    if limit is None:
        raise ValueError(f"fit: got {spec.device}, whose memory is unknown; accepted: a device that reports its memory")
    largest = most(lambda batch_size: batch_size <= LIMITS["batch_size"] and nbytes(batch_size) <= limit)
    return what_is_largest(largest, nbytes(largest) if largest else None, spec.capacity)


class Decoder:
    """The slots 0 … batch_size − 1, each with the cache of one sequence.

    >>> import torch
    >>> from tilegrad import Engine, ModelConfig
    >>> config = ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = Engine(config, batch_size=2, seq_len=4)
    >>> decoder = Decoder(config, engine.params, batch_size=2, capacity=8)
    >>> decoder.prefill({0: Prompt([1, 2, 3]), 1: Prompt([4], sequence=1)})
    >>> decoder.submit()
    >>> [len(drawn.tokens) for drawn in decoder.finished(wait=True)]
    [2, 2]
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, Tensor],
        batch_size: int,
        capacity: int,
        *,
        prefill_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        penalties: bool = False,
        lora: LoraConfig | None = None,
        invariant: bool = False,
        capture: bool = True,
    ) -> None:
        """params      by name; used in place if all are contiguous and have `dtype` and `device`, otherwise all are copied
        capacity    the most tokens of a sequence, prompt included; at most block_size
        device      by default the device of the parameters
        dtype       by default the dtype of the parameters
        penalties   whether prompts may have a repetition penalty
        invariant   True: in any batch, a token's logits have the bits of the training forward with invariant=True
        capture     False: a step runs op by op; it is not captured on CUDA, nor recorded on a CPU
        """
        first = params["wte.weight"]
        self.spec = spec = decoder_spec(
            config,
            batch_size,
            capacity,
            prefill_tokens=prefill_tokens,
            device=device or first.device,
            dtype=dtype or first.dtype,
            penalties=penalties,
            lora=lora,
            invariant=invariant,
        )
        self.batch_size, self.capacity = batch_size, capacity
        step = spec.declare()
        self.plan = without_given(plan_decoder(spec), step.model.params, params)
        refusal = too_large(self.plan.peak_bytes, spec.device)
        if refusal:
            raise ValueError(f"{refusal}; {largest_batch(spec)[1]}")
        self._memory = InferenceMemory(self.plan, params)
        self.arenas = self._memory.arenas
        self._step = bind(step, self._memory.view)
        self._state = self._step.sampler.state
        self._step.model.fill_tables(config)
        self._threads = torch.get_num_threads()
        self._prefills: dict[int, tuple[Decoding, CapturedProgram | None]] = {}
        self._slots = Slots.empty(batch_size)
        self._load_slots()
        self._results: deque[tuple[tuple[int, ...], Tensor, Tensor, torch.cuda.Event | None]] = deque()
        self._stream = torch.cuda.Stream(spec.device) if spec.device.type == "cuda" else None
        self._graph_pool = torch.cuda.graph_pool_handle() if self._stream is not None else None
        self._captured = self._program(self._run_step, self._step)
        self._recorded = RecordedProgram(self._step.run) if self._stream is None and capture else None
        self._capture = capture

    def prefill(self, prompts: Mapping[int, Prompt]) -> None:
        """Read prompts into their slots, which forget older sequences, and draw the next token of each prompt. Prompts are read
        in groups of at most `prefill_tokens` tokens; `finished` returns one `Drawn` for each group. If a group raises an error,
        the slots of this group are stopped, and the slots of earlier groups keep their prompts."""
        texts = {slot: self._checked_tokens(slot, prompt) for slot, prompt in prompts.items()}
        group: dict[int, Tensor] = {}
        for slot, text in texts.items():
            if group and sum(map(len, group.values())) + len(text) > self.spec.prefill_tokens:
                self._prefill_or_stop(group, prompts)
                group = {}
            group[slot] = text
        if group:
            self._prefill_or_stop(group, prompts)

    def submit(self) -> None:
        """Run one step of the active slots. On CUDA, `submit` waits for the device only once, to capture the step."""
        self._check_threads()
        slots = self._slots
        full = ((slots.positions >= self.capacity) & (slots.active > 0)).nonzero().flatten().tolist()
        if full:
            raise ValueError(
                f"slot {full[0]}: got {self.capacity} tokens, which fill its cache; prefill the slot with its last few "
                "tokens, or stop it"
            )
        with on_stream(self._stream):
            if self._captured is None:
                self._run_step()
            else:
                self._captured.run(capture=self._capture)
            self._record(tuple(slots.active.nonzero().flatten().tolist()))
        slots.positions.add_(slots.active)
        slots.draws.add_(slots.active)

    def stop(self, slots: Collection[int]) -> None:
        """Draw no more tokens in these slots until their next prefill."""
        for slot in slots:
            self._slots.end(slot)
        with on_stream(self._stream):
            self._load_slots()

    def finished(self, *, wait: bool | Literal["oldest"] = False) -> list[Drawn]:
        """Results of prefills and steps, oldest first, each once. wait=True waits for all results, wait="oldest" for one."""
        drawn: list[Drawn] = []
        while self._results and (wait is True or (wait == "oldest" and not drawn) or _is_done(self._results[0][3])):
            slots, tokens, logprobs, event = self._results.popleft()
            if event is not None:
                event.synchronize()
            all_tokens, all_logprobs = tokens.tolist(), logprobs.tolist()
            drawn.append(Drawn(slots, [all_tokens[i] for i in slots], [all_logprobs[i] for i in slots]))
        return drawn

    def _run_step(self) -> None:
        assert self._step.positions is not None
        if self._recorded is not None:
            self._recorded.run()
        else:
            self._step.run()
        self._feed()
        self._step.positions.add_(self._state.active)
        self._step.sampler.draws.add_(self._state.active)

    def _run_prefill(self, decoding: Decoding) -> None:
        decoding.run()
        self._feed()

    def _feed(self) -> None:
        """Make the drawn tokens the input of the next step."""
        torch.clamp(self._state.tokens, min=0, out=self._step.model.tokens.view(-1))

    def _load_slots(self) -> None:
        """Copy the slots from the host to the device. The copy runs after the steps in flight, which the values on the host
        already count as done."""
        slots, state = self._slots, self._state
        assert self._step.positions is not None
        self._step.positions.copy_(slots.positions)
        self._step.sampler.draws.copy_(slots.draws)
        for name in ("active", "settings", "seeds", "sequences"):
            getattr(state, name).copy_(getattr(slots, name))

    def _prefill_or_stop(self, texts: dict[int, Tensor], prompts: Mapping[int, Prompt]) -> None:
        try:
            self._prefill(texts, prompts)
        except BaseException:  # the caches of these slots have neither the old sequences nor the prompts
            self.stop(texts)
            raise

    def _prefill(self, texts: dict[int, Tensor], prompts: Mapping[int, Prompt]) -> None:
        """Read one group of prompts. `texts`: slot → the tokens of its prompt."""
        self._check_threads()
        lengths = torch.tensor([len(text) for text in texts.values()])
        ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        rows = prefill_rows(int(ends[-1]), self.spec)
        decoding, captured = self._bound_prefill(rows)
        packed, last, slots = decoding.model.packed, decoding.sampler.last, decoding.slots
        assert packed is not None and last is not None and slots is not None
        tokens, at_slots = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1)
        at, drawn = torch.zeros(self.batch_size, 1, dtype=torch.int64), torch.full((self.batch_size,), -1)
        with on_stream(self._stream):
            for (slot, text), begin, end in zip(texts.items(), ends.tolist(), ends.tolist()[1:], strict=False):
                tokens[begin:end] = text
                torch.arange(slot * self.capacity, slot * self.capacity + len(text), out=at_slots[begin:end])
                at[slot], drawn[slot] = end - 1, prompts[slot].draws
                self._slots.begin(slot, prompts[slot])
                if self._state.seen is not None:
                    seen = self._state.seen[slot]
                    seen.zero_().index_fill_(0, text.to(seen.device), 1)
            decoding.model.tokens.view(-1).copy_(tokens)
            write_documents(ends.to(torch.int32), ends=packed.cu_seqlens, positions=packed.positions)
            slots.copy_(at_slots)
            last.copy_(at)
            decoding.sampler.draws.copy_(drawn)
            self._load_slots()
            if captured is None:
                self._run_prefill(decoding)
            else:
                captured.run(capture=self._capture)
            self._record(tuple(texts))

    def _record(self, slots: tuple[int, ...]) -> None:
        tokens, logprobs = self._state.tokens, self._state.logprobs
        if self._stream is None:
            self._results.append((slots, tokens.clone(), logprobs.clone(), None))
            return
        event = torch.cuda.Event()
        on_host = [
            torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True) for x in (tokens, logprobs)
        ]
        event.record(self._stream)
        self._results.append((slots, on_host[0], on_host[1], event))

    def _program(self, run: Callable[[], None], decoding: Decoding) -> CapturedProgram | None:
        if self._stream is None:
            return None
        return CapturedProgram(run, [decoding.model], self._stream, self._graph_pool)

    def _bound_prefill(self, tokens: int) -> tuple[Decoding, CapturedProgram | None]:
        if tokens not in self._prefills:
            decoding = bind(self.spec.declare(tokens), self._memory.view)
            keep(self._prefills, tokens, (decoding, self._program(partial(self._run_prefill, decoding), decoding)))
        return self._prefills[tokens]

    def _checked_tokens(self, slot: int, prompt: Prompt) -> Tensor:
        vocab_size = self.spec.config.vocab_size
        if not 0 <= slot < self.batch_size:
            raise ValueError(f"slot: got {slot}; accepted: 0 … {self.batch_size - 1}")
        if not 1 <= len(prompt.tokens) <= self.capacity:
            raise ValueError(f"tokens: got {len(prompt.tokens)} in a prompt; accepted: 1 … capacity, {self.capacity}")
        tokens = np.asarray(prompt.tokens)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise ValueError(f"tokens: got {shown(prompt.tokens)}; accepted: a sequence of ints")
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(wrong):
            raise ValueError(f"tokens: got {wrong[0]}; accepted: 0 … {vocab_size - 1}")
        for name, number, limit in (("sequence", prompt.sequence, 1 << 63), ("draws", prompt.draws, 1 << 32)):
            if not 0 <= number < limit:
                raise ValueError(f"{name}: got {number}; accepted: 0 … {limit - 1}")
        if prompt.sampling.has_penalty and not self.spec.penalties:
            got = prompt.sampling.repetition_penalty
            raise ValueError(f"repetition_penalty: got {got}; accepted: 1.0, or any with Decoder(penalties=True)")
        return torch.from_numpy(tokens.astype(np.int64))

    def _check_threads(self) -> None:
        check_threads(self._threads, self.spec.device)


def _is_done(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()
