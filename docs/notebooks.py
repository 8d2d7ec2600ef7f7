"""Each tutorial as a notebook next to it: python docs/notebooks.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

TUTORIALS = Path(__file__).parent / "tutorials"


def notebook(page: str) -> str:
    """Python blocks become cells of code, the text between them cells of Markdown."""
    cells: list[dict[str, object]] = []
    for i, part in enumerate(re.split(r"```python\n(.*?)```\n", page, flags=re.DOTALL)):
        lines = part.strip("\n").splitlines(keepends=True)
        if lines and i % 2:
            cells.append({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines})
        elif lines:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for page in TUTORIALS.glob("*.md"):
        page.with_suffix(".ipynb").write_text(notebook(page.read_text(encoding="utf-8")), encoding="utf-8")
