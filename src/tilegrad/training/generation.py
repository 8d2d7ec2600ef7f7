"""Text from a model: prompts of any lengths share the slots of a `Decoder` (engine/decoder.py).

    a sequence ends         →  prefill the next prompt in its slot; the other slots continue
    cache of a slot is full →  the window slides: prefill the last ⌈capacity / 2⌉ tokens of the sequence, from position 0 on

The random number for a token depends on the seed, the number of its sequence and the number of tokens drawn before it. So the
other sequences of the batch change a sequence only by rounding, and with `invariant` not at all.

On CUDA the host submits up to three steps before it reads the first result. Tokens after the end of a sequence are ignored.

A sequence ends at EOS, at a stop string or after max_tokens. A stop string may be split over tokens. Text that could be the
beginning of a stop string is held back, and so is an incomplete character.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor

from ..data.documents import check_surrogates
from ..data.tokenizer import TextStream, Tokenizer, text_after
from ..engine.batch import check_invariant
from ..engine.decoder import Decoder, Drawn, Prompt
from ..engine.machine import check_device
from ..engine.sampling import Sampling
from ..engine.spec import StepSpec
from ..kernels.checks import is_count
from ..model.config import ModelConfig
from ..model.lora import LoraConfig
from ..text.spelling import dtype_name
from ..text.untrusted import naming, shown
from .config import DTYPES
from .generated import Finish, Generated, Piece

if TYPE_CHECKING:
    from .api import TrainedModel

Prompts = str | Iterable[str | Iterable[int]]  # a text, or several texts and token lists
BATCH_SIZE = 32  # sequences at a time, by default
_AHEAD = {"cuda": 3}  # most steps in flight; 1 on other devices


class NonFiniteLogits(ValueError):
    """The weights diverged: no token can be drawn."""


class WindowSlides(UserWarning):
    """A sequence is longer than block_size."""


class SamplingSettings(TypedDict, total=False):
    """How tokens are drawn (engine/sampling.py)."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


class ModelSettings(SamplingSettings, total=False):
    """How tokens are computed and drawn."""

    device: torch.device | str | None
    dtype: torch.dtype | str | None
    invariant: bool


class Settings(ModelSettings, total=False):
    """Keyword arguments of `tilegrad.generate` and `tilegrad.stream`."""

    stop: str | Sequence[str]
    eos: bool
    num_samples: int
    batch_size: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to generate: its prompt, how tokens are drawn, and where it ends."""

    tokens: Sequence[int]
    max_tokens: int
    settings: Sampling
    sequence: int = 0
    eos: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


class StopAt:
    """Cuts a text before the stop string that ends first. The result does not depend on how the text is split into pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._withheld, self.found = stop, "", False

    def add(self, text: str) -> str:
        """Add text, and return the text that can't be part of a stop string."""
        if self.found or not self._stop:
            return "" if self.found else text
        withheld = self._withheld + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := withheld.find(stop)) >= 0]
        if ends:
            self.found, self._withheld = True, ""
            return withheld[: min(ends)[1]]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if withheld.endswith(stop[:n])), default=0)
        self._withheld = withheld[len(withheld) - keep :]
        return withheld[: len(withheld) - keep]

    def rest(self) -> str:
        withheld, self._withheld = self._withheld, ""
        return withheld


