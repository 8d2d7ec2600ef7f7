"""Runs from Python: `tilegrad.train`, `load`, `generate`, `stream`, `evaluate`, `presets`. A run's modules are imported on
first use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ..model.config import PRESETS, ModelConfig
from .config import RunConfig, Sections
from .sections import preset_run, read_toml

if TYPE_CHECKING:
    from ..data.chat_template import ChatTemplate
    from ..data.documents import Show
    from ..data.tokenizer import Tokenizer
    from .evaluation import Evaluation
    from .generated import Generated, Piece
    from .generation import Generation, Prompts, SamplingSettings, Settings
    from .loop import RunResult
    from .start import StrPath


def train(
    config: RunConfig | Sections | StrPath | None = None,
    out: StrPath | None = None,
    *,
    resume: StrPath | None = None,
    show: Show | None = None,
) -> RunResult:
    """Train a run in the folder `out`, as `tilegrad train` does, and return its folder, its losses and its best checkpoint.

    config   a TOML file's name, its sections as a dictionary, or a RunConfig; None: the preset tiny, or the run in `resume`
    out      by default runs/NAME, with the name of the file or the preset, or "run" for a RunConfig
    resume   a run's folder, or a checkpoint in it, to continue; `config` may change only keys that affect no past step
    show     is called with each event and its numbers: `show=print`

    Ctrl-C and SIGTERM end the run after the current step and save it; the result's `stopped_by` names the signal.

    >>> import tempfile, tilegrad
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> result = tilegrad.train(small, out=f"{tempfile.mkdtemp()}/small")
    >>> result.steps, result.stopped_by, result.report.name
    (4, None, 'report.html')
    """
    from ..data.documents import quiet
    from .run import train as train_in

    show = show or quiet
    if config is None or isinstance(config, Mapping):
        return train_in(config or {}, out, resume=resume, show=show)
    if isinstance(config, RunConfig):
        return train_in(config, out, resume=resume, name="run", show=show)
    file = Path(config)
    return train_in(read_toml(file), out, resume=resume, where=str(file), name=file.stem, show=show)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model with its weights and its tokenizer. `params` are float32 (float64 after a float64 run), by name.
    `eos_token_ids` are the tokens that end a text. `weights` says which weights were loaded: "raw", "averaged"
    (optimizer.ema), or "mean of 3 checkpoints"."""

    config: ModelConfig
    params: dict[str, Tensor]
    tokenizer: Tokenizer
    step: int  # steps done when the weights were saved
    checkpoint: Path
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: ChatTemplate | None = None
    weights: str = "raw"

    def generate(self, prompt: str, max_tokens: int = 80, **settings: Unpack[Settings]) -> str:
        """The prompt and its continuation. `settings` are keywords of `tilegrad.generate`, which also takes several
        prompts."""
        from .generation import Generation

        generation = Generation(self, prompt, max_tokens=max_tokens, **settings)
        if generation.sequences > 1:
            raise ValueError(f"num_samples: got {generation.num_samples}; accepted: 1, or more with tilegrad.generate")
        _warn(generation)
        (result,) = generation.results()
        return prompt + result.text

    def tokens(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop: Collection[int] = (),
        **settings: Unpack[SamplingSettings],
    ) -> Iterator[int]:
        """Yields the tokens that follow a prompt, up to the first token that is in `stop`, which is left out."""
        from .generation import Generation

        model = replace(self, eos_token_ids=frozenset(stop))
        for piece in Generation(model, [prompt], max_tokens=max_tokens, **settings).pieces():
            if piece.finish != "eos":
                yield piece.token

    @torch.no_grad()
    def logits(self, text: str | Sequence[int]) -> Tensor:
        """Logits (T, V): row t predicts the token after token t. A text has at most block_size tokens."""
        from ..model.reference import hidden_states, logits_of

        tokens = [int(token) for token in (self.tokenizer.encode(text) if isinstance(text, str) else text)]
        wrong = [token for token in tokens if not 0 <= token < self.config.vocab_size]
        if wrong:
            raise ValueError(f"tokens: got {wrong[0]}; accepted: 0 … {self.config.vocab_size - 1}")
        if not 1 <= len(tokens) <= self.config.block_size:
            raise ValueError(f"tokens: got {len(tokens)} in all; accepted: 1 … block_size, {self.config.block_size}")
        ids = torch.tensor([tokens], device=self.params["wte.weight"].device)
        return logits_of(self.params, hidden_states(self.params, ids, self.config)[0], self.config)


