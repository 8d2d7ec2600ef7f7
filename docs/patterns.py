"""Both patterns of dilated attention, drawn as SVG from the oracle's masks: python docs/patterns.py docs/figures/dilated.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import Tensor

from tilegrad.functional.dilated.reference import pairs

T, SEGMENTS, RATES = 16, (4, 8, 16), (1, 2, 4)
CELL, GAP, LEFT = 11, 30, 24
COLORS = ("blue", "amber", "rose")
SIZES = (1.0, 0.64, 0.32)  # of a branch's square in its cell: all branches of a pair are seen
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
    .s { font-size: 12px; fill: #52606d; } .b { font-weight: 600; }
    .page { fill: #fcfcfd; stroke: #d5dae0; } .none { fill: #eef1f5; } .grid { stroke: #fcfcfd; }
    .blue { fill: #8fbbe8; } .amber { fill: #b07d18; } .rose { fill: #7a1f30; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7eb; } .s { fill: #a9b4c0; } .page { fill: #1b2028; stroke: #3a424e; } .none { fill: #272e39; }
      .grid { stroke: #1b2028; } .blue { fill: #2f5f92; } .amber { fill: #d9a93f; } .rose { fill: #f9dfe2; }
    }"""


def matrix(attended: Tensor, x: float, y: float, title: str) -> list[str]:
    """One head: rows attend to columns.       attended (branches, T, T) bool"""
    out = [f'<text x="{x}" y="{y - 8}" class="s">{title}</text>']
    cells = "".join(f"M{x} {y + i * CELL}h{T * CELL - 1}v{CELL - 1}h-{T * CELL - 1}z" for i in range(T))
    lines = "".join(f"M{x + j * CELL - 0.5} {y}v{T * CELL - 1}" for j in range(1, T))
    out += [f'<path class="none" d="{cells}"/>', f'<path class="grid" d="{lines}"/>']
    for i in range(T):
        for j in range(T):
            left, top = x + j * CELL, y + i * CELL
            for branch, size in enumerate(SIZES):
                if attended[branch, i, j]:
                    side = size * (CELL - 1)
                    at = (CELL - 1 - side) / 2
                    corner = f'x="{left + at:g}" y="{top + at:g}"'
                    out.append(f'<rect class="{COLORS[branch]}" {corner} width="{side:g}" height="{side:g}"/>')
    return out


def legend(y: float) -> list[str]:
    out = []
    for branch, (s, r, color) in enumerate(zip(SEGMENTS, RATES, COLORS, strict=True)):
        x = LEFT + branch * 240
        out.append(f'<rect class="{color}" x="{x}" y="{y - 11}" width="12" height="12"/>')
        out.append(f'<text x="{x + 20}" y="{y}" class="s">branch {branch}: segments of {s}, rate {r}</text>')
    return out


def main(picture: str) -> None:
    size, top, below = T * CELL, 92, 92 + T * CELL + 84
    groups = pairs(3, T, SEGMENTS, RATES, mode="head_groups", causal=True)
    mixed = pairs(4, T, SEGMENTS, RATES, mode="longnet", causal=True)
    width, height = LEFT * 2 + 4 * size + 3 * GAP, below + size + 52
    body = [f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>']
    body.append(f'<text x="{LEFT}" y="34" class="b">head_groups</text>')
    body.append(
        f'<text x="{LEFT + 112}" y="34" class="s">a group of heads for each branch; a row without a square gives 0</text>'
    )
    for g in range(3):
        title = f"group {g}, offset {g % RATES[g]}"
        body += matrix(groups[:, g], LEFT + g * (size + GAP), top, title)
    body.append(f'<text x="{LEFT}" y="{below - 42}" class="b">longnet</text>')
    words = "all branches in every head, mixed by the softmax of their logsumexps; head h begins at h mod r"
    body.append(f'<text x="{LEFT + 112}" y="{below - 42}" class="s">{words}</text>')
    for h in range(4):
        body += matrix(mixed[:, h], LEFT + h * (size + GAP), below, f"head {h}")
    body += legend(height - 20)
    described = (
        "Which of 16 rows attend to which columns, causal, for each group of heads and for four heads of longnet."
    )
    Path(picture).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"  <title>The two patterns of dilated attention</title>\n  <desc>{described}</desc>\n"
        f"  <style>{STYLE}\n  </style>\n  " + "\n  ".join(body) + "\n</svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
