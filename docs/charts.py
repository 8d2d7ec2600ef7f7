"""The README's two charts, and three of the docs, drawn from the dated results: python docs/charts.py

docs/figures/training.svg    tokens/s and memory of a training step, against compiled PyTorch
docs/figures/attention.svg   speed of attention by head dimension, against FlashAttention-4 and cuDNN
docs/figures/schedules.svg   the learning rate over the steps, by schedule
docs/figures/float8.svg      losses with float8 and with bfloat16
docs/figures/five-minutes.svg    bits per byte over seconds of training

python docs/charts.py five-minutes PICTURE RUNS…    the last one from other files of `benchmarks.five_minutes --out`
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any, get_args

from tilegrad.training.schedule import DECAYS_LAST, Schedule, learning_rate

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks"
TRAINING, ATTENTION = "2026-11-19-training-h200.jsonl", "2026-11-17-attention-h200-fa4.jsonl"
CASES = {  # of the training bench, with a name for readers
    "124m-b16": "GPT-2 124M, batch 16", "124m-b64": "… batch 64", "124m-b64-fp8-all-head": "… batch 64, float8",
    "350m-b16": "GPT-2 350M, batch 16", "1.5b-b8": "GPT-2 1.5B, batch 8", "llama-125m-b16": "Llama 125M, batch 16",
    "124m-t32k": "GPT-2 124M, T 32,768",
}  # fmt: skip
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 11px; fill: #59636e; } .head { font-weight: 600; }
.ours { fill: #1f6f8b; } .peer { fill: #e07a3f; } .axis { stroke: #59636e; } .range { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .ours { fill: #4aa8c7; }
  .axis { stroke: #9198a1; } .range { stroke: #e6edf3; }
}"""
LINES = """
.line { stroke: #1f6f8b; stroke-width: 2; fill: none; } .guide { stroke: #59636e; stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) { .line { stroke: #4aa8c7; } .guide { stroke: #9198a1; } }"""
LABEL, ROW, BAR = 190, 24, 12
CONTENDERS = {  # of the five-minute bench: a name for readers, a color
    "nanogpt": ("nanoGPT's form, compiled, AdamW", "#e07a3f"), "nanochat": ("nanochat's form, compiled, Muon", "#8a5fbf"),
    "adamw": ("tilegrad, AdamW", "#7fb8cc"), "muon": ("tilegrad, Muon", "#1f6f8b"),
    "muon-fp8": ("tilegrad, Muon, fp8", "#2e9e6b"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """A column of bars; `one` is where the peer is, and `limit` the right end of the axis."""

    title: str
    bars: list[Bar]
    limit: float


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def training() -> str:
    ratios = {
        row["ratio"]["case"]: row["ratio"] for row in read(TRAINING) if row.get("ratio", {}).get("peer") == "compiled"
    }
    speeds = [Bar(ratios[case]["speed"]) for case in CASES]
    memory = [Bar(ratios[case]["memory"]) for case in CASES]
    panels = [Panel("times as fast", speeds, 1.6), Panel("of its memory", memory, 1.1)]
    title = "A training step against compiled PyTorch, one H200, bfloat16"
    return drawn(title, list(CASES.values()), panels, TRAINING)


def attention() -> str:
    rounds: dict[tuple[str, int, bool, int], dict[str, list[float]]] = {}
    for row in read(ATTENTION):
        shape = row.get("shape", {})
        plain = shape and not (shape["window"] or shape["hkv"] or shape["lengths"] or row.get("deterministic"))
        if plain and row.get("rounds_ms"):
            key = row["direction"], shape["d"], shape["causal"], shape["t"]
            rounds.setdefault(key, {})[row["kernel"]] = row["rounds_ms"]
    names, panels = [], {(d, peer): [] for d in ("forward", "backward") for peer in ("fa4", "sdpa-cudnn")}
    for d in (64, 128, 256):
        for causal in (False, True):
            names.append(f"D {d}, {'causal' if causal else 'full'}")
            for direction, peer in panels:
                cells = [
                    median(theirs / ours for theirs, ours in zip(times[peer], times["hopper"], strict=True))
                    for key, times in rounds.items()
                    if key[:3] == (direction, d, causal) and {peer, "hopper"} <= times.keys()
                ]
                panels[direction, peer].append(Bar(geometric_mean(cells), min(cells), max(cells)))
    peers = {"fa4": "FlashAttention-4", "sdpa-cudnn": "cuDNN"}
    columns = [Panel(f"{direction}, × {peers[peer]}", bars, 1.6) for (direction, peer), bars in panels.items()]
    title = "Attention kernels against FlashAttention-4 and cuDNN, one H200, bfloat16: mean and range over T 1k to 16k"
    return drawn(title, names, columns, ATTENTION)


def schedules() -> str:
    """A panel for each schedule: 100 steps, of which 10 are the warm-up, and 20 the decay of wsd and trapezoid."""
    wide, left, top, tall = 226, 62, 56, 120
    scale = wide - 24
    title = "The learning rate over 100 steps: 10 of warm-up, min_learning_rate a tenth of the peak, decay_steps 20"
    floor = top + tall * 0.9
    parts = [f'<text class="head" x="8" y="20">{html.escape(title)}</text>']
    for name, y in (("peak", top), ("minimum", floor)):
        parts.append(f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for column, name in enumerate(get_args(Schedule)):
        x0 = left + column * wide
        decay = 20 if name in DECAYS_LAST else 0
        shape: dict[str, Any] = {"peak": 1.0, "floor": 0.1, "warmup_steps": 10, "total_steps": 100}
        rates = [learning_rate(step, schedule=name, decay_steps=decay, **shape) for step in range(100)]
        points = [f"{x0 + scale * i / 99:.1f},{top + tall * (1 - rate):.1f}" for i, rate in enumerate(rates)]
        parts.append(f'<text x="{x0}" y="44">{name}</text>')
        for y in (top, floor):
            parts.append(f'<line class="guide" x1="{x0}" x2="{x0 + scale}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<line class="axis" x1="{x0}" x2="{x0 + scale}" y1="{top + tall}" y2="{top + tall}"/>')
        parts.append(f'<polyline class="line" points="{" ".join(points)}"/>')
        for step in (0, 50, 100):
            x = x0 + scale * step / 100
            parts.append(f'<text class="small" x="{x:.1f}" y="{top + tall + 16}" text-anchor="middle">{step}</text>')
    described = "Four curves rise to the peak in the warm-up. Cosine and linear fall from there to the last step. "
    described += "wsd and trapezoid stay at the peak and fall in the last 20 steps, wsd fastest at first."
    return svg(title, described, parts, top + tall + 28, STYLE + LINES)


@dataclass(frozen=True, slots=True)
class Plot:
    """Axes at (left, top), with x from 0 to `end` and y from `low` to `high`."""

    left: int
    top: int
    wide: int
    tall: int
    end: float
    low: float
    high: float

    def at(self, x: float, y: float) -> str:
        down = (self.high - y) / ((self.high - self.low) or 1.0)
        return f"{self.left + self.wide * x / self.end:.1f},{self.top + self.tall * down:.1f}"

    def axes(self, unit: str) -> list[str]:
        """Four guides with the values of y, and five values of x."""
        parts, bottom = [], self.top + self.tall + 16
        for i in range(5):
            value, y = self.high - (self.high - self.low) * i / 4, self.top + self.tall * i / 4
            x, label = self.left + self.wide * i / 4, f"{self.end * i / 4:.4g}{unit}"
            parts.append(
                f'<text class="small" x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3f}</text>'
            )
            parts.append(
                f'<line class="guide" x1="{self.left}" x2="{self.left + self.wide}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(f'<text class="small" x="{x:.1f}" y="{bottom}" text-anchor="middle">{label}</text>')
        return parts

    def curve(self, points: list[tuple[float, float]], color: str, width: float = 1.5) -> str:
        at = " ".join(self.at(*point) for point in points)
        return f'<polyline fill="none" stroke="{color}" stroke-width="{width}" points="{at}"/>'


def key(x: int, y: int, color: str, label: str) -> list[str]:
    return [
        f'<rect x="{x}" y="{y - 6}" width="{BAR}" height="4" fill="{color}"/>',
        f'<text x="{x + 18}" y="{y}">{html.escape(label)}</text>',
    ]


def five_minutes(paths: list[Path]) -> str:
    """A curve for each run, without its first fifth, which is too steep to be seen next to the rest."""
    rows = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    runs = [row for row in rows if "curve" in row]
    if not runs:
        raise ValueError(f"runs: got {', '.join(map(str, paths))} without a run; accepted: files of --out")
    end = max(run["seconds"] for run in runs)
    shown = [p["bits_per_byte"] for run in runs for p in run["curve"] if p["seconds"] >= end / 5]
    plot = Plot(62, 44, 600, 320, end, min(shown), max(shown))
    title = f"Validation bits per byte over seconds of training on one device, {len(runs)} runs"
    parts = [f'<text class="head" x="8" y="20">{html.escape(title)}</text>', *plot.axes(" s")]
    present = [name for name in CONTENDERS if any(run["contender"] == name for run in runs)]
    for i, name in enumerate(present):
        label, color = CONTENDERS[name]
        for run in (run for run in runs if run["contender"] == name):
            points = [(p["seconds"], p["bits_per_byte"]) for p in run["curve"] if p["seconds"] >= end / 5]
            parts.append(plot.curve(points, color))
        parts += key(plot.left + plot.wide + 16, plot.top + 14 + ROW * i, color, label)
    ends = {name: [run["curve"][-1]["bits_per_byte"] for run in runs if run["contender"] == name] for name in present}
    described = "At the end: " + "; ".join(
        f"{CONTENDERS[name][0]}: " + ", ".join(f"{value:.4f}" for value in values) for name, values in ends.items()
    )
    return svg(title, described, parts, plot.top + plot.tall + 28, STYLE + LINES)


def float8() -> str:
    """The losses with float8 and with bfloat16, from step 200 on, and float8's minus bfloat16's."""
    rows = [json.loads(line) for line in (RESULTS / TRAINING).read_text(encoding="utf-8").splitlines()]
    [row] = [row for row in rows if row.get("case") == "124m-b16-fp8-all-head" and "agree" in row]

    def means(losses: list[float], steps: int) -> list[tuple[float, float]]:
        return [(i + steps / 2, fmean(losses[i : i + steps])) for i in range(200, len(losses), steps)]

    title = "Loss of GPT-2 124M over 2,000 steps of 16,384 tokens: all products in float8, and bfloat16; two seeds"
    losses = [y for kind in ("ours", "peer") for run in row[kind] for _, y in means(run, 25)]
    left, right = Plot(62, 60, 400, 220, 2000, min(losses), max(losses)), Plot(540, 60, 400, 220, 2000, -0.1, 0.1)
    parts = [f'<text class="head" x="8" y="20">{html.escape(title)}</text>', *left.axes(""), *right.axes("")]
    for x, name in (
        (left.left, "loss, means of 25 steps"),
        (right.left, "float8 − bfloat16, means of 100 steps; the axis is about the seeds' spread"),
    ):
        parts.append(f'<text class="small" x="{x}" y="46">{html.escape(name)}</text>')
    colors = {("peer", 0): "#e07a3f", ("peer", 1): "#f0b48c", ("ours", 0): "#1f6f8b", ("ours", 1): "#7fb8cc"}
    for (kind, seed), color in colors.items():
        parts.append(left.curve(means(row[kind][seed], 25), color, 1.5 if kind == "ours" else 5))
        label = f"{'float8' if kind == 'ours' else 'bfloat16'}, seed {seed}"
        parts += key(300, 80 + ROW * list(colors).index((kind, seed)), color, label)
    for seed in (0, 1):
        both = zip(means(row["ours"][seed], 100), means(row["peer"][seed], 100), strict=True)
        parts.append(right.curve([(x, a - b) for (x, a), (_, b) in both], colors["ours", seed]))
    described = (
        "The curves of float8 and bfloat16 are on top of each other. Their difference stays between −0.01 and 0.03."
    )
    return svg(title, described, parts, 312, STYLE + LINES)


def svg(title: str, described: str, parts: list[str], tall: int, style: str = STYLE) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {tall}" width="960" height="{tall}">'
    about = f"<title>{html.escape(title)}</title><desc>{html.escape(described)}</desc><style>{style}</style>"
    return "\n".join([head + about, *parts, "</svg>", ""])


def drawn(title: str, names: list[str], panels: list[Panel], source: str) -> str:
    """Rows of bars; the vertical line is the peer, 1."""
    wide = (960 - LABEL) // len(panels)
    scale = wide - 56
    tall = 64 + ROW * len(names) + 22
    parts = [f'<text class="head" x="8" y="20">{html.escape(title)}</text>']
    for i, name in enumerate(names):
        parts.append(f'<text x="{LABEL - 10}" y="{70 + ROW * i}" text-anchor="end">{html.escape(name)}</text>')
    for column, panel in enumerate(panels):
        left = LABEL + column * wide
        one = left + scale / panel.limit
        parts.append(f'<text class="small" x="{left}" y="44">{html.escape(panel.title)}</text>')
        for i, bar in enumerate(panel.bars):
            y = 60 + ROW * i
            end = left + scale * min(bar.value, panel.limit) / panel.limit
            parts.append(f'<rect class="ours" x="{left}" y="{y}" width="{end - left:.1f}" height="{BAR}"/>')
            if bar.low is not None and bar.high is not None:
                a, b = (left + scale * min(x, panel.limit) / panel.limit for x in (bar.low, bar.high))
                parts.append(f'<line class="range" x1="{a:.1f}" x2="{b:.1f}" y1="{y + BAR / 2}" y2="{y + BAR / 2}"/>')
                end = max(end, b)
            parts.append(f'<text class="small" x="{end + 5:.1f}" y="{y + 10}">{bar.value:.2f}×</text>')
        parts.append(f'<line class="axis" x1="{one:.1f}" x2="{one:.1f}" y1="52" y2="{56 + ROW * len(names)}"/>')
    parts.append(f'<text class="small" x="8" y="{tall - 6}">The vertical line is the peer. benchmarks/{source}</text>')
    described = "; ".join(
        f"{name}: " + ", ".join(f"{panel.title} {panel.bars[i].value:.2f}" for panel in panels)
        for i, name in enumerate(names)
    )
    return svg(title, described, parts, tall)


if __name__ == "__main__":
    if sys.argv[1:2] == ["five-minutes"]:
        Path(sys.argv[2]).write_text(five_minutes(list(map(Path, sys.argv[3:]))), encoding="utf-8")
    else:
        (HERE / "figures" / "training.svg").write_text(training(), encoding="utf-8")
        (HERE / "figures" / "attention.svg").write_text(attention(), encoding="utf-8")
        (HERE / "figures" / "schedules.svg").write_text(schedules(), encoding="utf-8")
        (HERE / "figures" / "float8.svg").write_text(float8(), encoding="utf-8")
        (HERE / "figures" / "five-minutes.svg").write_text(five_minutes([RESULTS / TRAINING]), encoding="utf-8")