def load(
    run: StrPath,
    *,
    best: bool = False,
    device: torch.device | str = "cpu",
    init: StrPath | None = None,
    averaged: bool = True,
    average: int | None = None,
) -> TrainedModel:
    """Load a model from a run's folder (its newest or best checkpoint) or from a checkpoint. A folder with Hugging Face
    weights and their tokenizer is accepted too, as step 0. Adapters are merged into the weights that they were trained on;
    `init` is the folder of these weights, if it has moved.

    A run with optimizer.ema gives the average of its weights; averaged=False gives the weights themselves. average=n gives
    the mean of the weights of the run's newest n checkpoints.

    >>> import tempfile, tilegrad
    >>> folder = f"{tempfile.mkdtemp()}/small"
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> _ = tilegrad.train(small, folder)
    >>> model = tilegrad.load(folder, best=True)
    >>> model.config.n_embd, model.step, model.params["wte.weight"].shape, model.tokenizer.vocab_size
    (32, 4, torch.Size([256, 32]), 256)
    >>> model.generate("Call me ", max_tokens=5).startswith("Call me ")
    True
    >>> model.logits("Call me ").shape
    torch.Size([8, 256])
    """
    from ..data.chat_template import load_chat_template
    from ..data.tokenizer import eos_token_ids
    from ..pretrained.weights import imported, is_weights
    from .checkpoint import load_model
    from .folder import origin_of, own_tokenizer, refuse_choices, weights_of

    if is_weights(Path(run)):
        refuse_choices(Path(run), best=best, average=average, init=init)
        config, weights, tokenizer, files = imported(Path(run))
        params = {name: tensor.to(device) for name, tensor in weights.items()}
        eos, template = eos_token_ids(files, tokenizer), load_chat_template(files)
        return TrainedModel(config, params, tokenizer, 0, Path(run), eos, template)
    folder, path, mean_of = weights_of(Path(run), best=best, average=average)
    config, loaded = load_model(path, None if init is None else Path(init), averaged=averaged, mean_of=mean_of)
    params = {name: tensor.to(device) for name, tensor in loaded.tensors.items()}
    tokenizer = own_tokenizer(folder, loaded.state)
    origin = origin_of(folder, tokenizer)
    places = [folder / "data", *([] if origin is None else [origin])]
    eos = frozenset[int]().union(*(eos_token_ids(place, tokenizer) for place in places))
    template = next(filter(None, map(load_chat_template, places)), None)
    return TrainedModel(config, params, tokenizer, loaded.step, path, eos, template, loaded.weights)


def generate(
    model: TrainedModel | StrPath,
    prompts: Prompts,
    *,
    max_tokens: int = 80,
    logprobs: bool = False,
    **settings: Unpack[Settings],
) -> list[Generated]:
    """Continue prompts, `num_samples` times each, in the order of the prompts.

    model               the result of `load`, or a folder that `load` accepts
    prompts             a text, or a list of texts and of token lists
    max_tokens          the most tokens of a sequence
    logprobs            True: each token's log-probability before temperature and filters
    temperature         0.8 by default; 0 takes the likeliest token
    top_k               draws from the k likeliest tokens; None: from all
    top_p               draws from the likeliest tokens whose total probability reaches this; 1: from all
    min_p               draws from tokens with at least this fraction of the largest probability; 0: from all
    repetition_penalty  divides the positive logits of tokens in the window, and multiplies the negative ones; 1: none
    stop                texts that end a sequence
    eos                 False: a sequence continues after a token that ends a text
    seed                the same seed gives the same tokens
    num_samples         sequences for each prompt, 1 by default
    batch_size          sequences at a time, at most 32 by default; it changes a sequence only by rounding
    device              by default the device of the weights; for a folder CUDA if there is a GPU, else the CPU
    dtype               by default bfloat16 on CUDA, elsewhere the dtype of the weights
    invariant           True: a sequence has the same bits in any batch and in training

    A sequence longer than block_size slides over its window, with the warning `WindowSlides` (training/generation.py).

    >>> import tempfile, tilegrad
    >>> folder = f"{tempfile.mkdtemp()}/small"
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> _ = tilegrad.train(small, folder)
    >>> results = tilegrad.generate(folder, ["Call me ", "The whale"], max_tokens=5, num_samples=2)
    >>> [(result.prompt, len(result.tokens), result.finish) for result in results[1:3]]
    [('Call me ', 5, 'length'), ('The whale', 5, 'length')]
    """
    generation = _generation(model, prompts, max_tokens, settings)
    _warn(generation)
    return list(generation.results(logprobs=logprobs))


def stream(
    model: TrainedModel | StrPath, prompts: Prompts, *, max_tokens: int = 80, **settings: Unpack[Settings]
) -> Iterator[Piece]:
    """Yields the tokens of `generate` as they are drawn, each with its new text. `Piece.sequence` is the number of the
    sequence.

    >>> import tempfile, tilegrad
    >>> folder = f"{tempfile.mkdtemp()}/small"
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> _ = tilegrad.train(small, folder)
    >>> pieces = list(tilegrad.stream(folder, "Call me ", max_tokens=5))
    >>> (result,) = tilegrad.generate(folder, "Call me ", max_tokens=5)
    >>> "".join(piece.text for piece in pieces) == result.text, [piece.finish for piece in pieces[-2:]]
    (True, [None, 'length'])
    """
    generation = _generation(model, prompts, max_tokens, settings)
    _warn(generation)
    return generation.pieces()


