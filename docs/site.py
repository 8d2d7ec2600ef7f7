"""How the site is set: docstrings as Markdown, and paths that break at their joints.

A docstring's prose is Markdown already. Lines that are indented, or aligned in columns by two spaces and more, are not
prose: each run of them becomes a code block. So does an example (>>> …) with its output.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


def on_page_content(html: str, **_kwargs: Any) -> str:
    """A path or a name in the text may break after / and _, so that tables fit; mkdocs calls this for each page."""
    return re.sub(
        r"(?<!</span>)<code>[^<\n]+</code>", lambda code: re.sub(r"((?<!<)/|(?<=\w)_)", r"\1<wbr>", code[0]), html
    )


class AsTheyStand(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    out: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", docstring):
        out.append("")
        example = paragraph.lstrip().startswith(">>>")
        kind = ""  # of the run that is open
        for line in paragraph.splitlines():
            new = "pycon" if example else "text" if re.search(r"^ |\S  +\S", line) else ""
            if new != kind:
                out += ["```"] * bool(kind) + ["", f"```{new}"] * bool(new)
                kind = new
            out.append(line)
        out += ["```"] * bool(kind)
    return "\n".join(out[1:]).replace("\n```\n\n```text\n", "\n\n")
