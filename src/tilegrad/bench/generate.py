"""Tokens per second of generation by tilegrad and by `generate` of transformers with a static cache, interleaved in one
process.

In a round each contender generates `max_tokens` tokens after each of `batch_size` prompts of PROMPT tokens. The order of the
contenders changes from round to round. The time includes reading the prompts. Weights are random, no token ends a sequence, and
all contenders sample with top-k 50. For a batch of one sequence, "of the bound" compares with reading the weights once for each
token at the bandwidth of a large read, which is measured first.

With `prefill`, a second table compares reading 8 long prompts with the forward of training on as many tokens. With `invariant`,
both tables also have tilegrad with `invariant=True`.
"""

from __future__ import annotations

import importlib.util
import json as json_format
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor

from ..engine.decoder import Decoder, Prompt
from ..engine.machine import check_device, device_or_default
from ..engine.sampling import Sampling
from ..engine.scorer import Scorer
from ..engine.spec import StepSpec
from ..model.config import PRESETS, ModelConfig
from ..pretrained.families import config_json
from ..text.environment import environment, print_results
from ..text.table import table
from .timing import interleaved

PROMPT = 32
PREFILL_PROMPTS = 8
READ_BYTES = {"cpu": 1 << 28, "cuda": 8 << 30}
QWEN = replace(
    PRESETS["llama-135m"],
    vocab_size=151936,
    block_size=4096,
    n_layer=24,
    n_head=14,
    n_kv_head=2,
    n_embd=896,
    ffn_dim=4864,
    qkv_bias=True,
    rope_theta=1e6,
    norm_eps=1e-6,
)
SHAPES = {
    **PRESETS,
    "qwen2.5-0.5b": QWEN,
    "qwen2.5-1.5b": replace(QWEN, n_layer=28, n_head=12, n_embd=1536, ffn_dim=8960),
}
Generate = Callable[[], object]


