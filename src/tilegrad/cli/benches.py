"""`tilegrad bench …`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from .arguments import DTYPES, PRESETS, Commands, add_command, add_dtype

PLOTS = (".png", ".svg", ".pdf", ".jpg", ".webp")  # of those that matplotlib writes


def _plot(args: argparse.Namespace) -> str | None:
    """Where to draw, known before anything is measured."""
    plot: str | None = args.plot
    if plot is not None and Path(plot).suffix not in PLOTS:
        raise ValueError(f"plot: got {plot!r}; accepted: a name that ends with {', '.join(PLOTS)}")
    return plot


def _bench_memory(args: argparse.Namespace) -> int:
    from ..bench.memory import bench_memory

    return bench_memory(json=args.json)


def _bench_training(args: argparse.Namespace) -> int:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _bench_training_cpu(args) if device == "cpu" else _bench_training_cuda(args, device)


def _bench_training_cuda(args: argparse.Namespace, device: str) -> int:
    from ..bench.breakdown import Rates
    from ..bench.peer import LIKE_FOR_LIKE, PeerForm
    from ..bench.training_cuda import LIMIT_S, Settings, bench_training_cuda

    if args.dtype or args.batch_size or args.seq_len:
        raise ValueError(
            f"--dtype, --batch-size, --seq-len: got one on {device}; accepted: on a CPU, --device cpu; here --case"
        )
    plot = _plot(args)
    form = LIKE_FOR_LIKE if args.like_for_like else PeerForm()
    settings = Settings(
        device=device, peers=tuple(args.peers), form=replace(form, sdpa=args.sdpa), seconds=args.seconds, rounds=args.rounds,
        limit_s=args.limit_s or LIMIT_S, peak_flops=1e12 * args.peak_tflops,
        rates=Rates(1e12 * args.floor_tflops, 1e12 * args.floor_tbytes, 2e12 * args.floor_tflops),
    )  # fmt: skip
    return bench_training_cuda(
        cases=args.case, settings=settings, breakdown=args.breakdown, losses=args.losses, steps=args.steps, json=args.json,
        out=Path(args.out) if args.out else None, plot=Path(plot) if plot else None,
    )  # fmt: skip


def _bench_training_cpu(args: argparse.Namespace) -> int:
    from ..bench.training import CELLS, LIMIT_S, bench_training

    of_a_gpu = {"--case": args.case, "--breakdown": args.breakdown, "--losses": args.losses, "--plot": args.plot}
    for name, value in of_a_gpu.items():
        if value:
            raise ValueError(f"{name}: got {value!r} on a CPU; accepted: on a GPU, --device cuda")
    given = (args.dtype, args.batch_size, args.seq_len)
    if any(given) and not all(given):
        raise ValueError("one cell needs all of --dtype, --batch-size and --seq-len; accepted: all three, or none")
    cells = [(args.dtype, args.batch_size, args.seq_len)] if all(given) else CELLS
    out = Path(args.out) if args.out else None
    return bench_training(
        preset=args.preset, cells=cells, repeats=args.repeats, limit_s=args.limit_s or LIMIT_S, json=args.json, out=out
    )


def _bench_attention(args: argparse.Namespace) -> int:
    from ..bench.attention import bench_attention

    return bench_attention(
        device=args.device, dtype=args.dtype, kernels=args.kernels, preset=args.preset, peers=args.peers,
        repeats=args.repeats, json=args.json, out=args.out, plot=_plot(args), profile=args.profile, tune=args.tune,
        deterministic=args.deterministic, shapes=args.shape,
    )  # fmt: skip


def _bench_host(args: argparse.Namespace) -> int:
    from ..bench.host import bench_host

    return bench_host(device=args.device, dtype=args.dtype, repeats=args.repeats, json=args.json, out=args.out)


def _bench_ops(args: argparse.Namespace) -> int:
    from ..bench.ops import bench_ops

    return bench_ops(device=args.device, dtype=args.dtype, repeats=args.repeats, rows=args.rows, json=args.json)


def _bench_dilated(args: argparse.Namespace) -> int:
    from ..bench.dilated import bench_dilated

    given = {"modes": args.mode, "lengths": args.lengths, "segments": args.segments, "rates": args.rates}
    return bench_dilated(
        device=args.device, dtype=args.dtype, heads=args.heads, head_dim=args.head_dim, batch_size=args.batch_size,
        causal=args.causal, peers=args.peers, repeats=args.repeats, json=args.json, out=args.out,
        **{name: value for name, value in given.items() if value},
    )  # fmt: skip


def _add_dilated(bench: Commands) -> None:
    dilated = add_command(
        bench,
        "dilated",
        "dilated attention against copies of its positions on SDPA: time per token, memory",
        _bench_dilated,
    )
    dilated.add_argument("--device", help="default: cuda where there is one, else cpu")
    add_dtype(dilated, "bfloat16, float16 or float32 (default: bfloat16 on CUDA, else float32)")
    dilated.add_argument("--mode", nargs="+", metavar="NAME", help="head_groups, longnet (default: both)")
    dilated.add_argument(
        "--lengths", type=int, nargs="+", metavar="T", help="default: 32768 … 524288 on CUDA, 4096 … 16384 else"
    )
    dilated.add_argument(
        "--segments", type=int, nargs="+", metavar="S", help="default: 2048 8192 32768 on CUDA, 256 1024 4096 else"
    )
    dilated.add_argument("--rates", type=int, nargs="+", metavar="R", help="default: 1 4 16")
    dilated.add_argument("--heads", type=int, default=16, metavar="H", help="default: %(default)s")
    dilated.add_argument("--head-dim", type=int, default=64, metavar="D", help="default: %(default)s")
    dilated.add_argument("--batch-size", type=int, default=1, metavar="B", help="default: %(default)s")
    dilated.add_argument("--causal", action="store_true")
    dilated.add_argument("--peers", nargs="*", metavar="NAME", help="flash, cudnn; sdpa on a CPU (default: all)")
    dilated.add_argument(
        "--repeats", type=int, default=10, metavar="N", help="interleaved rounds (default: %(default)s)"
    )
    dilated.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    dilated.add_argument("--out", metavar="FILE", help="append the JSON lines to a file")


def _add_training(bench: Commands) -> None:
    training = add_command(
        bench, "training", "a whole step against PyTorch: on a GPU compiled and eager, on a CPU eager", _bench_training
    )
    training.add_argument("--device", help="default: cuda where there is one, else cpu")
    training.add_argument(
        "--limit-s", type=float, metavar="S", help="for a process (default: 150 on a CPU, 400 to start on a GPU)"
    )
    training.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    training.add_argument("--out", metavar="FILE", help="write both to a file")
    gpu = training.add_argument_group("on a GPU")
    gpu.add_argument(
        "--case", nargs="+", metavar="NAME", help="such as 124m-b16 (default: all; a wrong name lists them)"
    )
    gpu.add_argument(
        "--peers", nargs="*", choices=("compiled", "eager"), default=["compiled", "eager"], help="default: %(default)s"
    )
    gpu.add_argument(
        "--like-for-like", action="store_true", help="peers with tanh GELU and a bfloat16 residual stream, as ours"
    )
    gpu.add_argument(
        "--sdpa",
        choices=("default", "cudnn", "flash"),
        default="default",
        help="the peers' attention (default: torch's choice)",
    )
    gpu.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="of a contender in a round (default: %(default)s)"
    )
    gpu.add_argument("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
    gpu.add_argument("--breakdown", action="store_true", help="our step by group, against each group's floor")
    gpu.add_argument(
        "--losses", action="store_true", help="loss curves on the text that ships, two seeds, against the first peer"
    )
    gpu.add_argument("--steps", type=int, default=500, metavar="N", help="of --losses (default: %(default)s)")
    gpu.add_argument("--plot", metavar="FILE", help="draw the result (needs matplotlib)")
    gpu.add_argument(
        "--peak-tflops",
        type=float,
        default=989.5,
        metavar="X",
        help="of MFU: the device's bfloat16 peak (default: %(default)s)",
    )
    gpu.add_argument(
        "--floor-tflops",
        type=float,
        default=690.0,
        metavar="X",
        help="of floors: a bfloat16 GEMM's (default: %(default)s)",
    )
    gpu.add_argument(
        "--floor-tbytes", type=float, default=4.3, metavar="X", help="of floors: memory's TB/s (default: %(default)s)"
    )
    cpu = training.add_argument_group("on a CPU")
    cpu.add_argument("--preset", choices=PRESETS, default="gpt2", help="default: %(default)s")
    cpu.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="pairs of steps per cell (default: %(default)s)"
    )
    add_dtype(cpu, "with --batch-size and --seq-len: this cell alone", choices=DTYPES)
    cpu.add_argument("--batch-size", type=int, metavar="N")
    cpu.add_argument("--seq-len", type=int, metavar="N")


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
    add_dtype(attention, "bfloat16, float16 or float32 (default: %(default)s)", default="bfloat16")
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
    host = add_command(bench, "host", "what a tiny call of attention costs the host, beside SDPA's", _bench_host)
    host.add_argument("--device", help="default: cuda where there is one, else cpu")
    add_dtype(host, "bfloat16, float16 or float32 (default: %(default)s)", default="bfloat16")
    host.add_argument("--repeats", type=int, default=200, metavar="N", help="interleaved rounds (default: %(default)s)")
    host.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    host.add_argument("--out", metavar="FILE", help="append the JSON lines to a file")
    _add_dilated(bench)
    _add_training(bench)
    ops = add_command(
        bench, "ops", "every kernel of norms, activations and sums, as bytes/s against a copy", _bench_ops
    )
    ops.add_argument("--device", help="default: cuda where there is one, else cpu")
    add_dtype(ops, "bfloat16, float16 or float32 (default: %(default)s)", default="bfloat16")
    ops.add_argument("--rows", type=int, nargs="+", metavar="N", help="B·T (default: 16384 65536 on CUDA, 512 else)")
    ops.add_argument("--repeats", type=int, default=20, metavar="N", help="interleaved rounds (default: %(default)s)")
    ops.add_argument("--json", action="store_true", help="JSON lines instead of the table")
    memory = add_command(bench, "memory", "what a buffer from the manager costs, against torch.empty", _bench_memory)
    memory.add_argument("--json", action="store_true", help="the same as data")
