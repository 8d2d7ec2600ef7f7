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

--breakdown instead gives the milliseconds of a step of `ours` and of `ours, weights` by group of kernels, next to the floor of
each group (breakdown.py). --only names other contenders of ours.

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
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilegrad import Engine, LoraConfig, ModelConfig
from tilegrad.model.layer import States
from tilegrad.text.atomic import check_replaceable
from tilegrad.text.table import table

from .breakdown import Breakdown, Launch, Rates, break_down, floors, launches_of, products_of
from .breakdown import report as breakdown_report
from .contenders import PROFILED_STEPS, WARM_SECONDS, sustained
from .step_cost import adapter_count, step_demands
from .training import about_run, parameter_count, write_results

Step = Callable[[], object]
Results = tuple[str, list[dict[str, Any]], list[str]]  # a report, its rows, errors
Workers = dict[str, tuple[Connection, BaseProcess]]
RANK, ALPHA = 16, 32
LORA = LoraConfig(RANK, ALPHA)
READY, PROFILE = "ready", "profile"  # an answer and a request of `serve`
TITLE = "# Fine-tuning step"  # the first line of the file --out
PEER_PACKAGES = ("transformers", "liger_kernel", "peft")
HEADER = ("shape", "contender", "tokens/s", "peak GiB", "ratio")
WARM_STEPS = 4
PROFILED = ("ours", "ours, all saved", "ours, budget", "ours, weights")  # contenders with floors
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


def engine_of(name: str, shape: Shape, device: str, budget: float) -> Engine:
    """The engine of a contender of ours. budget: GiB of `ours, budget`."""
    limit = EVERYTHING if "all saved" in name else budget if "budget" in name else None
    return Engine(
        shape.config(), shape.batch_size, shape.seq_len, device=device, dtype=torch.bfloat16,
        lora=LORA if has_adapters(name) else None,
        states=States("bfloat16", "none", "bfloat16") if "lean" in name else States(),
        memory_budget=None if limit is None else int(limit * _GIB) - (UNPLANNED_BYTES if device == "cuda" else 0),
        accumulate=False,
    )  # fmt: skip


def has_adapters(name: str) -> bool:
    return not name.endswith(("weights", "lean"))


def ours(engine: Engine, shape: Shape, device: str) -> Step:
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


def serve(pipe: Connection, name: str, shape: Shape, device: str, budget: float) -> None:
    """Builds a contender. Then reads requests from the pipe and answers each: a number of seconds with (tokens/s, peak bytes),
    PROFILE with `profile_of` the step. An error is answered with its text."""
    try:
        engine = engine_of(name, shape, device, budget) if name.startswith("ours") else None
        if engine is None:
            step = peer(shape, device, adapters=has_adapters(name), checkpoint="checkpoint" in name)
        else:
            step = ours(engine, shape, device)
        for _ in range(WARM_STEPS):
            step()
        _wait(device)
        pipe.send(READY)
        while (asked := pipe.recv()) is not None:
            if asked == PROFILE and engine is not None:
                pipe.send(profile_of(engine, step, device))
                continue
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < asked:
                step()
                step()
                _wait(device)
                count += 2
            rate = count * shape.batch_size * shape.seq_len / (time.perf_counter() - began)
            pipe.send((rate, torch.cuda.max_memory_allocated() if device == "cuda" else 0))
    except (RuntimeError, ValueError, ImportError, TypeError, AttributeError):  # the other contenders continue
        pipe.send(traceback.format_exc(limit=3))


def profile_of(engine: Engine, step: Step, device: str) -> tuple[list[Launch], list[str]]:
    """The kernels of PROFILED_STEPS steps, and the groups of the products of a step with adapters."""
    sustained(step, WARM_SECONDS, torch.device(device))
    return launches_of(step, PROFILED_STEPS), products_of(engine.spec.declare().step) if engine.spec.lora else []


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def start(shape: Shape, device: str, names: list[str], budget: float) -> tuple[Workers, dict[str, str]]:
    """The processes of the contenders, and contender that failed → its error. All start at once."""
    spawn, workers, failed = multiprocessing.get_context("spawn"), Workers(), {}
    for name in names:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs, name, shape, device, budget), daemon=True)
        process.start()
        theirs.close()  # so that `answer_of` sees the end of the process
        workers[name] = mine, process
    for name in names:
        answer = answer_of(workers[name][0])
        if answer != READY:
            failed[name] = answer
            workers.pop(name)
    return workers, failed


