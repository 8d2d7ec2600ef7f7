"""`tilegrad bench …`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import DTYPES, PRESETS, Commands, add_command


def _bench_memory(args: argparse.Namespace) -> int:
    from ..bench.memory import bench_memory

    return bench_memory(json=args.json)


def _bench_training(args: argparse.Namespace) -> int:
    from ..bench.training import CELLS, bench_training

    given = (args.dtype, args.batch_size, args.seq_len)
    if any(given) and not all(given):
        raise ValueError("one cell needs all of --dtype, --batch-size and --seq-len; accepted: all three, or none")
    cells = [(args.dtype, args.batch_size, args.seq_len)] if all(given) else CELLS
    out = Path(args.out) if args.out else None
    return bench_training(
        preset=args.preset, cells=cells, repeats=args.repeats, limit_s=args.limit_s, json=args.json, out=out
    )


def _bench_attention(args: argparse.Namespace) -> int:
    from ..bench.attention import bench_attention

    return bench_attention(
        device=args.device, dtype=args.dtype, kernels=args.kernels, preset=args.preset, peers=args.peers,
        repeats=args.repeats, json=args.json, out=args.out, plot=args.plot, profile=args.profile, tune=args.tune,
        deterministic=args.deterministic, shapes=args.shape,
    )  # fmt: skip


def _bench_ops(args: argparse.Namespace) -> int:
    from ..bench.ops import bench_ops

    return bench_ops(device=args.device, dtype=args.dtype, repeats=args.repeats, rows=args.rows, json=args.json)


def add_benches(commands: Commands) -> None:
    bench = add_command(commands, "bench", "measure, against the peers that are there").add_subparsers(
        metavar="WHAT", required=True
    )
    attention = add_command(
        bench,
        "attention",
        "our kernels and the peers that are there, after a check against the oracle",
        _bench_attention,
    )
    attention.add_argument("--device", help="default: cuda where there is one, else cpu")
    attention.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default: %(default)s)")
    attention.add_argument("--kernels", nargs="+", metavar="NAME", help="default: those that run there")
    attention.add_argument(
        "--preset",
        metavar="NAME",
        help="which shapes: training, short, wide, window, gqa, varlen, decode, laptop, cpu or cpu-window",
    )
    attention.add_argument(
        "--shape",
        nargs="+",
        metavar="B,H,T,D[,causal]",
        help="these instead of a preset; behind D also window=N, hkv=N, tq=N",
    )
    attention.add_argument("--peers", nargs="*", metavar="NAME", help="default: all that are there; no name: none")
    attention.add_argument("--deterministic", action="store_true", help="the backward's deterministic mode")
    attention.add_argument(
        "--repeats", type=int, default=30, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    attention.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    attention.add_argument("--out", metavar="FILE", help="append the JSON lines to a file")
    attention.add_argument("--plot", metavar="FILE", help="draw bars (needs matplotlib)")
    attention.add_argument("--profile", action="store_true", help="each kernel's share of the device's limits")
    attention.add_argument("--tune", action="store_true", help="find the fastest tiles and write them into tiles.py")
    training = add_command(bench, "training", "a whole step on the CPU against eager PyTorch", _bench_training)
    training.add_argument("--preset", choices=PRESETS, default="gpt2", help="default: %(default)s")
    training.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="pairs of steps per cell (default: %(default)s)"
    )
    training.add_argument(
        "--limit-s", type=float, default=150.0, metavar="S", help="for a process (default: %(default)s)"
    )
    training.add_argument("--dtype", choices=DTYPES, help="with --batch-size and --seq-len: this cell alone")
    training.add_argument("--batch-size", type=int, metavar="N")
    training.add_argument("--seq-len", type=int, metavar="N")
    training.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    training.add_argument("--out", metavar="FILE", help="write both to a file")
    ops = add_command(
        bench, "ops", "every kernel of norms, activations and sums, as bytes/s against a copy", _bench_ops
    )
    ops.add_argument("--device", help="default: cuda where there is one, else cpu")
    ops.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32 (default: %(default)s)")
    ops.add_argument("--rows", type=int, nargs="+", metavar="N", help="B·T (default: 16384 65536 on CUDA, 512 else)")
    ops.add_argument("--repeats", type=int, default=20, metavar="N", help="interleaved rounds (default: %(default)s)")
    ops.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    memory = add_command(bench, "memory", "what a buffer from the manager costs, against torch.empty", _bench_memory)
    memory.add_argument("--json", action="store_true", help="the same as data")
