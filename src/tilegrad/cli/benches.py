"""`tilegrad bench`: the benchmarks of the package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import DTYPES, Commands, Parser, add_command, add_dtype

PLOTS = (".png", ".svg", ".pdf", ".jpg", ".webp")  # formats that matplotlib writes


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of a benchmark, as the keyword arguments of its function."""
    return {name: value for name, value in vars(args).items() if name not in ("run", "parser")}


def _bench_memory(args: argparse.Namespace) -> int:
    from ..bench.memory import bench_memory

    return bench_memory(**_options(args))


def _bench_attention(args: argparse.Namespace) -> int:
    from ..bench.attention import bench_attention
    from ..text.atomic import check_new

    if args.plot is not None:  # check the name before anything is measured
        if Path(args.plot).suffix not in PLOTS:
            raise ValueError(f"plot: got {args.plot!r}; accepted: a name that ends with {', '.join(PLOTS)}")
        check_new(Path(args.plot))
    return bench_attention(**_options(args))


def _bench_host(args: argparse.Namespace) -> int:
    from ..bench.host import bench_host

    return bench_host(**_options(args))


def _bench_generate(args: argparse.Namespace) -> int:
    from ..bench.generate import bench_generate

    return bench_generate(**_options(args))


def add_benches(commands: Commands) -> None:
    bench = add_command(commands, "bench", "measure speed and memory, compared with other libraries").add_subparsers(
        metavar="WHAT", required=True
    )
    _add_attention(bench)
    host = add_command(bench, "host", "time the host's work in a tiny call of attention, and in SDPA", _bench_host)
    add_dtype(host, "compute in this dtype: bfloat16, float16 or float32 (default: %(default)s)", default="bfloat16")
    _add_rounds(host, 200)
    _add_generate(bench)
    memory = add_command(
        bench, "memory", "time requests of a buffer from the manager, and calls of torch.empty", _bench_memory
    )
    memory.add_argument("--json", action="store_true", help="JSON instead of the table")


def _add_attention(bench: Commands) -> None:
    attention = add_command(
        bench,
        "attention",
        "time our kernels and those of installed libraries (peers), each after a check of its results",
        _bench_attention,
    )
    add_dtype(
        attention, "compute in this dtype: bfloat16, float16 or float32 (default: %(default)s)", default="bfloat16"
    )
    attention.add_argument(
        "--kernels", nargs="+", metavar="NAME", help="kernels to time (default: all that run on the device)"
    )
    text = "which shapes: training, short, wide, window, gqa, varlen, decode, laptop, cpu or cpu-window"
    attention.add_argument("--preset", metavar="NAME", help=text)
    text = "shapes instead of a preset; after D also window=N, hkv=N, tq=N"
    attention.add_argument("--shape", dest="shapes", nargs="+", metavar="B,H,T,D[,causal]", help=text)
    text = "libraries to compare with (default: all installed; --peers without a name: none)"
    attention.add_argument("--peers", nargs="*", metavar="NAME", help=text)
    attention.add_argument("--deterministic", action="store_true", help="time the deterministic backward")
    _add_rounds(attention, 30)
    attention.add_argument("--plot", metavar="FILE", help="draw bars into a new file (needs matplotlib)")
    text = "also print each kernel's share of the device's limits"
    attention.add_argument("--profile", action="store_true", help=text)


def _add_generate(bench: Commands) -> None:
    generate = add_command(
        bench, "generate", "measure tokens per second of generation, with transformers for comparison", _bench_generate
    )
    text = "a preset, qwen2.5-0.5b or qwen2.5-1.5b (default: %(default)s)"
    generate.add_argument("--preset", default="gpt2", help=text)
    add_dtype(generate, "compute in this dtype (default: %(default)s)", default="bfloat16", choices=DTYPES)
    text = "sequences at once (default: 1)"
    generate.add_argument("--batch-size", dest="batch_sizes", type=int, nargs="+", default=[1], metavar="N", help=text)
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="new tokens (default: %(default)s)")
    text = "also compare reading 8 prompts of N tokens with the forward of training (default: no)"
    generate.add_argument("--prefill", type=int, default=0, metavar="N", help=text)
    text = "also measure tilegrad with invariant=True"
    generate.add_argument("--invariant", action="store_true", help=text)
    generate.add_argument("--no-peers", dest="peers", action="store_false", help="do not run transformers")
    _add_rounds(generate, 5)


def _add_rounds(command: Parser, repeats: int) -> None:
    """Add the flags that all benchmarks with interleaved rounds have."""
    command.add_argument("--device", help="where to run (default: cuda if there is a GPU, else cpu)")
    text = "interleaved rounds (default: %(default)s)"
    command.add_argument("--repeats", type=int, default=repeats, metavar="N", help=text)
    command.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    command.add_argument("--out", metavar="FILE", help="append the JSON lines to a file")