class _Sequence:
    """A sequence in a slot."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, capacity: int, *, stream: bool) -> None:
        self.request, self.tokens = request, list[int]()
        self.finish: Finish | None = None
        self.submitted = self.cached = 0  # tokens drawn or being drawn, and tokens in the cache
        self._capacity, self._tokenizer = capacity, tokenizer
        self._stop = StopAt(request.stop)
        self._text = None
        if tokenizer is not None and (stream or request.stop):
            self._text = TextStream(tokenizer, after=request.tokens)

    @property
    def can_step(self) -> bool:
        return self.submitted < self.request.max_tokens and self.cached < self._capacity

    @property
    def slides(self) -> bool:
        """Whether the window must slide now: the cache is full, and the host has read all drawn tokens."""
        all_read = self.submitted == len(self.tokens) < self.request.max_tokens
        return all_read and self.cached == self._capacity

    def prompt(self) -> Prompt:
        """The tokens to prefill when the sequence begins or its window slides."""
        drawn, all_tokens = len(self.tokens), [*self.request.tokens, *self.tokens]
        window = all_tokens[-(_tokens_kept(self._capacity) if drawn else self._capacity) :]
        self.submitted, self.cached = self.submitted + 1, len(window)
        return Prompt(window, self.request.sequence, drawn, self.request.settings)

    def step(self) -> None:
        self.submitted, self.cached = self.submitted + 1, self.cached + 1

    def add(self, token: int, logprob: float) -> Piece:
        if token < 0:
            raise NonFiniteLogits("logits: got values that are not finite; use weights from before the run diverged")
        self.tokens.append(token)
        text = ""
        if token in self.request.eos:
            self.finish = "eos"
        elif self._text is not None:
            text = self._stop.add(self._text.add(token))
            self.finish = "stop" if self._stop.found else None
        if self.finish is None and len(self.tokens) == self.request.max_tokens:
            self.finish = "length"
        if self._text is not None and self.finish in ("eos", "length"):
            text += self._stop.add(self._text.rest()) + self._stop.rest()
        elif self.finish is not None and self._text is None and self._tokenizer is not None:
            text = text_after(self._tokenizer, self.tokens[: -1 if self.finish == "eos" else None], self.request.tokens)
        return Piece(self.request.sequence, text, token, logprob, self.finish)


def write(
    decoder: Decoder, requests: Iterable[Request], tokenizer: Tokenizer | None, *, stream: bool = True
) -> Iterator[Piece]:
    """Yields the tokens of all requests as they are drawn. Without `stream`, the last token of a sequence has all of its text.
    Without a tokenizer there is no text."""
    waiting, slots = iter(requests), dict[int, _Sequence]()
    active = set[int]()  # slots that a step draws tokens for
    # slot → the sequences whose results are not read yet, in order
    pending: dict[int, deque[_Sequence]] = {slot: deque() for slot in range(decoder.batch_size)}
    ahead = _AHEAD.get(decoder.spec.device.type, 1)
    try:
        while True:
            prefilled = {slot: sequence for slot, sequence in slots.items() if sequence.slides}
            for slot in pending:
                if slot not in slots and (request := next(waiting, None)) is not None:
                    prefilled[slot] = slots[slot] = _Sequence(request, tokenizer, decoder.capacity, stream=stream)
            if prefilled:
                decoder.prefill({slot: sequence.prompt() for slot, sequence in prefilled.items()})
                active |= prefilled.keys()
                for slot, sequence in prefilled.items():
                    pending[slot].append(sequence)
            steps = {slot: sequence for slot, sequence in slots.items() if sequence.can_step}
            if steps and max(map(len, pending.values())) < ahead:
                if active - steps.keys():
                    decoder.stop(active - steps.keys())
                active = set(steps)
                decoder.submit()
                for slot, sequence in steps.items():
                    sequence.step()
                    pending[slot].append(sequence)
            elif any(pending.values()):
                yield from _pieces(decoder.finished(wait="oldest"), pending)
                slots = {slot: sequence for slot, sequence in slots.items() if sequence.finish is None}
            else:
                return
    finally:  # a caller may end early, and write again with the same decoder
        decoder.finished(wait=True)
        decoder.stop(active)


def _pieces(results: Iterable[Drawn], pending: dict[int, deque[_Sequence]]) -> Iterator[Piece]:
    """The tokens of sequences that have not ended."""
    for drawn in results:
        for slot, token, logprob in zip(drawn.slots, drawn.tokens, drawn.logprobs, strict=True):
            sequence = pending[slot].popleft()
            if sequence.finish is None:
                yield sequence.add(token, logprob)


def draw(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    prompt: Sequence[int],
    max_tokens: int,
    *,
    eos: frozenset[int] = frozenset(),
    lora: LoraConfig | None = None,
    **sampling: Unpack[SamplingSettings],
) -> Iterator[int]:
    """Yields the tokens after a prompt as they are drawn, without EOS. lora: the configuration of the adapters in params."""
    _check_count("max_tokens", max_tokens)
    request = Request(prompt, max_tokens, Sampling(**sampling), eos=eos)
    capacity = min(config.block_size, len(prompt) + max_tokens - 1)
    decoder = Decoder(config, params, 1, capacity, penalties=request.settings.has_penalty, lora=lora)
    for piece in write(decoder, [request], None):
        if piece.finish != "eos":
            yield piece.token


class Generation:
    """Prompts that a model continues. The constructor checks its arguments; memory is allocated when the first piece is drawn.
    `warning` says what happens to sequences that do not fit into block_size."""

    def __init__(
        self,
        model: TrainedModel,
        prompts: Prompts,
        *,
        max_tokens: int = 80,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        eos: bool = True,
        seed: int = 0,
        num_samples: int = 1,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        invariant: bool = False,
    ) -> None:
        _check_count("max_tokens", max_tokens)
        _check_count("num_samples", num_samples)
        if batch_size is not None:
            _check_count("batch_size", batch_size)
        self.sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        self.model, self.max_tokens, self.num_samples, self.invariant = model, max_tokens, num_samples, invariant
        self.prompts, self.encoded = encode_prompts(model, prompts)
        self.eos = model.eos_token_ids if eos else frozenset[int]()
        self.stop = _stops(stop)
        self.sequences = len(self.prompts) * num_samples
        self.batch_size = max(1, min(self.sequences, BATCH_SIZE if batch_size is None else batch_size))
        self.device, self.dtype = place(model, device, dtype)
        check_invariant(StepSpec(model.config, 1, 1, self.dtype, self.device, invariant=invariant))
        longest = max(map(len, self.encoded), default=1)
        self.capacity = min(model.config.block_size, longest + max_tokens - 1)  # the last token is not read
        self.warning = sliding(model.config, longest, max_tokens) if self.prompts else None

    def pieces(self, *, stream: bool = True) -> Iterator[Piece]:
        """Yields the tokens of all sequences as they are drawn."""
        if not self.prompts:
            return
        model, settings = self.model, self.sampling
        decoder = Decoder(
            model.config,
            model.params,
            self.batch_size,
            self.capacity,
            device=self.device,
            dtype=self.dtype,
            penalties=settings.has_penalty,
            invariant=self.invariant,
        )
        requests = (
            Request(tokens, self.max_tokens, settings, i * self.num_samples + sample, self.eos, self.stop)
            for i, tokens in enumerate(self.encoded)
            for sample in range(self.num_samples)
        )
        yield from write(decoder, requests, model.tokenizer, stream=stream)

    def results(self, *, logprobs: bool = False) -> Iterator[Generated]:
        """Yields the sequences in order, each once all sequences before it are complete."""
        parts: dict[int, list[Piece]] = {}
        done = 0
        for piece in self.pieces(stream=False):
            parts.setdefault(piece.sequence, []).append(piece)
            while done in parts and parts[done][-1].finish is not None:
                yield self._result(parts.pop(done), logprobs=logprobs)
                done += 1

    def _result(self, pieces: list[Piece], *, logprobs: bool) -> Generated:
        finish = pieces[-1].finish
        assert finish is not None
        return Generated(
            self.prompts[pieces[0].sequence // self.num_samples],
            "".join(piece.text for piece in pieces),
            tuple(piece.token for piece in pieces),
            tuple(piece.logprob for piece in pieces) if logprobs else None,
            finish,
        )


def place(
    model: TrainedModel, device: torch.device | str | None, dtype: torch.dtype | str | None
) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of generation. device=None: the device of the weights. dtype=None: bfloat16 for float32 weights on
    CUDA, otherwise the dtype of the weights."""
    weight = model.params["wte.weight"]
    check_device(str(weight.device if device is None else device))
    at = torch.device(weight.device if device is None else device)
    if dtype is None:
        return at, torch.bfloat16 if at.type == "cuda" and weight.dtype == torch.float32 else weight.dtype
    if dtype_name(dtype) not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}; accepted: {', '.join(DTYPES)}")
    return at, DTYPES[dtype_name(dtype)]


