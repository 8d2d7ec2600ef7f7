"""Fine-tuning, compared with transformers + Liger + PEFT: `python -m benchmarks.finetune`, on a GPU.

Two trainings of models with the shapes of Qwen2.5 and random weights in bfloat16: one trains adapters of rank 16 on all linear
layers, the other all weights. Each contender has a process of its own, so that its memory is measured alone. In a round each
contender runs back-to-back steps for `seconds`; every other round reverses their order. The two trainings are measured in
separate rounds.

    ours              a step of the engine with `lora`, captured
    ours, all saved   `ours` without recomputation
    ours, budget      `ours` within --budget GiB (default: `checkpointed_gib` of the shape)
    peer              a step of PEFT with Liger's kernels, SDPA and fused AdamW, as users run it
    peer, checkpoint  `peer` with gradient checkpointing
    ours, weights     a step of the engine that trains all weights, with float32 masters and moments
    ours, lean        `ours, weights` with bfloat16 moments and gradients, and without masters
    peer, weights     a step of transformers with Liger's kernels; weights, gradients and moments are bfloat16

    tokens/s          the median over rounds          ratio       the median over rounds of (our tokens/s) / (the peer's)
    peak GiB          torch.cuda.max_memory_allocated in the process of the contender

The peer needs transformers, liger_kernel and peft; without them, or on a CPU, it does not run. --tiny is a quick test on a CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from tilegrad import Engine, LoraConfig, ModelConfig
from tilegrad.model.layer import States
from tilegrad.text.table import table

Step = Callable[[], object]
RANK, ALPHA = 16, 32
PEER_PACKAGES = ("transformers", "liger_kernel", "peft")
HEADER = ("shape", "contender", "tokens/s", "peak GiB", "ratio")
WARM_STEPS = 4
EVERYTHING = 1000.0  # GiB: a budget with which nothing is recomputed
UNPLANNED_BYTES = 40 << 20  # the workspace of cuBLAS and the staged batch, which a budget does not count
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, its batch, and the GiB that the peer takes with gradient checkpointing."""

    n_embd: int
    ffn_dim: int
    n_head: int
    n_kv_head: int
    n_layer: int
    batch_size: int
    seq_len: int = 1024
    vocab_size: int = 151936
    checkpointed_gib: float = 0.0

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size, block_size=self.seq_len, n_layer=self.n_layer, n_head=self.n_head,
            n_kv_head=self.n_kv_head, n_embd=self.n_embd, ffn_dim=self.ffn_dim, activation="swiglu", norm="rmsnorm",
            position="rope", bias=False, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6,
        )  # fmt: skip


SHAPES = {
    "0.5B": Shape(896, 4864, 14, 2, 24, 16, checkpointed_gib=3.2),
    "1.5B": Shape(1536, 8960, 12, 2, 28, 8, checkpointed_gib=5.2),
    "tiny": Shape(64, 160, 4, 2, 2, 2, seq_len=32, vocab_size=256, checkpointed_gib=0.07),
}


def ours(shape: Shape, device: str, budget: float | None, lora: LoraConfig | None, states: States) -> Step:
    engine = Engine(
        shape.config(), shape.batch_size, shape.seq_len, device=device, dtype=torch.bfloat16, lora=lora, states=states,
        memory_budget=None if budget is None else int(budget * _GIB) - (UNPLANNED_BYTES if device == "cuda" else 0),
        accumulate=False,
    )  # fmt: skip
    tokens = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.seq_len), device=device)

    def step() -> None:
        engine.submit(tokens, tokens, 1e-4)
        engine.finished()

    return step


def peer(shape: Shape, device: str, *, adapters: bool, checkpoint: bool) -> Step:
    liger, peft, transformers = map(import_module, ("liger_kernel.transformers", "peft", "transformers"))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.n_embd, intermediate_size=shape.ffn_dim,
        num_attention_heads=shape.n_head, num_key_value_heads=shape.n_kv_head, num_hidden_layers=shape.n_layer,
        max_position_embeddings=2 * shape.seq_len, tie_word_embeddings=True, rope_theta=1e6,
    )  # fmt: skip
    with torch.device(device):
        base = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    base.config.use_cache = False
    liger.apply_liger_kernel_to_qwen2(model=base)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers)
    model = peft.get_peft_model(base, lora) if adapters else base
    if checkpoint:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.seq_len), device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def contender(name: str, shape: Shape, device: str, budget: float) -> Step:
    adapters = not name.endswith(("weights", "lean"))
    if name.startswith("ours"):
        limit = EVERYTHING if "all saved" in name else budget if "budget" in name else None
        states = States("bfloat16", "none", "bfloat16") if "lean" in name else States()
        return ours(shape, device, limit, LoraConfig(RANK, ALPHA) if adapters else None, states)
    return peer(shape, device, adapters=adapters, checkpoint="checkpoint" in name)


