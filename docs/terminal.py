"""A command as a terminal shows it, drawn as SVG: python docs/terminal.py docs/figures/demo.svg tilegrad demo

The command runs in a pseudo-terminal of 96 columns. What it wrote over, such as an earlier state of a progress bar, is gone
from the picture as it is from a screen. Lines after the first HEAD and before the last TAIL are left out, and counted. Needs
rich.
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, HEAD, TAIL = 96, 16, 22
ERASED = re.compile(r"^.*(?:\x1b\[2K|\x1b\[1A)", re.DOTALL)
HIDDEN = re.compile(r"\x1b\[\?\d+[hl]|\r")


def recorded(command: list[str]) -> str:
    """All that the command wrote to its terminal, which is shown here too."""
    pieces: list[bytes] = []

    def read(descriptor: int) -> bytes:
        pieces.append(os.read(descriptor, 65536))
        return pieces[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    pty.spawn(command, read)
    return b"".join(pieces).decode("utf-8", errors="replace")


def seen(written: str) -> list[str]:
    """The lines that are left on the screen."""
    return [HIDDEN.sub("", ERASED.sub("", line)) for line in written.split("\n")]


def main(picture: str, *command: str) -> None:
    lines = seen(recorded(list(command)))
    while lines and not lines[-1].strip():
        lines.pop()
    left_out = len(lines) - HEAD - TAIL
    if left_out > 1:
        lines = [*lines[:HEAD], f"… {left_out} more lines …", *lines[-TAIL:]]
    shown = f"$ {' '.join((Path(command[0]).name, *command[1:]))}"
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for line in (shown, *lines):
        console.print(Text.from_ansi(line), soft_wrap=False)
    Path(picture).write_text(standing_alone(console.export_svg(title=shown[2:]), shown), encoding="utf-8")


def standing_alone(svg: str, shown: str) -> str:
    """Without fonts from outside, with a title and a description, and with a frame that can be seen on a dark page."""
    svg = re.sub(r"@font-face {.*?}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    about = f"<title>{html.escape(shown)}</title><desc>What this command prints in a terminal.</desc>"
    dark = "@media (prefers-color-scheme: dark) { svg > rect { stroke: #8b949e; } }"
    opening = svg.index(">", svg.index("<svg")) + 1
    return (svg[:opening] + about + svg[opening:]).replace("<style>", f"<style>{dark}", 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
