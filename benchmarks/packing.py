"""Packed rows, compared with padded rows of the same conversations: `python -m benchmarks.packing`, on a GPU and on a CPU.

The lengths of conversations are drawn from an exponential distribution with mean T/4 and cut at T. The contenders are steps of
an engine:

    padded   each conversation is a row of T tokens; the rest of the row has no targets
    packed   conversations fill rows first-fit, at most `documents` in a row, with their ends in cu_seqlens
    whole    each row is one sequence of T tokens: the time if attention spans the whole row

    tokens/s   (tokens of conversations) / seconds: the median over rounds, which are interleaved
    speed      the median over rounds of tokens/s / (tokens/s of `padded`)
    fill       (tokens of conversations) / (tokens of rows)

Before anything is timed, the packed loss of some conversations is compared with their padded loss.
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np
import torch
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.data.packing import first_fit
from tilegrad.engine.batch import Batch
from tilegrad.engine.machine import device_or_default
from tilegrad.model.config import PRESETS
from tilegrad.text.environment import environment, print_results
from tilegrad.text.table import table

GOAL = 2.5  # the least speed of `packed`
STEPS = 8  # number of different batches of each contender
MODELS = {
    "tiny": PRESETS["tiny"],
    "llama-135m": PRESETS["llama-135m"],
    "qwen2.5-0.5b": ModelConfig(
        vocab_size=151936, block_size=1024, n_layer=24, n_head=14, n_embd=896, n_kv_head=2, ffn_dim=4864,
        activation="swiglu", norm="rmsnorm", position="rope", bias=False, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one contender. `speed` is relative to `padded`; `bytes` is the memory that its engine plans."""

    name: str
    fill: float
    step_ms: float
    tokens_per_s: float
    speed: float
    bytes: int


def conversations(config: ModelConfig, seq_len: int, tokens: int, generator: torch.Generator) -> list[Tensor]:
    """Conversations of random tokens, each of at most seq_len, seq_len / 4 on average, and with at least `tokens` in all."""
    found: list[Tensor] = []
    while sum(map(len, found)) < tokens:
        drawn = -seq_len / 4 * float(torch.rand((), generator=generator).clamp_min(1e-9).log())
        length = min(max(int(drawn), 2), seq_len)
        found.append(torch.randint(0, config.vocab_size, (length,), generator=generator))
    return found


def batch_of(rows: Sequence[Sequence[Tensor]], seq_len: int) -> Batch:
    """The batch of these rows. Each row has its conversations end to end, then padding as a document without targets."""
    tokens = torch.zeros(len(rows), seq_len, dtype=torch.int64)
    targets, ends = torch.full_like(tokens, -1), [0]
    for r, row in enumerate(rows):
        at = 0
        for x in row:
            tokens[r, at : at + len(x)] = x
            targets[r, at : at + len(x) - 1] = x[1:]
            at += len(x)
            ends.append(r * seq_len + at)
        if at < seq_len:
            ends.append((r + 1) * seq_len)
    return Batch(tokens, targets, torch.tensor(ends, dtype=torch.int32))


@dataclass(slots=True)
class Contender:
    name: str
    engine: Engine
    batches: list[tuple[Batch, int]]  # (batch, number of its tokens that are not padding)
    at: int = 0

    def run(self, seconds: float) -> tuple[float, float]:
        """(tokens of conversations, steps) per second."""
        tokens = steps = 0
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds:
            batch, count = self.batches[self.at % len(self.batches)]
            self.engine.submit(batch.tokens, batch.targets, 1e-5, cu_seqlens=batch.cu_seqlens)
            self.engine.finished()
            self.at, tokens, steps = self.at + 1, tokens + count, steps + 1
        self.engine.finished(wait=True)
        spent = time.perf_counter() - began
        return tokens / spent, steps / spent


