"""A step of a decoder by group of kernels, without and with invariant: `python -m benchmarks.decoding`, on a GPU.

A step draws a token for each of `batch_size` sequences. Weights are random, and tokens are sampled with top-k 50.

    device         the time of STEPS captured steps on the device, divided by STEPS. The host submits all of them while the
                   device sleeps, so the device never waits for the host
    host, submit   the time of the host to submit these steps, divided by STEPS. The host does not wait for the device
    host, read     the time of the host to read the drawn tokens once all of them are there, divided by STEPS
    groups         the kernels of such steps by torch's profiler, in the groups of breakdown.py. The profiler runs last, because
                   it slows down launches

The first three are medians over rounds, in which the two forms of the decoder alternate.

Kernels of a decoder start before the previous kernel has ended, and then wait for it (kernels/dependent_launch.py). So the time
of a kernel is counted from the end of all earlier kernels. Then the groups and the gaps add up to the span of the steps.
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import torch

from tilegrad.bench.generate import PROMPT, SHAPES, named, random_params
from tilegrad.bench.timing import MOST_TRIES, DeviceTime
from tilegrad.engine.decoder import Decoder, Prompt
from tilegrad.engine.machine import check_device, device_or_default
from tilegrad.engine.sampling import Sampling
from tilegrad.model.config import ModelConfig
from tilegrad.text.environment import environment, print_results
from tilegrad.text.table import table

from .breakdown import LONGEST_NAME, Breakdown, Launch, break_down, launches_of

STEPS = 32
WARM_ROUNDS = 2
SLEEP_CYCLES = 100_000_000  # about 50 ms, in which the host submits the profiled steps
SLEEP = "spin_kernel"
NAMES = {  # group of breakdown.py → its name here
    "GEMM forward": "products", "head forward": "head", "attention forward": "attention over the cache",
    "norms forward": "norms", "activation forward": "activation", "loss": "sampling",
}  # fmt: skip

Kernel = tuple[str, float]  # its name and its microseconds


@dataclass(slots=True)
class Times:
    """Microseconds of a step in each round."""

    device: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Profile:
    """The breakdown of a step, and its kernels in order, with their microseconds.

    block     the kernels of one block, as means over the blocks
    others    the kernels before and after the blocks

    Both are empty if the steps launched different kernels."""

    breakdown: Breakdown
    block: tuple[Kernel, ...]
    others: tuple[Kernel, ...]


def begin(decoder: Decoder, prompt_tokens: int) -> None:
    """Read a prompt of random tokens into each slot, and wait."""
    shape = (decoder.batch_size, prompt_tokens)
    texts = torch.randint(0, decoder.spec.config.vocab_size, shape, generator=torch.Generator().manual_seed(1)).tolist()
    sampling = Sampling(top_k=50)
    decoder.prefill({i: Prompt(text, sequence=i, sampling=sampling) for i, text in enumerate(texts)})
    decoder.finished(wait=True)


def submit_steps(decoder: Decoder) -> None:
    for _ in range(STEPS):
        decoder.submit()


def measure(decoders: Mapping[str, Decoder], prompt_tokens: int, rounds: int, device: torch.device) -> dict[str, Times]:
    """decoder → the times of its steps."""
    timer, times = DeviceTime(device), {name: Times() for name in decoders}
    host_ms = dict.fromkeys(decoders, 0.0)
    for round_ in range(-WARM_ROUNDS, rounds):
        for name in list(decoders)[:: -1 if round_ % 2 else 1]:
            begin(decoders[name], prompt_tokens)
            device_ms, host_ms[name] = timer.ms(partial(submit_steps, decoders[name]), host_ms[name])
            began = time.perf_counter()
            decoders[name].finished(wait=True)
            read_ms = 1e3 * (time.perf_counter() - began)
            if round_ >= 0:
                times[name].device.append(1e3 * device_ms / STEPS)
                times[name].submit.append(1e3 * host_ms[name] / STEPS)
                times[name].read.append(1e3 * read_ms / STEPS)
    return times


def kernels_of(decoder: Decoder, prompt_tokens: int) -> list[Launch]:
    """The kernels of STEPS steps, which the host submits while the device sleeps."""
    begin(decoder, prompt_tokens)

    def steps() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        submit_steps(decoder)

    return [launch for launch in launches_of(steps, 1) if SLEEP not in launch.name]


def one_after_another(launches: Sequence[Launch]) -> list[Launch]:
    """The launches in order. Each begins, at the earliest, at the end of all earlier launches."""
    found, end_us = list[Launch](), 0.0
    for name, start_us, us in sorted(launches, key=lambda launch: launch.start_us):
        begin_us, end_us = max(start_us, end_us), max(start_us + us, end_us)
        found.append(Launch(name, begin_us, end_us - begin_us))
    return found


def profile_of(launches: Sequence[Launch], n_layer: int) -> Profile:
    """The profile of STEPS steps."""
    ordered = one_after_another(launches)
    count, rest = divmod(len(ordered), STEPS)
    names = [launch.name for launch in ordered]
    same = not rest and names == names[:count] * STEPS
    step = [(names[i], sum(launch.us for launch in ordered[i::count]) / STEPS) for i in range(count if same else 0)]
    block, others = fold(step, n_layer)
    return Profile(break_down(ordered, {}, STEPS), tuple(block), tuple(others))


def fold(step: Sequence[Kernel], n_layer: int) -> tuple[list[Kernel], list[Kernel]]:
    """(the kernels of one block, the other kernels) of a step. The first kernel of a step is the embedding's, and then each
    block launches the same kernels."""
    names = [name for name, _ in step]
    sizes = range((len(step) - 1) // n_layer, 0, -1)
    size = next((n for n in sizes if names[1 : 1 + n * n_layer] == names[1 : 1 + n] * n_layer), 0)
    end = 1 + size * n_layer
    block = [(names[i], sum(us for _, us in step[i:end:size]) / n_layer) for i in range(1, 1 + size)]
    return block, [*step[:1], *step[end:]]


def record(times: Times, profile: Profile) -> dict[str, object]:
    """The results of one form, as JSON has them, in microseconds of a step."""
    broken = profile.breakdown
    groups = {NAMES.get(each.group, each.group): (1e3 * each.ms, each.launches) for each in broken.groups}
    return {
        **{f"{name}_us": median(values) for name, values in asdict(times).items()},
        "profiled_us": 1e3 * broken.span_ms,
        "gaps_us": 1e3 * broken.gaps_ms,
        "groups": {name: {"us": us, "kernels": kernels} for name, (us, kernels) in groups.items()},
        "block": profile.block,
        "others": profile.others,
    }


def report(times: Mapping[str, Times], profiles: Mapping[str, Profile]) -> str:
    found = [profile.breakdown for profile in profiles.values()]
    by_group = [{each.group: each for each in broken.groups} for broken in found]
    rows: list[list[str]] = []
    for group in dict.fromkeys(name for groups in by_group for name in groups):
        rows.append([NAMES.get(group, group)])
        for groups in by_group:
            none = group not in groups
            rows[-1] += ["–", "–"] if none else [f"{1e3 * groups[group].ms:.1f}", f"{groups[group].launches:g}"]
    rows.append(["gaps"] + [text for broken in found for text in (f"{1e3 * broken.gaps_ms:.1f}", "")])
    rows.append(["profiled step"])
    for broken in found:
        rows[-1] += [f"{1e3 * broken.span_ms:.1f}", f"{sum(each.launches for each in broken.groups):g}"]
    for label, name in (("device", "device"), ("host, submit", "submit"), ("host, read", "read")):
        medians = [median(getattr(each, name)) for each in times.values()]
        rows.append([label] + [text for us in medians for text in (f"{us:.1f}", "")])
    parts = [table(("µs of a step", *(text for name in profiles for text in (name, "kernels"))), rows)]
    for name, profile in profiles.items():
        for where, kernels in (("one block", profile.block), ("outside the blocks", profile.others)):
            parts += [f"\n{name}, {where}:", *map(_line, kernels)] if kernels else []
    return "\n".join(parts)


def _line(kernel: Kernel) -> str:
    name, us = kernel
    return f"  {us:7.2f} µs  {name[:LONGEST_NAME]}"


def measure_all(
    config: ModelConfig, batch_size: int, prompt_tokens: int, rounds: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Times], dict[str, Profile]]:
    """The times and the profiles of both forms, by name."""
    params, capacity = random_params(config, device, dtype), prompt_tokens + MOST_TRIES * STEPS
    decoders = {
        named("tilegrad", invariant=invariant): Decoder(
            config, params, batch_size, capacity, device=device, dtype=dtype, invariant=invariant
        )
        for invariant in (False, True)
    }
    times = measure(decoders, prompt_tokens, rounds, device)
    launches = {name: kernels_of(decoder, prompt_tokens) for name, decoder in decoders.items()}
    return times, {name: profile_of(each, config.n_layer) for name, each in launches.items()}


def bench_decoding(
    *,
    preset: str = "gpt2",
    device: str | None = None,
    dtype: str = "bfloat16",
    batch_size: int = 1,
    prompt_tokens: int = PROMPT,
    rounds: int = 5,
    json: bool = False,
    out: str | None = None,
) -> int:
    """Prints the table, or JSON lines. Returns the exit code 0."""
    where = torch.device(device_or_default(device))
    check_device(str(where))
    if where.type != "cuda":
        raise ValueError(f"device: got {str(where)!r}; accepted: a GPU, whose kernels torch's profiler lists")
    if preset not in SHAPES:
        raise ValueError(f"preset: got {preset!r}; accepted: {', '.join(SHAPES)}")
    config = SHAPES[preset]
    most = config.block_size - MOST_TRIES * STEPS
    if not 1 <= prompt_tokens <= most:
        raise ValueError(
            f"prompt_tokens: got {prompt_tokens}; accepted: 1 … {most}, because block_size is {config.block_size}"
        )
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; accepted: at least 1")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    about = environment(where, torch_dtype)
    times, profiles = measure_all(config, batch_size, prompt_tokens, rounds, device=where, dtype=torch_dtype)
    size = {"preset": preset, "batch_size": batch_size, "prompt_tokens": prompt_tokens}
    lines = [json_format.dumps(size | {"form": name} | record(times[name], profiles[name]) | about) for name in times]
    if not print_results(lines, about, json=json, out=out):
        print(f"\n{preset}, batch of {batch_size}, {STEPS} steps after {prompt_tokens} tokens, {rounds} rounds\n")
        print(report(times, profiles))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--preset", default="gpt2", help=f"one of {', '.join(SHAPES)} (default: %(default)s)")
    add("--device", help="default: cuda")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: %(default)s")
    add("--batch-size", type=int, default=1, metavar="N", help="sequences at once (default: %(default)s)")
    text = "tokens in the cache before the first step (default: %(default)s)"
    add("--prompt-tokens", type=int, default=PROMPT, metavar="N", help=text)
    add("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: %(default)s)")
    add("--json", action="store_true", help="JSON lines instead of the table")
    add("--out", metavar="FILE", help="append the JSON lines to a file")
    return bench_decoding(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
