"""Which kernel of an op runs: a table for each op that has more than one, and the first row that takes a call runs it.

A row is refused with a reason, and nothing falls back silently: a kernel asked for by name runs or raises. The names of
the rows are public.

A problem is a call as its table sees it: a NamedTuple whose fields are the positional arguments of a kernel's `workspace`.
Only shapes, dtypes, devices and options of it are read, so a kernel can be chosen before a tensor exists. `NORM.explain(
Problem(x))` says what would run; `tilegrad doctor --kernels` prints that of every op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .scratch import Shapes, below, larger


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row. `refuses` says why this kernel can't run a problem, or None; `by_name_only` why it is never chosen unasked.

    `module`, a dotted name below tilegrad.kernels, offers the functions that the op's `__init__` names.
    """

    name: str
    module: str
    refuses: Callable[[Any], str | None]
    by_name_only: str | None = None

    def load(self) -> ModuleType:
        return _load(self.module)


@functools.cache
def _load(module: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{module}")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which kernel would run ("none" where none takes the call), and for every kernel the reason; printed, a table."""

    kernel: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(
            f"{'→' if name == self.kernel else ' '} {name:<{width}}  {reason}" for name, reason in self.reasons.items()
        )


@dataclass(frozen=True, slots=True)
class Table:
    """The kernels of `op`, the preferred ones first."""

    op: str
    rows: tuple[Kernel, ...]

    def select(self, problem: Any, kernel: str | None = None) -> Kernel:
        """The row that runs this problem, or an error that says why none does and what would."""
        for row in self.rows:
            wanted = row.by_name_only is None if kernel is None else row.name == kernel
            if wanted and row.refuses(problem) is None:
                return row
        refusals = {row.name: row.refuses(problem) for row in self.rows}
        if kernel is None:
            raise ValueError(f"{self.op}: no kernel takes this call: {refusals}")
        if kernel not in refusals:
            raise ValueError(f"kernel: got {kernel!r}; accepted: None or one of {', '.join(map(repr, refusals))}")
        other = self.select(problem).name
        raise ValueError(
            f"kernel: got {kernel!r}, which can't run this call: {refusals[kernel]}; {other!r} would run it, and kernel=None "
            "takes it"
        )

    def explain(self, problem: Any, kernel: str | None = None) -> Explanation:
        """What `select` chooses, with a reason for every row; also of a call that no row takes."""
        if kernel is None and not any(row.by_name_only is None and row.refuses(problem) is None for row in self.rows):
            return Explanation("none", {row.name: row.refuses(problem) or row.by_name_only or "" for row in self.rows})
        chosen = self.select(problem, kernel).name
        otherwise = f"takes this call too; {'not asked for' if kernel else f'{chosen} goes before it'}"
        reasons = {row.name: row.refuses(problem) or row.by_name_only or otherwise for row in self.rows}
        reasons[chosen] = (
            "runs: the first of the table that takes this call" if kernel is None else "runs: asked for by name"
        )
        return Explanation(chosen, reasons)

    def workspace(self, *problems: Any, kernel: str | None = None, **options: Any) -> Shapes:
        """Scratch of every kernel that may run one of `problems`, each kernel's below its name: what serves them all.

        `options` (backward=…, deterministic=…) are the keywords of a kernel's `workspace`.
        """
        shapes: Shapes = {}
        for problem in problems:
            row = self.select(problem, kernel)
            shapes = larger(shapes, below(row.name, row.load().workspace(*problem, **options)))
        return shapes


def takes_all(_problem: Any) -> None:
    return None