def serve(pipe: Connection, name: str, shape: Shape, device: str, budget: float) -> None:
    """Build a contender. Then read numbers of seconds from the pipe, and answer each with (tokens/s, peak bytes), or with the
    text of an error."""
    try:
        step = contender(name, shape, device, budget)
        for _ in range(WARM_STEPS):
            step()
        _wait(device)
        pipe.send("ready")
        while (seconds := pipe.recv()) is not None:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                step()
                step()
                _wait(device)
                count += 2
            rate = count * shape.batch_size * shape.seq_len / (time.perf_counter() - began)
            pipe.send((rate, torch.cuda.max_memory_allocated() if device == "cuda" else 0))
    except (RuntimeError, ValueError, ImportError, TypeError, AttributeError):  # the other contenders continue
        pipe.send(traceback.format_exc(limit=3))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    shape: Shape, device: str, names: list[str], rounds: int, seconds: float, budget: float
) -> tuple[dict[str, list[tuple[float, int]]], dict[str, str]]:
    """(contender → (tokens/s, peak bytes) of each round, contender that failed → its error)"""
    spawn, workers, failed = multiprocessing.get_context("spawn"), {}, {}
    for name in names:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, name, shape, device, budget), daemon=True)
        process.start()
        workers[name] = mine, process
    for name in names:
        answer = workers[name][0].recv()
        if answer != "ready":
            failed[name] = answer
            workers.pop(name)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in workers}
    for i in range(rounds):
        for name in list(workers)[:: -1 if i % 2 else 1]:
            pipe, _ = workers[name]
            pipe.send(seconds)
            answer = pipe.recv()
            if isinstance(answer, str):
                failed[name] = answer
                workers.pop(name)
            else:
                found[name].append(answer)
    for pipe, process in workers.values():
        pipe.send(None)
        process.join()
    return {name: rows for name, rows in found.items() if name in workers}, failed


def rows_of(name: str, found: dict[str, list[tuple[float, int]]]) -> list[dict[str, Any]]:
    rows = []
    for who, results in found.items():
        others = {"ours, budget": "peer, checkpoint", "ours, weights": "peer, weights", "ours, lean": "peer, weights"}
        other = others.get(who, "peer")
        against = found.get(other) if "ours" in who else None
        ratio = median(a / b for (a, _), (b, _) in zip(results, against, strict=True)) if against else None
        rate, peak = median(rate for rate, _ in results), max(peak for _, peak in results)
        rows.append({"shape": name, "contender": who, "tokens_per_s": rate, "peak_bytes": peak, "ratio": ratio})
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="0.5B, 1.5B or tiny; default: 0.5B and 1.5B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--budget", type=float, help="GiB of `ours, budget`; default: `checkpointed_gib` of the shape")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders, such as 'ours, weights'; default: all")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small shape, 0.2 s for each contender in a round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    _check(args.rounds, args.seconds, args.budget, args.device)
    missing = [package for package in PEER_PACKAGES if find_spec(package) is None]
    with_peer = not args.no_peer and args.device == "cuda" and not missing
    if missing and not args.no_peer:
        print(f"no peer: {', '.join(missing)} not installed", file=sys.stderr)
    groups = [
        ["ours", "ours, all saved", "ours, budget", "peer", "peer, checkpoint"],
        ["ours, weights", "ours, lean", "peer, weights"],
    ]
    rounds, seconds = (2, 0.2) if args.tiny else (args.rounds, args.seconds)
    rows: list[dict[str, Any]] = []
    errors: list[str] = []
    for name in ["tiny"] if args.tiny else args.shapes or ["0.5B", "1.5B"]:
        shape = SHAPES[name]
        budget = args.budget if args.budget is not None else shape.checkpointed_gib
        for group in groups:
            names = [who for who in group if with_peer or not who.startswith("peer")]
            names = [who for who in names if args.only is None or who in args.only]
            if not names:
                continue
            found, failed = measure(shape, args.device, names, rounds, seconds, budget)
            new = rows_of(name, found)
            print(table(HEADER, [_cells(row) for row in new]), file=sys.stderr, flush=True)
            rows += new
            errors += [f"{name}, {who}: {why}" for who, why in failed.items()]
    if args.json:
        print(json.dumps(rows, indent=1), flush=True)
    else:
        print(table(HEADER, [_cells(row) for row in rows]), flush=True)
    for error in errors:
        print(error, file=sys.stderr)
    return int(bool(errors))


def _check(rounds: int, seconds: float, budget: float | None, device: str) -> None:
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; accepted: at least 1")
    if not seconds > 0:
        raise ValueError(f"seconds: got {seconds}; accepted: a number > 0")
    unplanned = UNPLANNED_BYTES / _GIB
    if budget is not None and device == "cuda" and budget <= unplanned:
        raise ValueError(
            f"budget: got {budget}; accepted: more than {unplanned:.4f} GiB, which the engine does not plan"
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    rate, peak = f"{row['tokens_per_s']:,.0f}", f"{row['peak_bytes'] / _GIB:.2f}"
    return row["shape"], row["contender"], rate, peak, ratio


if __name__ == "__main__":
    raise SystemExit(main())
