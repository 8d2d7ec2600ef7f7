"""A whole training step, compared with the same model in PyTorch: `python -m benchmarks.training`, on a GPU and on a CPU.

Contenders run in processes of their own (contenders.py) and are interleaved: in a round each runs back-to-back steps on
new tokens for `seconds`, in an order that is reversed every other round. A power-capped card slows down under load, so the
runs must be long.

    tokens/s    (tokens of a round) / (seconds of the round); the median over rounds
    speed       the median over rounds of (tokens/s of tilegrad) / (tokens/s of the peer)
    J/token     joules of the GPU by NVML (energy.py)
    MFU         FLOPs of a step (`step_flops` in step_cost.py) · steps/s / PEAK_FLOPS
    memory      torch.cuda.max_memory_allocated and …_reserved in the process of the contender, over the timed steps; on a CPU
                (peak of resident bytes) − (resident bytes after the imports), in a process whose malloc returns freed pages

A contender gets no speed if its loss does not fall like the loss of the first peer (`disagreement` in contenders.py).
"""

from __future__ import annotations

import argparse
import json as json_format
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilegrad.model.config import ModelConfig
from tilegrad.model.transformer import parameters
from tilegrad.text.atomic import check_replaceable
from tilegrad.text.environment import environment
from tilegrad.text.table import table

from .breakdown import Breakdown, Rates, break_down, floors
from .breakdown import report as breakdown_report
from .cases import Case, Problem, cases_of
from .contenders import FAULTS_BYTES, PAGE_BYTES, PROFILED_STEPS, Answer, Entry, Kind, Worker, disagreement
from .loss_curves import Curves, measure_curves
from .loss_curves import report as curves_report
from .peer import LIKE_FOR_LIKE, PeerForm
from .step_cost import step_demands
from .training_plots import Drawn, draw

