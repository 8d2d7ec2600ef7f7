"""Selection of an op's kernel: an op with several kernels has a table, and the first row that takes a call runs it.

A row that refuses gives a reason, and there is no silent fallback: a kernel requested by name runs or raises. The names of the
rows are public.

A problem describes a call to the table. It is a NamedTuple, whose fields are the positional arguments of a kernel's
`workspace`. The first field is a tensor on the call's device. The table reads shapes, dtypes, devices and options, and for
attention also strides and addresses if there are any, but never values. So a kernel can be selected before a tensor exists.
`NORM.explain(Problem(x))` says which kernel would run; `tilegrad doctor --kernels` prints this for every op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypedDict

from .op import run_and_list
from .scratch import Scratch, Shapes, TensorLike, below, larger, views

FORWARD, BACKWARD = {"backward": False}, {"backward": True}  # options of a `workspace`


class Problem(NamedTuple):
    """A call whose kernel depends only on the shape, dtype and device of one tensor."""

    x: TensorLike


class Where(TypedDict, total=False):
    """Keywords of every op with a table: buffers as declared by `<op>_workspace`, and the name of a kernel."""

    scratch: Scratch | None
    kernel: str | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A row. `refuses` returns the reason why this kernel cannot run a problem, or None. A kernel with
    `by_name_only` runs only when it is requested by name, and `by_name_only` says why.

    `module`, a dotted name below tilegrad.kernels, offers `workspace` and the functions that the docstring of the op's
    `__init__.py` lists.
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
    """The kernel that would run ("none" if no kernel takes the call without being named), and a reason for every kernel. str()
    is a table."""

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
        """The row that runs this problem. Raises an error with the reasons if there is none."""
        for row in self.rows:
            eligible = row.by_name_only is None if kernel is None else row.name == kernel
            if eligible and row.refuses(problem) is None:
                return row
        refusals = {row.name: row.refuses(problem) for row in self.rows}
        if kernel is None:
            raise ValueError(f"{self.op}: got a call that no kernel takes: {refusals}")
        if kernel not in refusals:
            raise ValueError(f"kernel: got {kernel!r}; accepted: None or one of {', '.join(map(repr, refusals))}")
        selected = self.select(problem).name
        raise ValueError(
            f"kernel: got {kernel!r}, which can't run this call: {refusals[kernel]}; accepted: {selected!r}, or "
            "None, which selects it"
        )

    def explain(self, problem: Any, kernel: str | None = None) -> Explanation:
        """The name of the row that `select` returns ("none" if no row takes the call without being named), and a reason for
        every row."""
        if kernel is None and not any(row.by_name_only is None and row.refuses(problem) is None for row in self.rows):
            return Explanation("none", {row.name: row.refuses(problem) or row.by_name_only or "" for row in self.rows})
        chosen = self.select(problem, kernel).name
        otherwise = f"takes this call too; {'not asked for' if kernel else f'{chosen} comes first'}"
        reasons = {row.name: row.refuses(problem) or row.by_name_only or otherwise for row in self.rows}
        reasons[chosen] = (
            "runs: the first of the table that takes this call" if kernel is None else "runs: asked for by name"
        )
        return Explanation(chosen, reasons)

    def workspace(self, *problems: Any, kernel: str | None = None, **options: bool) -> Shapes:
        """Scratch that is enough for each of `problems`. The names of a kernel's buffers begin with the kernel's name.

        `options` (backward=…, deterministic=…) are the keywords of a kernel's `workspace`.
        """
        shapes: Shapes = {}
        for problem in problems:
            row = self.select(problem, kernel)
            shapes = larger(shapes, below(row.name, row.load().workspace(*problem, **options)))
        return shapes

    def run(
        self,
        function: str,
        problem: Any,
        *reads: object,
        options: dict[str, bool] | None = None,
        scratch: Scratch | None = None,
        kernel: str | None = None,
        **writes: object,
    ) -> None:
        """Calls `function` of the selected kernel with views of `scratch`; `options` are the keywords of its `workspace`."""
        row = self.select(problem, kernel)
        module = _load(row.module)
        needed = module.workspace(*problem, **options) if options else module.workspace(*problem)
        buffers = views(scratch, needed, problem[0].device, self.op, kernel=row.name) if needed else {}
        run_and_list(functools.partial(getattr(module, function), *reads, **writes, scratch=buffers))


def takes_all(_problem: object) -> None:
    return None
