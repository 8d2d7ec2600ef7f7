"""KeyboardInterrupt at a chosen bytecode of chosen files."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from tilegrad.training.config import RunEnded

Here = Callable[[str], bool]  # whether the bytecodes of a file count


class Trace:
    """Counts bytecodes and raises at number `at`. `first` has the count at which each place of the code was first reached."""

    def __init__(self, here: Here, at: int | None = None) -> None:
        self.here, self.at, self.count = here, at, 0
        self.first: dict[tuple[CodeType, int], int] = {}
        self._ours: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = self.here(code.co_filename)
        if not ours:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.at is None:
                self.first.setdefault((frame.f_code, frame.f_lasti), self.count)
            elif self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._inside


@contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12: settrace looks once whether any frame wants opcodes
    sys.settrace(trace)
    try:
        yield trace
    finally:
        sys.settrace(before)


def places(act: Callable[[], object], here: Here) -> list[int]:
    """The counts at which `interrupted` reaches each place of the code that `act` runs, once each."""
    with traced(Trace(here)) as trace:
        act()
    return sorted(trace.first.values())


def interrupted(act: Callable[[], object], here: Here, at: int) -> bool:
    """Runs `act` with a KeyboardInterrupt at bytecode number `at`. Returns whether `act` raised it."""
    try:
        with traced(Trace(here, at)):
            act()
    except KeyboardInterrupt:
        return True
    except (OSError, RunEnded) as error:
        if not _closed_twice(error):
            raise
        return True
    return False


def _closed_twice(error: BaseException | None) -> bool:
    """Whether shutil.rmtree turned the interrupt into an OSError: after one that comes right after its `os.close`, it closes
    the descriptor again. A run ends with RunEnded then, as after any OSError."""
    while error is not None:
        if (
            isinstance(error, OSError)
            and error.errno == errno.EBADF
            and isinstance(error.__context__, KeyboardInterrupt)
        ):
            return True
        error = error.__cause__
    return False
