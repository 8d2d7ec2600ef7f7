"""Signals that end a run after the current step, with a save. Before the first step they end the process after a cleanup."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object]


@contextmanager
def stop_on_signals() -> Iterator[list[str]]:
    """In this context, SIGTERM, SIGINT and SIGHUP add their name to the list instead of ending the process.

    The second SIGINT only prints that the run is being saved; the third raises KeyboardInterrupt, even during a save. A
    SIGHUP that is ignored, as under nohup, stays ignored.
    """
    stopped: list[str] = []

    def note(number: int, _frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        times = stopped.count("SIGINT")
        if times == 2:
            with suppress(OSError):  # os.write, because the signal may have interrupted a print
                os.write(2, b"tilegrad: saving; a third Ctrl-C ends at once and loses what was not saved\n")
        elif times > 2:
            raise KeyboardInterrupt

    with _caught((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), note):
        yield stopped


@contextmanager
def end_on_signals() -> Iterator[None]:
    """In this context, SIGTERM and SIGHUP raise SystemExit, so that files are cleaned up; SIGINT already raises
    KeyboardInterrupt."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _caught((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextmanager
def _caught(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """In this context, `handler` gets the signals, except an ignored SIGHUP. Outside the main thread, where Python allows no
    handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        try:
            for number in before:
                signal.signal(number, handler)
            yield
        finally:
            _restore(before)
    finally:
        _restore(before)  # again, because an interrupt may have ended the first call early


def _restore(handlers: Mapping[signal.Signals, Handler | int | None]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