@torch.no_grad()
def logprobs(
    model: TrainedModel | StrPath,
    sequences: Prompts,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    invariant: bool = False,
) -> list[Tensor]:
    """log p(token | the tokens before it) for each token of each sequence but its first, by the forward of training.

    model           the result of `load`, or a folder that `load` accepts
    sequences       a text, or a list of texts and of token lists, of 2 … block_size + 1 tokens each
    device, dtype   as in `generate`
    invariant       True: the same bits as `generate(..., logprobs=True, invariant=True)`

    >>> import tempfile, tilegrad
    >>> folder = f"{tempfile.mkdtemp()}/small"
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> _ = tilegrad.train(small, folder)
    >>> model = tilegrad.load(folder)
    >>> (logprobs,) = tilegrad.logprobs(model, "Call me Ishmael")
    >>> logprobs.shape
    torch.Size([14])
    """
    from ..engine.machine import device_or_default
    from ..engine.scorer import Scorer
    from ..engine.spec import StepSpec
    from .generation import encode_prompts, place

    if not isinstance(model, TrainedModel):
        device, model = device_or_default(device), load(model)
    encoded, most = encode_prompts(model, sequences, "sequences")[1], model.config.block_size + 1
    for i, tokens in enumerate(encoded):
        if not 2 <= len(tokens) <= most:
            raise ValueError(f"sequences[{i}]: got {len(tokens)} tokens; accepted: 2 … {most}, block_size + 1")
    if not encoded:
        return []
    at, compute = place(model, device, dtype)
    longest = max(map(len, encoded)) - 1
    scorer = Scorer(StepSpec(model.config, 1, longest, compute, at, invariant=invariant), model.params)
    rows = (torch.tensor([tokens]) for tokens in encoded)
    return [scorer.logprobs(row[:, :-1], row[:, 1:])[0].cpu() for row in rows]


def _generation(model: TrainedModel | StrPath, prompts: Prompts, max_tokens: int, settings: Settings) -> Generation:
    from ..engine.machine import device_or_default
    from .generation import Generation

    if not isinstance(model, TrainedModel):
        settings["device"] = device_or_default(settings.get("device"))
        model = load(model)
    return Generation(model, prompts, max_tokens=max_tokens, **settings)


def _warn(generation: Generation) -> None:
    from .generation import WindowSlides

    if generation.warning is not None:
        warnings.warn(generation.warning, WindowSlides, stacklevel=3)


def evaluate(
    run: StrPath,
    data: StrPath | Sequence[StrPath] = (),
    *,
    best: bool = False,
    init: StrPath | None = None,
    averaged: bool = True,
    average: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    show: Show | None = None,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a run, a checkpoint or a folder of weights, as `tilegrad evaluate` prints them.

    run, init, averaged, average    as in `load`
    data                            text files and folders; none: all windows that the run holds out for validation
    batch_size, seq_len             by default those of the run; for a folder of weights those of a run with `--init`
    device                          by default CUDA if there is a GPU, else the CPU
    dtype                           by default the run's dtype; for a folder of weights bfloat16 on CUDA, float32 elsewhere
    show                            is called with each event and its numbers

    >>> import tempfile, tilegrad
    >>> folder = f"{tempfile.mkdtemp()}/small"
    >>> small = {"model": {"n_layer": 1, "n_embd": 32}, "train": {"steps": 4, "batch_size": 2, "seq_len": 16}}
    >>> result = tilegrad.train(small | {"data": {"validation_fraction": 3e-4}}, folder)
    >>> tilegrad.evaluate(folder).loss == result.validation_loss
    True
    """
    from ..data.documents import quiet
    from ..pretrained.weights import is_weights
    from .evaluation import evaluate_weights

    files = [Path(data)] if isinstance(data, str | os.PathLike) else [Path(name) for name in data]
    if not files and is_weights(Path(run)):
        raise ValueError(
            f"data: got none; accepted: text, because {run} is a folder of weights without validation data"
        )
    model = load(run, best=best, init=init, averaged=averaged, average=average)
    given = {"batch_size": batch_size, "seq_len": seq_len, "dtype": dtype}
    settings = {name: value for name, value in given.items() if value is not None}
    result = evaluate_weights(
        model.params, model.checkpoint, files, device=device, settings=settings, show=show or quiet
    )
    return replace(result, weights=model.weights)


def presets() -> dict[str, RunConfig]:
    """The presets by name: `.model` is the shape of the model, `.train` and `.data` are settings to train it.

    >>> import tilegrad
    >>> list(tilegrad.presets())
    ['tiny', 'gpt2', 'gpt2-medium', 'gpt2-xl', 'llama-135m']
    >>> tilegrad.presets()["gpt2"].model.n_layer
    12
    """
    return {name: preset_run(name) for name in PRESETS}