PEAK_FLOPS = 989.5e12  # the number that NVIDIA gives for H100 and H200 SXM: bfloat16 without sparsity
PEERS: tuple[Kind, ...] = ("compiled", "eager")
EVERY_PEER: tuple[Kind, ...] = (*PEERS, "liger", "torchao")  # the last two run only by name, for the shapes of Qwen2.5
GOAL_PEER: dict[str, Kind] = {"cuda": "compiled", "cpu": "eager"}  # device → the peer of the goals
LIMIT_S = 400.0
TITLE = "# Training step"  # the first line of the file --out
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """seconds   time of one contender in one round
    limit_s   the most seconds that a process may take to start, which includes compiling, or to answer"""

    device: str = "cuda"
    peers: tuple[Kind, ...] = PEERS
    form: PeerForm = field(default_factory=PeerForm)
    seconds: float = 4.0
    rounds: int = 2
    limit_s: float = LIMIT_S
    peak_flops: float = PEAK_FLOPS
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds: got {self.rounds}; accepted: an int ≥ 1")
        for name in ("seconds", "limit_s", "peak_flops"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; accepted: a number > 0")
        unknown = sorted(set(self.peers) - set(EVERY_PEER))
        if unknown:
            raise ValueError(f"peers: got {unknown[0]!r}; accepted: {', '.join(EVERY_PEER)}")


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one contender. A missing result is None, and `note` says why."""

    case: str
    contender: Kind
    tokens_per_s: tuple[float, ...] = ()  # one value for each round
    flops_per_token: float = 0.0
    mfu: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    planned_bytes: int | None = None
    loss: float | None = None
    check_losses: tuple[float, ...] = ()
    start_s: float | None = None
    sdpa: str | None = None
    clocks: tuple[str, ...] = ()  # SM clock, power, and whether it is capped, in the middle of each round
    page_faults: float = 0.0  # page faults in a step, on a CPU
    joules_per_token: float | None = None
    note: str = ""
    wrong: bool = False

    @property
    def speed(self) -> float | None:
        return median(self.tokens_per_s) if self.tokens_per_s else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """(value of tilegrad) / (value of a peer) for tokens/s and for peak allocated bytes, with the goals of the case if they are
    against this peer."""

    case: str
    peer: Kind
    speed: float | None
    speed_goal: float | None
    aim: float | None
    memory: float | None
    memory_goal: float | None


def measure(problem: Problem, cases: Sequence[Case], settings: Settings) -> list[Row]:
    """Rows of the peers, then of each case, for one problem."""
    entries = [Entry(peer, cases[0], settings.form) for peer in settings.peers]
    entries += [Entry("ours", case) for case in cases]
    resident = {entry.name: _resident(entry, settings) for entry in entries if entry.device == "cpu"}
    workers = [Worker(entry) for entry in entries]
    try:
        started = [_progress(worker, worker.answer(settings.limit_s), "started") for worker in workers]
        alive = [worker for worker, answer in zip(workers, started, strict=True) if "failed" not in answer]
        runs: dict[str, list[Answer]] = {worker.entry.name: [] for worker in workers}
        for round_ in range(settings.rounds):
            for worker in alive if round_ % 2 == 0 else reversed(alive):
                worker.ask("run", settings.seconds)
                clock = _clock(settings) if worker.entry.device == "cuda" else ""
                answer = _progress(worker, worker.answer(settings.limit_s), f"round {round_ + 1}")
                runs[worker.entry.name].append(answer | {"clock": clock} | resident.get(worker.entry.name, {}))
            alive = [worker for worker in alive if "failed" not in runs[worker.entry.name][-1]]
    finally:
        for worker in workers:
            worker.close()
    reference = next((answer["losses"] for answer in started if "losses" in answer), None)
    return [
        row_of(worker.entry, problem, answer, runs[worker.entry.name], reference, settings.peak_flops)
        for worker, answer in zip(workers, started, strict=True)
    ]


def _resident(entry: Entry, settings: Settings) -> Answer:
    """The peak bytes of a contender on a CPU, measured in another process, which only starts and ends."""
    worker = Worker(replace(entry, malloc="return"))
    try:
        answer = _progress(worker, worker.answer(settings.limit_s), "measured alone")
    finally:
        worker.close()
    return {"allocated_bytes": answer.get("start_allocated_bytes")}


def row_of(
    entry: Entry,
    problem: Problem,
    started: Answer,
    runs: Sequence[Answer],
    reference: Sequence[float] | None,
    peak_flops: float,
) -> Row:
    case = entry.case.name
    failed = next((str(answer["failed"]) for answer in (started, *runs) if "failed" in answer), "")
    if failed:
        return Row(case, entry.kind, note=f"failed: {failed}", wrong=entry.kind == "ours")
    by_adamw = entry.kind != "ours" or entry.case.muon is None
    wrong = disagreement(started["losses"], reference, same_optimizer=by_adamw) if reference else ""
    faults = median(run["page_faults"] for run in runs) if entry.device == "cpu" else 0.0
    slow_malloc = ""
    if faults * PAGE_BYTES > FAULTS_BYTES:
        slow_malloc = f"{faults:.0f} page faults in a step: malloc did not keep freed pages"
    speeds = tuple(problem.tokens * run["steps"] / run["seconds"] for run in runs)
    peaks = {
        name: max((run[name] for run in runs if run[name] is not None), default=None)
        for name in ("allocated_bytes", "reserved_bytes")
    }
    spent = [run["joules"] / (problem.tokens * run["steps"]) for run in runs if run.get("joules") is not None]
    return Row(
        case, entry.kind, joules_per_token=median(spent) if spent else None,
        tokens_per_s=() if wrong else speeds, flops_per_token=problem.flops / problem.tokens,
        mfu=None if wrong or entry.device == "cpu" else median(speeds) * problem.flops / problem.tokens / peak_flops,
        planned_bytes=started.get("planned_bytes"), loss=runs[-1]["loss"],
        check_losses=tuple(started["losses"]), start_s=started["start_s"],
        sdpa=started.get("sdpa"), clocks=tuple(run["clock"] for run in runs if run.get("clock")),
        page_faults=faults, note=f"WRONG: {wrong}" if wrong else slow_malloc, wrong=bool(wrong), **peaks,
    )  # fmt: skip


def ratios(rows: Sequence[Row], cases: Sequence[Case], peers: Iterable[Kind]) -> list[Ratio]:
    """The ratios of tilegrad to each peer, for the rows of one problem."""
    found = []
    for case in cases:
        ours = next(row for row in rows if row.contender == "ours" and row.case == case.name)
        for peer in peers:
            theirs = next(row for row in rows if row.contender == peer)
            pairs = list(zip(ours.tokens_per_s, theirs.tokens_per_s, strict=False))
            memory = None
            if ours.allocated_bytes and theirs.allocated_bytes:
                memory = ours.allocated_bytes / theirs.allocated_bytes
            speed = median(a / b for a, b in pairs) if pairs else None
            goals = (case.speed, case.aim, case.memory) if peer == GOAL_PEER[case.device] else (None, None, None)
            found.append(Ratio(case.name, peer, speed, goals[0], goals[1], memory, goals[2]))
    return found


def _progress(worker: Worker, answer: Answer, what: str) -> Answer:
    said = {"failed": "{}", "start_s": "{:.0f} s"}
    details = [text.format(answer[name]) for name, text in said.items() if name in answer]
    if "steps" in answer:
        details.append(f"{answer['steps']} steps in {answer['seconds']:.2f} s")
    _say(f"{worker.entry.case.name}: {worker.entry.name}: {what}, {', '.join(details)}")
    return answer


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _clock(settings: Settings) -> str:
    """SM clock, power draw, and whether the power cap is active, in the middle of a round."""
    time.sleep(settings.seconds / 2)
    query = "clocks.sm,power.draw,clocks_event_reasons.sw_power_cap"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def parameter_count(config: ModelConfig) -> int:
    params = parameters(config).values()
    return sum(torch.Size(p.master.shape).numel() for p in params)


def float8_products(case: Case) -> frozenset[str]:
    """The groups of a breakdown whose products are in float8."""
    of_linear = {"plain": (), "fp8": ("forward", "dgrad"), "fp8-all": ("forward", "dgrad", "wgrad")}[case.linear]
    of_head = ("forward", "dgrad", "wgrad") if case.head == "fp8" else ()
    return frozenset((*(f"GEMM {kind}" for kind in of_linear), *(f"head {kind}" for kind in of_head)))


def measure_breakdown(case: Case, settings: Settings) -> Breakdown:
    worker = Worker(Entry("ours", case))
    try:
        _progress(worker, _answered(worker, settings.limit_s), "started")
        worker.ask("profile")
        launches = _answered(worker, settings.limit_s)
    finally:
        worker.close()
    problem = case.problem
    element_bytes = getattr(torch, problem.dtype).itemsize
    demands = step_demands(
        problem.config, problem.batch_size, problem.seq_len, element_bytes, parameter_count(problem.config)
    )
    return break_down(launches, floors(demands, settings.rates, float8_products(case)), PROFILED_STEPS)


def _answered(worker: Worker, limit_s: float) -> Any:
    answer = worker.answer(limit_s)
    if isinstance(answer, dict) and "failed" in answer:
        raise RuntimeError(f"{worker.entry.case.name}: {worker.entry.name}: {answer['failed']}")
    return answer


def report(rows: Sequence[Row], found: Sequence[Ratio]) -> str:
    lines = [
        [
            row.case if row.contender == "ours" else f"  against {row.case}", row.contender, _number(row.speed, ",.0f"),
            f"{min(row.tokens_per_s):,.0f} … {max(row.tokens_per_s):,.0f}" if row.tokens_per_s else "–",
            _number(row.mfu, ".1%"), _number(row.joules_per_token, ".2e"),
            _gib(row.allocated_bytes), _gib(row.reserved_bytes), _gib(row.planned_bytes),
            _number(row.loss, ".3f"), _number(row.start_s, ".0f"),
        ]
        for row in rows
    ]  # fmt: skip
    sizes = ("allocated GiB", "reserved GiB", "planned GiB")
    text = [table(("case", "contender", "tokens/s", "rounds", "MFU", "J/token", *sizes, "loss", "start s"), lines)]
    if found:
        verdicts = []
        for r in found:
            speed = (_number(r.speed, ".3f", "×"), _verdict(r.speed, r.speed_goal, least=True))
            memory = (_number(r.memory, ".3f", "×"), _verdict(r.memory, r.memory_goal, least=False))
            verdicts.append([r.case, r.peer, *speed, _number(r.aim, ".2f", "×"), *memory])
        text += ["", table(("case", "against", "speed", "goal", "aim", "memory", "goal"), verdicts)]
    text += [f"{row.case}: {row.contender}: {row.note}" for row in rows if row.note]
    return "\n".join(text)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _gib(value: int | None) -> str:
    return "–" if value is None else f"{value / _GIB:.2f}"


def _verdict(value: float | None, goal: float | None, *, least: bool) -> str:
    if goal is None:
        return "–"
    sign = "≥" if least else "≤"
    if value is None:
        return f"{sign} {goal:.2f} not measured"
    return f"{sign} {goal:.2f} {'met' if (value >= goal if least else value <= goal) else 'missed'}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run: text, lines of JSON, the data of a plot, and the exit code."""

    text: str
    lines: tuple[dict[str, object], ...]
    drawn: Drawn
    code: int = 0


def speed_report(cases: Sequence[Case], settings: Settings) -> Report:
    rows: list[Row] = []
    found: list[Ratio] = []
    for problem in dict.fromkeys(case.problem for case in cases):
        alike = [case for case in cases if case.problem == problem]
        new = measure(problem, alike, settings)
        rows += new
        found += ratios(new, alike, settings.peers)
        _say("\n" + report(new, ratios(new, alike, settings.peers)))
    lines = [asdict(row) | {"speed": row.speed} for row in rows] + [{"ratio": asdict(ratio)} for ratio in found]
    kernels = ", ".join(sorted({row.sdpa for row in rows if row.sdpa})) or "none ran"
    note = (
        f"peer: {settings.form} ({kernels}); {settings.rounds} rounds of {settings.seconds:g} s each\n"
        f"MFU of {settings.peak_flops / 1e12:g} TFLOP/s: 3 · forward FLOPs of linears, head and causal attention, whatever is "
        "recomputed"
    )
    return Report(f"{report(rows, found)}\n{note}", tuple(lines), rows, int(any(row.wrong for row in rows)))


def breakdowns_report(cases: Sequence[Case], settings: Settings) -> Report:
    found = {case.name: measure_breakdown(case, settings) for case in cases}
    parts = [f"{name}: one step\n{breakdown_report(breakdown, settings.rates)}" for name, breakdown in found.items()]
    rates = settings.rates._asdict()
    lines = tuple({"case": name, "rates": rates} | asdict(breakdown) for name, breakdown in found.items())
    return Report("\n\n".join(parts), lines, found)


def losses_report(
    cases: Sequence[Case], settings: Settings, steps: int, against: str | None = None, tokens: Path | None = None
) -> Report:
    """The loss curves of the cases. against: another case of tilegrad to compare with, instead of the first peer. tokens: a
    file of tokens, instead of the shipped text."""
    if not settings.peers and against is None:
        raise ValueError("peers: got none; accepted: the one to compare loss curves with, compiled or eager")
    found: dict[str, Curves] = {}
    if against is not None:
        found = measure_curves(cases, cases_of([against], settings.device)[0], settings.limit_s, steps, tokens)
    else:
        for case in cases:
            found |= measure_curves([case], settings.peers[0], settings.limit_s, steps, tokens)
    text = "\n\n".join(f"{name}: {curves_report(curves)}" for name, curves in found.items())
    lines = tuple({"case": name, "agree": curves.agree} | asdict(curves) for name, curves in found.items())
    return Report(text, lines, found, int(not all(curves.agree for curves in found.values())))


def bench_training(
    *, cases: Sequence[str] | None = None, settings: Settings | None = None, breakdown: bool = False, losses: bool = False,
    steps: int = 500, against: str | None = None, tokens: Path | None = None, json: bool = False, out: Path | None = None,
    plot: Path | None = None,
) -> int:  # fmt: skip
    """Prints tables or JSON lines (the environment, then the results). The file `out` gets tables and lines, `plot` a picture.
    Returns the exit code, 1 if a case of tilegrad failed or was wrong, or if loss curves do not agree."""
    settings = Settings() if settings is None else settings
    if out is not None:
        check_replaceable(out, TITLE)
    for name, value in (("against", against), ("tokens", tokens)):
        if value is not None and not losses:
            raise ValueError(f"{name}: got {str(value)!r} without losses; accepted: None")
    if breakdown and losses:
        raise ValueError("losses: got True with breakdown; accepted: one of the two")
    chosen = cases_of(
        list(cases) if cases is not None else ["124m-b16"] if breakdown or losses else None, settings.device
    )
    if breakdown:
        result = breakdowns_report(chosen, settings)
    else:
        result = losses_report(chosen, settings, steps, against, tokens) if losses else speed_report(chosen, settings)
    return publish(result, settings, json=json, out=out, plot=plot)


def publish(result: Report, settings: Settings, *, json: bool, out: Path | None, plot: Path | None) -> int:
    about = about_run(settings.device, "training", sys.argv[1:])
    lines = "\n".join(json_format.dumps(line) for line in (about, *result.lines))
    print(lines if json else result.text)
    if out is not None:
        write_results(out, TITLE, about, result.text, lines)
    if plot is not None and find_spec("matplotlib") is None:
        _say(f"no picture at {plot}: matplotlib is not installed")
    elif plot is not None:
        draw(result.drawn, about, plot)
    return result.code


def about_run(device: str, benchmark: str, arguments: Sequence[str]) -> dict[str, object]:
    """The environment of a benchmark in bfloat16, and its command."""
    return environment(torch.device(device), torch.bfloat16) | {"command": command(arguments, benchmark)}


def write_results(out: Path, title: str, about: Mapping[str, object], text: str, lines: str) -> None:
    """Write a file of Markdown with the environment, a report, and the same results as lines of JSON."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    out.write_text(f"{title}\n\n{facts}\n\n```\n{text}\n```\n\n```json\n{lines}\n```\n", encoding="utf-8")


def command(arguments: Sequence[str], benchmark: str = "training") -> str:
    """The command line without the flags that say where the results go."""
    kept = [
        argument
        for before, argument in zip(("", *arguments), arguments, strict=False)
        if not {before, argument} & {"--out", "--plot"}
    ]
    return " ".join((f"python -m benchmarks.{benchmark}", *kept))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.split("\n", 1)[0])
    add, rates = parser.add_argument, Rates()
    add(
        "--case",
        nargs="+",
        metavar="NAME",
        help="such as 124m-b16 (default: all cases of the device; a wrong name lists them)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--peers", nargs="*", choices=EVERY_PEER, help="default: compiled and eager on a GPU, eager on a CPU")
    add("--like-for-like", action="store_true", help="peers with tanh GELU and a bfloat16 residual stream, as ours")
    add(
        "--sdpa",
        choices=("default", "cudnn", "flash"),
        default="default",
        help="the peers' attention (default: torch's)",
    )
    add("--seconds", type=float, default=4.0, metavar="S", help="time of a contender in a round (default: %(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--limit-s", type=float, default=LIMIT_S, metavar="S", help="limit for an answer (default: %(default)s)")
    add("--breakdown", action="store_true", help="our step by group, against each group's floor")
    add("--losses", action="store_true", help="loss curves on a text, two seeds, against the first peer")
    add(
        "--tokens", type=Path, metavar="FILE", help="prepared tokens for --losses (default: the shipped text, by bytes)"
    )
    add("--steps", type=int, default=500, metavar="N", help="steps of --losses (default: %(default)s)")
    add("--against", metavar="CASE", help="--losses against another case of ours, such as 124m-b16 of 124m-b16-fp8")
    add(
        "--peak-tflops",
        type=float,
        default=PEAK_FLOPS / 1e12,
        metavar="X",
        help="the bfloat16 peak, for MFU (default: %(default)s)",
    )
    add("--floor-tflops", type=float, default=rates.flops / 1e12, metavar="X", help="of bfloat16 GEMMs (%(default)s)")
    add("--floor-tbytes", type=float, default=rates.bytes / 1e12, metavar="X", help="memory bandwidth (%(default)s)")
    add("--json", action="store_true", help="JSON lines instead of the table")
    add("--out", type=Path, metavar="FILE", help="write both to a file")
    add("--plot", type=Path, metavar="FILE", help="draw the result (needs matplotlib)")
    args = parser.parse_args(arguments)
    peers = PEERS if args.device == "cuda" else ("eager",)
    form = replace(LIKE_FOR_LIKE if args.like_for_like else PeerForm(), sdpa=args.sdpa)
    rates = Rates(1e12 * args.floor_tflops, 1e12 * args.floor_tbytes, 2e12 * args.floor_tflops)
    chosen = peers if args.peers is None else tuple(args.peers)
    times = (args.seconds, args.rounds, args.limit_s)
    settings = Settings(args.device, chosen, form, *times, 1e12 * args.peak_tflops, rates)
    given = {
        name: getattr(args, name)
        for name in ("breakdown", "losses", "steps", "against", "tokens", "json", "out", "plot")
    }
    return bench_training(cases=args.case, settings=settings, **given)


if __name__ == "__main__":
    sys.exit(main())
