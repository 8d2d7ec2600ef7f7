"""Patterns of attention, drawn as SVG from the oracle's masks: python docs/patterns.py dilated docs/figures/dilated.svg

`dilated` draws both patterns of dilated attention, `masks` the masks of tilegrad.masks with their intervals.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from tilegrad import masks
from tilegrad.functional.dilated.reference import pairs
from tilegrad.kernels.attention.mask import Mask, attends, distance, masked_by
from tilegrad.masks import IntervalMask

T, SEGMENTS, RATES = 16, (4, 8, 16), (1, 2, 4)
CELL, GAP, LEFT = 11, 30, 24
COLORS = ("blue", "amber", "rose")
SIZES = (1.0, 0.64, 0.32)  # of a branch's square in its cell: all branches of a pair are seen
EDGES = (1.0, 0.32, 0.32)  # of a pair that attends, and of one that the first or the second interval masks out
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2933; }
    .s { font-size: 12px; fill: #52606d; } .b { font-weight: 600; }
    .page { fill: #fcfcfd; stroke: #d5dae0; } .none { fill: #eef1f5; } .grid { stroke: #fcfcfd; }
    .blue { fill: #8fbbe8; } .amber { fill: #b07d18; } .rose { fill: #7a1f30; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e7eb; } .s { fill: #a9b4c0; } .page { fill: #1b2028; stroke: #3a424e; } .none { fill: #272e39; }
      .grid { stroke: #1b2028; } .blue { fill: #2f5f92; } .amber { fill: #d9a93f; } .rose { fill: #f9dfe2; }
    }"""


def matrix(attended: Tensor, x: float, y: float, title: str, sizes: tuple[float, ...] = SIZES) -> list[str]:
    """One head: rows attend to columns.       attended (branches, T, T) bool"""
    out = [f'<text x="{x}" y="{y - 8}" class="s">{title}</text>']
    cells = "".join(f"M{x} {y + i * CELL}h{T * CELL - 1}v{CELL - 1}h-{T * CELL - 1}z" for i in range(T))
    lines = "".join(f"M{x + j * CELL - 0.5} {y}v{T * CELL - 1}" for j in range(1, T))
    out += [f'<path class="none" d="{cells}"/>', f'<path class="grid" d="{lines}"/>']
    for squares, color, size in zip(attended, COLORS, sizes, strict=True):
        side = size * (CELL - 1)
        at = (CELL - 1 - side) / 2
        d = "".join(
            f"M{x + j * CELL + at:g} {y + i * CELL + at:g}h{side:g}v{side:g}h-{side:g}z"
            for i, j in squares.nonzero().tolist()
        )
        if d:
            out.append(f'<path class="{color}" d="{d}"/>')
    return out


def legend(y: float) -> list[str]:
    out = []
    for branch, (s, r, color) in enumerate(zip(SEGMENTS, RATES, COLORS, strict=True)):
        x = LEFT + branch * 240
        out.append(f'<rect class="{color}" x="{x}" y="{y - 11}" width="12" height="12"/>')
        out.append(f'<text x="{x + 20}" y="{y}" class="s">branch {branch}: segments of {s}, rate {r}</text>')
    return out


def write(picture: str, title: str, described: str, width: int, height: int, body: list[str]) -> None:
    page = f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    Path(picture).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"  <title>{title}</title>\n  <desc>{described}</desc>\n"
        f"  <style>{STYLE}\n  </style>\n  " + "\n  ".join([page, *body]) + "\n</svg>\n",
        encoding="utf-8",
    )


def dilated(picture: str) -> None:
    size, top, below = T * CELL, 92, 92 + T * CELL + 84
    groups = pairs(3, T, SEGMENTS, RATES, mode="head_groups", causal=True)
    mixed = pairs(4, T, SEGMENTS, RATES, mode="longnet", causal=True)
    width, height = LEFT * 2 + 4 * size + 3 * GAP, below + size + 52
    body = [f'<text x="{LEFT}" y="34" class="b">head_groups</text>']
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
    write(picture, "The two patterns of dilated attention", described, width, height, body)


def by_interval(mask: IntervalMask) -> Tensor:
    """(3, T, T): pairs that attend, and those that the first and the second interval mask out."""
    rows = torch.arange(T)
    out = [masked_by(pair, rows)[0, 0] for pair in mask["intervals"].split(2, -1)]
    out += [torch.zeros(T, T, dtype=torch.bool)] * (2 - len(out))
    attended = attends(Mask(mask["causal"]), distance(rows, rows, T, T)) & ~out[0] & ~out[1]
    return torch.stack([attended, *out])


def tree(parents: list[int]) -> Tensor:
    """A node attends to itself and to its ancestors."""
    attended = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        attended[node] |= attended[parent]
    return attended


def draw_masks(picture: str) -> None:
    i, j = torch.arange(T)[:, None], torch.arange(T)
    shown = {
        "documents([0, 5, 8, 16])": masks.documents([0, 5, 8, 16]),
        "documents(…, causal=False)": masks.documents([0, 5, 8, 16], causal=False),
        "prefix([6], 16)": masks.prefix([6], T),
        "shared_question([5, 4, 3, 4])": masks.shared_question([5, 4, 3, 4]),
        "from_bool: 2 tokens never evicted": masks.from_bool((j <= i) & ((j < 2) | (i - j < 5))),
        "from_bool: a tree, depth first": masks.from_bool(tree([-1, 0, 1, 2, 1, 4, 4, 0, 7, 8, 8, 7, 11, 0, 13, 13])),
    }
    size, top, step = T * CELL, 46, T * CELL + 50
    body = []
    for n, (title, mask) in enumerate(shown.items()):
        body += matrix(by_interval(mask), LEFT + n % 3 * (size + 72), top + n // 3 * step, title, EDGES)
    width, height = LEFT * 2 + 3 * size + 2 * 72, top + 2 * step + 6
    words = ("attends", "masked out by causal", "by the first interval of its column", "by the second")
    legends = zip((0, 100, 280, 540), (COLORS[0], "none", *COLORS[1:]), (12, 12, 5, 5), words, strict=True)
    for start, color, side, word in legends:
        x = LEFT + start
        at = height - 22 - side / 2
        body.append(f'<rect class="{color}" x="{x + 6 - side / 2:g}" y="{at:g}" width="{side}" height="{side}"/>')
        body.append(f'<text x="{x + 20}" y="{height - 18}" class="s">{word}</text>')
    described = "Which of 16 rows attend to which columns under six masks, and which pairs an interval masks out."
    write(picture, "Masks as intervals of rows", described, width, height, body)


if __name__ == "__main__":
    {"dilated": dilated, "masks": draw_masks}[sys.argv[1]](sys.argv[2])
