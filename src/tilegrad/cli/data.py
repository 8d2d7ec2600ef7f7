"""`tilegrad data`: a preview of the data that a run would train on."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING

from .arguments import Commands, add_command, add_key_flags, given_keys

if TYPE_CHECKING:
    from ..training.preview import Preview

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that control a terminal
_BAR = 40  # characters of the longest bar of the histogram


def _data(args: argparse.Namespace) -> int:
    from ..data.documents import quiet
    from ..training.preview import preview
    from ..training.sections import run_from, settled

    content = given_keys(args)
    content["data"] = {**content.get("data", {}), "files": args.files}
    data = preview(settled(run_from(content, "flags")), quiet)
    if args.json:
        print(json.dumps(_as_json(data), indent=1, ensure_ascii=False))
        return 0
    print(_as_text(data, colour=sys.stdout.isatty()))
    return 0


def _as_json(data: Preview) -> dict[str, object]:
    example = [{"text": text, "trained": trained} for text, trained in data.example]
    return {
        **data.counts,
        "lengths": data.lengths,
        "histogram": data.histogram,
        "trained_share": data.trained_share,
        "padding_share": data.padding,
        "example": example,
        "example_cut": data.example_cut,
    }


def _as_text(data: Preview, *, colour: bool) -> str:
    from .progress import described

    kind = "conversation" if data.counts.get("format") else "document"
    n = data.lengths
    longest = max(data.histogram.values())
    lines = [described(data.counts), f"{data.trained_share:.1%} of the tokens are targets"]
    if data.padding:
        packed, unpacked = data.padding["packed"], data.padding["padded"]
        lines.append(f"Padding: {packed:.1%} packed, {unpacked:.1%} with one {kind} in each row")
    spread = f"{n['least']:,} to {n['most']:,}, median {n['median']:,.0f}, mean {n['mean']:,.1f}"
    lines += ["", f"Tokens in a {kind}: {spread}"]
    width = max(map(len, data.histogram))
    for name, count in data.histogram.items():
        lines.append(f"  {name:>{width}}  {'█' * -(-count * _BAR // longest):<{_BAR}} {count:,}".rstrip())
    how = "in green" if colour else "between ⟦ and ⟧"
    lines += ["", f"The first {kind}; the trained part is {how}:"]
    begin, end = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    parts = [(_CONTROL.sub(lambda c: f"\\x{ord(c[0]):02x}", text), trained) for text, trained in data.example]
    lines.append("".join(f"{begin}{text}{end}" if trained else text for text, trained in parts))
    return "\n".join(lines + (["…"] if data.example_cut else []))


def add_data(commands: Commands) -> None:
    text = "preview the data of a run: counts, lengths, and the first document with its trained part marked"
    command = add_command(commands, "data", text, _data)
    command.add_argument("files", nargs="+", metavar="FILE", help="text files, .jsonl files, or folders of such files")
    command.add_argument("--json", action="store_true", help="JSON instead of text")
    command.set_defaults(config=None)
    add_key_flags(command, without=("data.files",))
    command.usage = f"{command.prog} FILE... [--init DIR] [--SECTION.KEY X ...] [--json]"
