"""Signals that whoever started the tests ignores."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def hear_interrupts() -> None:
    """A shell script starts a command with `&` with SIGINT ignored, and every process of a test would ignore it too: one
    that is interrupted would never end."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hangups_heard() -> Iterator[None]:
    """Inside, also where nohup runs the tests; outside they outlive their terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
