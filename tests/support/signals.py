"""Signals that the parent process of the tests may ignore."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def hear_interrupts() -> None:
    """A shell script ignores SIGINT for a command that it starts with `&`. Every process of a test would inherit that, and one
    that is interrupted would never end."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hangups_heard() -> Iterator[None]:
    """SIGHUP is not ignored inside, also where nohup runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
