"""Signals that end a run after the step in hand, with a save, instead of at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def stop_on_signals() -> Iterator[list[str]]:
    """Inside, SIGTERM, SIGINT and SIGHUP put their name into the list instead of ending the process.

    The second SIGINT only says that the run is being saved; the third raises KeyboardInterrupt, in the midst of a save too.
    A SIGHUP that is ignored, as under nohup, stays so.
    """
    stopped: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        times = stopped.count("SIGINT")
        if times == 2:
            with suppress(OSError):  # not print: it may be what was interrupted
                os.write(2, b"tilegrad: saving; a third Ctrl-C ends at once and loses what was not saved\n")
        elif times > 2:
            raise KeyboardInterrupt

    caught = [number for number in _STOPS if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    try:
        before = {number: signal.signal(number, note) for number in caught}
    except ValueError:  # signals can be caught in the main thread only: elsewhere the caller stops the run
        yield stopped
        return
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