def _check_count(name: str, value: int) -> None:
    if not is_count(value):
        raise ValueError(f"{name}: got {value!r}; accepted: an int ≥ 1")


def encode_prompts(
    model: TrainedModel, prompts: Prompts, name: str = "prompts"
) -> tuple[list[str | tuple[int, ...]], list[list[int]]]:
    """The prompts as a list, and the tokens of each prompt. `name` is the caller's argument, for errors."""
    listed = _listed(prompts, name)
    names = [name.removesuffix("s")] if len(listed) == 1 else [f"{name}[{i}]" for i in range(len(listed))]
    return listed, [_encoded(model, *prompt) for prompt in zip(listed, names, strict=True)]


def _listed(prompts: Prompts, name: str) -> list[str | tuple[int, ...]]:
    listed: list[str | tuple[int, ...]] = []
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{name}: got {prompts!r}; accepted: a text, or a list of texts and of token lists")
    for i, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if not isinstance(prompt, str | Iterable):
            raise ValueError(
                f"{name}: got a list with {prompt!r}; accepted: a text, or a list of texts and of token lists"
            )
        try:
            listed.append(prompt if isinstance(prompt, str) else tuple(map(operator.index, prompt)))
        except TypeError as error:
            raise ValueError(f"{name}[{i}]: got {prompt!r}; accepted: a text, or a list of tokens") from error
    return listed