def contenders(
    config: ModelConfig, batch_size: int, seq_len: int, documents: int, device: str, dtype: torch.dtype
) -> list[Contender]:
    generator = torch.Generator().manual_seed(0)
    given = conversations(config, seq_len, STEPS * batch_size * seq_len, generator)

    def batches(rows: list[list[Tensor]], *, packed: bool) -> list[tuple[Batch, int]]:
        found = []
        for first in range(0, min(len(rows) // batch_size, STEPS) * batch_size, batch_size):
            batch_rows = rows[first : first + batch_size]
            batch = batch_of(batch_rows, seq_len)
            found.append(
                (batch if packed else batch._replace(cu_seqlens=None), sum(len(x) for row in batch_rows for x in row))
            )
        return found

    padded = [[x] for x in given]
    packed = [[given[i] for i in row] for row in first_fit(np.array([len(x) for x in given]), seq_len, documents - 1)]
    whole = [[row] for row in torch.cat(given).split(seq_len)]
    made = (("padded", padded, 0), ("packed", packed, documents), ("whole", whole, 0))
    return [
        Contender(
            name, Engine(config, batch_size, seq_len, device, dtype, documents=most), batches(rows, packed=most > 0)
        )
        for name, rows, most in made
    ]


def disagreement(padded: Contender, packed: Contender, batch_size: int, seq_len: int, dtype: torch.dtype) -> str:
    """A sentence that says how the packed loss of a batch differs from the loss of its conversations in padded rows, or ""."""
    batch, _ = packed.batches[0]
    assert batch.cu_seqlens is not None
    spans = [slice(a, z) for a, z in pairwise(batch.cu_seqlens.tolist())]
    alone = [[batch.tokens.view(-1)[at]] for at in spans if bool((batch.targets.view(-1)[at] >= 0).any())]
    parts = [batch_of(alone[i : i + batch_size], seq_len) for i in range(0, len(alone), batch_size)]
    counts = [int((x.targets >= 0).sum()) for x in parts]
    losses = [padded.engine.evaluate(x.tokens, x.targets) for x in parts]
    want = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
    got = packed.engine.evaluate(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
    limit = 1e-3 if dtype == torch.bfloat16 else 1e-5
    return "" if abs(got - want) <= limit * want else f"the packed loss is {got}, the padded one {want}"


def bench_packing(
    *, model: str | None = None, batch_size: int | None = None, seq_len: int | None = None, documents: int = 16,
    device: str | None = None, dtype: str | None = None, seconds: float = 4.0, rounds: int = 3, json: bool = False,
) -> int:  # fmt: skip
    where = torch.device(device_or_default(device))
    on_gpu = where.type == "cuda"
    name = model or ("qwen2.5-0.5b" if on_gpu else "tiny")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; accepted: at least 1")
    if name not in MODELS:
        raise ValueError(f"model: got {name!r}; accepted: {', '.join(MODELS)}")
    b, t = batch_size or (16 if on_gpu else 4), seq_len or (1024 if on_gpu else 128)
    kind = getattr(torch, dtype) if dtype else torch.bfloat16 if on_gpu else torch.float32
    config = replace(MODELS[name], block_size=max(t, MODELS[name].block_size))
    made = contenders(config, b, t, documents, str(where), kind)
    complaint = disagreement(made[0], made[1], b, t, kind)
    if complaint:
        print(f"WRONG: {complaint}")
        return 1
    for each in made:
        each.run(min(seconds, 1.0))  # the first run compiles and captures
    found: dict[str, list[tuple[float, float]]] = {each.name: [] for each in made}
    for i in range(rounds):
        for each in made[:: -1 if i % 2 else 1]:
            found[each.name].append(each.run(seconds))
    rows = []
    for each in made:
        fill = sum(n for _, n in each.batches) / (len(each.batches) * b * t)
        speeds = [ours[0] / padded[0] for ours, padded in zip(found[each.name], found["padded"], strict=True)]
        tokens, steps = (median(x[i] for x in found[each.name]) for i in range(2))
        rows.append(Row(each.name, fill, 1e3 / steps, tokens, median(speeds), each.engine.plan.peak_bytes))
    about = environment(where, kind) | {"model": name, "batch_size": b, "seq_len": t, "documents": documents}
    if print_results([json_format.dumps(asdict(row) | about) for row in rows], about, json=json, out=None):
        return 0
    lines = []
    for r in rows:
        figures = (f"{r.fill:.0%}", f"{r.step_ms:.1f}", f"{r.tokens_per_s:,.0f}", f"{r.speed:.2f}")
        lines.append((r.name, *figures, f"{r.bytes / 2**30:.2f}"))
    print()
    print(table(("rows", "fill", "ms/step", "tokens/s", "speed", "GiB"), lines))
    print(f"\npacked over padded: {rows[1].speed:.2f}, goal {GOAL}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", help=f"{', '.join(MODELS)} (default: qwen2.5-0.5b on CUDA, else tiny)")
    add("--batch-size", type=int, metavar="B", help="rows of a step (default: 16 on CUDA, else 4)")
    add("--seq-len", type=int, metavar="T", help="default: 1024 on CUDA, else 128")
    add("--documents", type=int, metavar="N", help="the most documents in a packed row (default: 16)")
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--dtype", help="default: bfloat16 on CUDA, else float32")
    add("--seconds", type=float, help="of one contender in one round (default: 4)")
    add("--rounds", type=int, metavar="N", help="interleaved rounds (default: 3)")
    add("--json", action="store_true", help="JSON lines instead of the table")
    given = vars(parser.parse_args(arguments))
    return bench_packing(**{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