def answer_of(pipe: Connection) -> Any:
    """The answer of a process, or a sentence if the process has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return "the process ended without an answer"


def ask(name: str, question: object, workers: Workers, failed: dict[str, str]) -> Any:
    """The answer of a contender. After an error: None, and the contender is in `failed` instead of `workers`."""
    pipe, _ = workers[name]
    pipe.send(question)
    answer = answer_of(pipe)
    if not isinstance(answer, str):
        return answer
    failed[name] = answer
    workers.pop(name)
    return None


def stop(workers: Workers) -> None:
    for pipe, process in workers.values():
        pipe.send(None)
        process.join()


def measure(
    shape: Shape, device: str, names: list[str], rounds: int, seconds: float, budget: float
) -> tuple[dict[str, list[tuple[float, int]]], dict[str, str]]:
    """(contender → (tokens/s, peak bytes) of each round, contender that failed → its error)"""
    workers, failed = start(shape, device, names, budget)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in workers}
    for i in range(rounds):
        for name in list(workers)[:: -1 if i % 2 else 1]:
            if answer := ask(name, seconds, workers, failed):
                found[name].append(answer)
    stop(workers)
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


def breakdowns(
    shape: Shape, device: str, names: list[str], budget: float
) -> tuple[dict[str, Breakdown], dict[str, str]]:
    """(contender of ours → a step by group, contender that failed → its error)"""
    workers, failed = start(shape, device, names, budget)
    found = {}
    for name in list(workers):
        if answer := ask(name, PROFILE, workers, failed):
            launches, products = answer
            found[name] = break_down(launches, floors_of(name, shape), PROFILED_STEPS, products)
    stop(workers)
    return found, failed


def floors_of(name: str, shape: Shape) -> dict[str, float]:
    """group → its floor in milliseconds, for a contender of ours with float32 states."""
    config, lora = shape.config(), LORA if has_adapters(name) else None
    trained = parameter_count(config) if lora is None else adapter_count(config, lora)
    element_bytes = torch.bfloat16.itemsize
    return floors(step_demands(config, shape.batch_size, shape.seq_len, element_bytes, trained, lora), Rates())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", choices=[*SHAPES, []], help="0.5B, 1.5B or tiny; default: 0.5B and 1.5B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--budget", type=float, help="GiB of `ours, budget`; default: `checkpointed_gib` of the shape")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders, such as 'ours, weights'; default: all")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--breakdown", action="store_true", help="our step by group, against each group's floor")
    parser.add_argument("--tiny", action="store_true", help="a small shape, 0.2 s for each contender in a round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables and the JSON to a file too")
    args = parser.parse_args(arguments)
    _check(args.rounds, args.seconds, args.budget, args.device)
    if args.out is not None:
        check_replaceable(args.out, TITLE)
    names = ["tiny"] if args.tiny else args.shapes or ["0.5B", "1.5B"]
    run = breakdown_shapes if args.breakdown else compare_shapes
    text, rows, errors = run(names, args)
    lines = json.dumps(rows, indent=1)
    print(lines if args.json else text, flush=True)
    if args.out is not None:
        given = sys.argv[1:] if arguments is None else arguments
        write_results(args.out, TITLE, about_run(args.device, "finetune", given), text, lines)
    for error in errors:
        print(error, file=sys.stderr)
    return int(bool(errors))


def compare_shapes(names: list[str], args: argparse.Namespace) -> Results:
    """The speed and memory of the contenders."""
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
    for name in names:
        shape = SHAPES[name]
        for group in groups:
            chosen = [who for who in group if with_peer or not who.startswith("peer")]
            chosen = [who for who in chosen if args.only is None or who in args.only]
            if not chosen:
                continue
            found, failed = measure(shape, args.device, chosen, rounds, seconds, _budget(args.budget, shape))
            new = rows_of(name, found)
            print(table(HEADER, [_cells(row) for row in new]), file=sys.stderr, flush=True)
            rows += new
            errors += [f"{name}, {who}: {why}" for who, why in failed.items()]
    return table(HEADER, [_cells(row) for row in rows]), rows, errors


def breakdown_shapes(names: list[str], args: argparse.Namespace) -> Results:
    """A step of each contender of ours by group of kernels."""
    chosen = args.only or ["ours", "ours, weights"]
    unknown = [who for who in chosen if who not in PROFILED]
    if unknown:
        raise ValueError(f"only: got {unknown[0]!r} with breakdown; accepted: {', '.join(map(repr, PROFILED))}")
    parts: list[str] = []
    rows: list[dict[str, Any]] = []
    errors: list[str] = []
    for name in names:
        found, failed = breakdowns(SHAPES[name], args.device, chosen, _budget(args.budget, SHAPES[name]))
        parts += [f"{name}, {who}: one step\n{breakdown_report(each, Rates())}" for who, each in found.items()]
        rows += [{"shape": name, "contender": who} | asdict(each) for who, each in found.items()]
        errors += [f"{name}, {who}: {why}" for who, why in failed.items()]
    return "\n\n".join(parts), rows, errors


def _budget(given: float | None, shape: Shape) -> float:
    return shape.checkpointed_gib if given is None else given


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
