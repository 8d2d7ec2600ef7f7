"""Decoders for tests of generation: one reads the whole text again for each token, one follows a script.

Both behave like the decoder of engine/decoder.py on CUDA: a result is there only after a wait, and a full slot refuses a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from tilegrad.engine.decoder import Drawn, Prompt
from tilegrad.model import reference
from tilegrad.model.config import ModelConfig
from tilegrad.model.reference import logits_of

Draw = Callable[[int, list[int], Prompt, int], tuple[int, float]]  # slot, tokens read, prompt, tokens drawn so far


class SlotsOf:
    """The interface of a Decoder over any function that draws a token."""

    def __init__(self, batch_size: int, capacity: int, draw: Draw, device: str = "cuda") -> None:
        self.batch_size, self.capacity, self._draw = batch_size, capacity, draw
        self.spec = SimpleNamespace(device=SimpleNamespace(type=device))
        self.read: list[list[int]] = []  # every prompt
        self.steps = self.drawn = 0
        self._slots: dict[int, tuple[Prompt, list[int], int]] = {}  # prompt, tokens in the cache, tokens drawn
        self._next: dict[int, int] = {}
        self._results: list[Drawn] = []

    def prefill(self, prompts: Mapping[int, Prompt]) -> None:
        for slot, prompt in prompts.items():  # each prompt has a result
            assert 0 <= slot < self.batch_size and 1 <= len(prompt.tokens) <= self.capacity
            self.read.append(list(prompt.tokens))
            self._slots[slot] = prompt, list(prompt.tokens), prompt.draws
            self._results.append(self._drawn([slot]))

    def submit(self) -> None:
        self.steps += 1
        for slot, (_, tokens, _) in self._slots.items():
            assert len(tokens) < self.capacity, f"slot {slot} is full"
            tokens.append(self._next[slot])
        self._results.append(self._drawn(self._slots))

    def stop(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def finished(self, *, wait: bool | str = False) -> list[Drawn]:
        done, self._results = (self._results, []) if wait else ([], self._results)
        return done

    def _drawn(self, slots: Iterable[int]) -> Drawn:
        slots, tokens, logprobs = tuple(slots), [], []
        for slot in slots:
            prompt, cached, draws = self._slots[slot]
            token, logprob = self._draw(slot, cached, prompt, draws)
            self._slots[slot] = prompt, cached, draws + 1
            self._next[slot] = max(token, 0)
            tokens.append(token)
            self.drawn += 1
            logprobs.append(logprob)
        return Drawn(slots, tokens, logprobs)


class ReferenceDecoder(SlotsOf):
    """Decodes with the reference model, without a cache. Its noise is torch's, by seed, sequence and draw."""

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Tensor], batch_size: int, capacity: int, **_: object
    ) -> None:
        self._config, self._params = config, params
        super().__init__(batch_size, capacity, self._sample)

    def _sample(self, _slot: int, cached: list[int], prompt: Prompt, draws: int) -> tuple[int, float]:
        n = reference.hidden_states(self._params, torch.tensor([cached]), self._config)[0, -1]
        logits = logits_of(self._params, n, self._config).double()
        if not bool(logits.isfinite().all()):
            return -1, 0.0
        how = prompt.sampling
        scores = logits / how.temperature if how.temperature else logits
        if how.temperature:
            chance = torch.Generator().manual_seed(hash((how.seed, prompt.sequence, draws)) % (1 << 63))
            scores = scores - torch.rand(len(scores), dtype=torch.float64, generator=chance).log().neg().log()
        token = int(scores.argmax())
        return token, float(logits.log_softmax(-1)[token])


Script = Callable[[int, int], int]  # sequence, tokens drawn so far → token


class ScriptedDecoder(SlotsOf):
    """Writes the tokens of a script, whatever the prompt is."""

    def __init__(self, batch_size: int, capacity: int, script: Script, device: str = "cuda") -> None:
        super().__init__(batch_size, capacity, lambda _s, _c, p, draws: (script(p.sequence, draws), -0.5), device)


def scripted(
    script: Script, *, device: str = "cpu", kind: type[ScriptedDecoder] = ScriptedDecoder
) -> Callable[..., ScriptedDecoder]:
    """A function that replaces the class `Decoder` and makes scripted ones."""

    def make(_config: ModelConfig, _params: object, batch_size: int, capacity: int, **_: object) -> ScriptedDecoder:
        return kind(batch_size, capacity, script, device)

    return make