def random_params(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {}
    for name, p in StepSpec(config, 1, 1, dtype, torch.device("cpu")).declare().params.items():
        value = torch.empty(p.value.shape)
        p.init.fill(value, generator)
        params[name] = value.to(device, dtype)
    return params


def ours(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Generate tokens with a decoder, and return how many."""
    sampling, drawn = Sampling(top_k=50), 0
    decoder.prefill({i: Prompt(prompt, sequence=i, sampling=sampling) for i, prompt in enumerate(prompts)})
    for _ in range(max_tokens - 1):
        decoder.submit()
        drawn += sum(len(each.tokens) for each in decoder.finished())
    return drawn + sum(len(each.tokens) for each in decoder.finished(wait=True))


def transformers_contender(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, int], object]:
    import transformers

    settings = config_json(config, dtype)
    theirs = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: Tensor, max_tokens: int) -> object:
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=True,
            top_k=50,
            cache_implementation="static",
        )

    return generate


def named(contender: str, *, invariant: bool) -> str:
    return f"{contender}, invariant" if invariant else contender


def bandwidth(device: torch.device, repeats: int) -> float:
    """The bytes per second of a large read."""
    x = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    out = torch.zeros((), device=device)
    ms = interleaved({"read": partial(torch.sum, x, 0, out=out)}, repeats, device)["read"]
    return 1e3 * x.nbytes / min(ms)


def measure(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    batch_size: int,
    max_tokens: int,
    repeats: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    peers: bool,
    modes: Sequence[bool],
) -> dict[str, list[float]]:
    """contender → milliseconds in each round. modes: the values of `invariant` to measure"""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, config.vocab_size, (batch_size, PROMPT), generator=generator)
    contenders: dict[str, Generate] = {}
    for invariant in modes:
        capacity = PROMPT + max_tokens
        decoder = Decoder(config, params, batch_size, capacity, device=device, dtype=dtype, invariant=invariant)
        contenders[named("tilegrad", invariant=invariant)] = partial(ours, decoder, prompts.tolist(), max_tokens)
    if peers and importlib.util.find_spec("transformers") is not None:
        theirs = transformers_contender(config, device, dtype)
        contenders["transformers, static cache"] = partial(theirs, prompts.to(device), max_tokens)
    return interleaved(contenders, repeats, device)


def measure_prefill(
    config: ModelConfig,
    params: Mapping[str, Tensor],
    shape: tuple[int, int],
    repeats: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    modes: Sequence[bool],
) -> dict[str, list[float]]:
    """Milliseconds in each round of a prefill, and of the forward of training, whose loss is over every token."""
    prompts, length = shape
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    texts, total = tokens.tolist(), prompts * length

    def prefill(decoder: Decoder) -> None:
        decoder.prefill({i: Prompt(text, sequence=i) for i, text in enumerate(texts)})
        decoder.finished(wait=True)

    contenders: dict[str, Generate] = {}
    for invariant in modes:
        decoder = Decoder(
            config, params, prompts, length, prefill_tokens=total, device=device, dtype=dtype, invariant=invariant
        )
        scorer = Scorer(StepSpec(config, prompts, length, dtype, device, invariant=invariant), params)
        contenders[named("tilegrad", invariant=invariant)] = partial(prefill, decoder)
        contenders[named("training's forward", invariant=invariant)] = partial(scorer.loss, tokens, tokens)
    return interleaved(contenders, repeats, device)


def result(
    name: str, times: Mapping[str, Sequence[float]], tokens: int, bound: float | None
) -> dict[str, str | float | None]:
    """Tokens per second of one contender, and how many times as fast tilegrad is, as medians over the rounds."""
    rates = quantiles([1e3 * tokens / t for t in times[name]], n=10, method="inclusive")
    ratio = median([theirs / ours for ours, theirs in zip(times["tilegrad"], times[name], strict=True)])
    row: dict[str, str | float | None] = {"contender": name, "tokens_per_second": round(rates[4], 1)}
    row |= {"p20": round(rates[1], 1), "p80": round(rates[7], 1), "ours_times_as_fast": round(ratio, 3)}
    return row | {"share_of_bound": None if bound is None else round(rates[4] / bound, 3)}


def cells(row: Mapping[str, str | float | None]) -> tuple[str, ...]:
    name, share = row["contender"], row["share_of_bound"]
    ratio = "" if name == "tilegrad" else f"{row['ours_times_as_fast']:.2f}×"
    rate, p20, p80 = (f"{row[key]:,.1f}" for key in ("tokens_per_second", "p20", "p80"))
    return f"{name}", rate, f"{p20} – {p80}", ratio, "" if share is None else f"{share:.2f}"


def bench_generate(
    *,
    preset: str = "gpt2",
    device: str | None = None,
    dtype: str = "bfloat16",
    batch_sizes: Sequence[int] = (1,),
    max_tokens: int = 64,
    prefill: int = 0,
    repeats: int = 5,
    peers: bool = True,
    invariant: bool = False,
    json: bool = False,
    out: str | None = None,
) -> int:
    where = torch.device(device_or_default(device))
    check_device(str(where))
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2")
    if preset not in SHAPES:
        raise ValueError(f"preset: got {preset!r}; accepted: {', '.join(SHAPES)}")
    config = SHAPES[preset]
    most = config.block_size - PROMPT
    if not 1 <= max_tokens <= most:
        raise ValueError(
            f"max_tokens: got {max_tokens}; accepted: 1 … {most}, because block_size is {config.block_size}"
        )
    if not 0 <= prefill <= config.block_size:
        raise ValueError(f"prefill: got {prefill}; accepted: 0 (none) … {config.block_size}, the block_size")
    modes = (False, True) if invariant else (False,)
    params, about = random_params(config, where, torch_dtype), environment(where, torch_dtype)
    speed = bandwidth(where, repeats)
    looked_up = {"wpe.weight"} if config.tie_embeddings else {"wpe.weight", "wte.weight"}  # a step reads single rows
    weight_bytes = sum(x.nbytes for name, x in params.items() if name not in looked_up)
    lines, rows = [], []
    for batch_size in batch_sizes:
        times = measure(
            config, params, batch_size, max_tokens, repeats, device=where, dtype=torch_dtype, peers=peers, modes=modes
        )
        for name in times:
            row = result(name, times, batch_size * max_tokens, speed / weight_bytes if batch_size == 1 else None)
            size = {"preset": preset, "batch_size": batch_size, "max_tokens": max_tokens}
            lines.append(json_format.dumps(size | row | about))
            rows.append((f"{batch_size}", *cells(row)))
    prefills = []
    if prefill:
        shape = (PREFILL_PROMPTS, prefill)
        times = measure_prefill(config, params, shape, repeats, device=where, dtype=torch_dtype, modes=modes)
        for name in times:
            row = result(name, times, shape[0] * shape[1], None)
            lines.append(json_format.dumps({"preset": preset, "prompts": shape[0], "length": shape[1]} | row | about))
            prefills.append(cells(row)[:4])
    if print_results(lines, about, json=json, out=out):
        return 0
    print(f"\n{preset}, {PROMPT} + {max_tokens} tokens, {repeats} rounds; a large read: {speed / 1e9:.1f} GB/s\n")
    print(table(("batch", "", "tokens/s", "20 – 80 %", "ours is", "of the bound"), rows))
    if prefills:
        print(f"\nreading {PREFILL_PROMPTS} prompts of {prefill} tokens\n")
        print(table(("", "tokens/s", "20 – 80 %", "ours is"), prefills))
    return 0