def check_text(name: str, text: str) -> None:
    """Refuse text that no tokenizer reads. Python gives a byte of an argument or of stdin that is not UTF-8 as half of a
    surrogate pair."""
    with naming(name):
        check_surrogates(text, shown(text))


def _encoded(model: TrainedModel, prompt: str | tuple[int, ...], name: str) -> list[int]:
    if isinstance(prompt, str):
        check_text(name, prompt)
    tokens = [int(token) for token in model.tokenizer.encode(prompt)] if isinstance(prompt, str) else [*prompt]
    if not tokens:
        raise ValueError(f"{name}: got {prompt!r}; accepted: a text of at least one token")
    most = model.config.vocab_size - 1
    beyond = next((token for token in tokens if not 0 <= token <= most), None)
    if beyond is not None:
        raise ValueError(f"{name}: got the token {beyond}; accepted: 0 … {most}, the model's vocabulary")
    return tokens


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: got {text!r}; accepted: a text of at least one character, or a list of such texts")
        check_text("stop", text)
    return stops


def sliding(config: ModelConfig, prompt_tokens: int, max_tokens: int) -> str | None:
    """The warning if a sequence does not fit into block_size, else None. The last token needs no room: it is not read."""
    size = config.block_size
    if prompt_tokens + max_tokens - 1 <= size:
        return None
    cut = f"prompt: got {prompt_tokens:,} tokens, and only the last {size:,} are read; " if prompt_tokens > size else ""
    return (
        f"{cut}{prompt_tokens + max_tokens:,} tokens are more than block_size, {size:,}: the window slides, and a token "
        f"attends to the last {_tokens_kept(size):,} to {size:,} before it"
    )


def _tokens_kept(capacity: int) -> int:
    """How many tokens stay in the window when it slides."""
    return (capacity + 1) // 2
