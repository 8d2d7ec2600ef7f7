"""Backward buffers that several layers share explicitly, by `predecessor` of the specification.

A `Workspace` is a set of named buffers. Each layer acquires a `Lease` and accesses the buffers through it:

    needs = {"grad_Q": ((B, T, C), torch.float32), …}
    first = Workspace(needs, device).acquire("layer 0", needs, device)
    second = first.workspace.acquire("layer 1", needs, device)       # the predecessor of layer 1 is layer 0
    second.begin(); second["grad_Q"].copy_(…); second.end()
    first.release(); second.release()                                 # in any order; a second release does nothing

Leases are counted: the buffers live until the last lease is released. Access through a released lease raises; other leases
still work. A lease that is garbage-collected counts as released, because the workspace has only weak references to leases.

A lease is pending from its `begin` to its `end`. Sharing is correct only if one layer at a time has gradients in the buffers:
from its `loss` until its `backward` returns. A pending lease may call `begin` again. `begin` of another lease or from another
thread raises an error that names both users and threads. Keep no reference to a buffer outside the lease, because the reference
would keep the buffer after the workspace has freed it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

import torch

from ..memory.types import BufferStateError

Needs = Mapping[str, tuple[Sequence[int], torch.dtype]]


class Workspace:
    def __init__(self, buffers: Needs, device: torch.device | str) -> None:
        self._buffers = {
            name: torch.zeros(tuple(s), dtype=dtype, device=device) for name, (s, dtype) in buffers.items()
        }
        self._description = _describe(buffers, device)
        self._users: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._pending: tuple[weakref.ref[Lease], threading.Thread] | None = None
        self._freed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now; 0 after the last lease is released."""
        with self._lock:
            return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())

    def acquire(self, user: str, buffers: Needs, device: torch.device | str) -> Lease:
        """A lease for a user of this name. The buffers and the device must be exactly those of the workspace."""
        wanted = _describe(buffers, device)
        if wanted != self._description:
            raise ValueError(
                f"{user} cannot share this workspace: it needs {wanted}, but the workspace has {self._description}. "
                "Share between layers of one shape, dtype and device, or pass predecessor=None"
            )
        with self._lock:
            if self._freed:
                raise BufferStateError(
                    f"{user} cannot share this workspace: its last user was freed. Pass predecessor=None"
                )
            lease = Lease(self, user)
            self._users.add(lease)
            return lease

    def _check_live(self, lease: Lease) -> None:
        if lease not in self._users:
            raise BufferStateError(f"{lease.user} was freed, and so were its backward buffers; create a new layer")

    def _check_pending(self, lease: Lease) -> None:
        """Raise if another lease is pending, or this lease in another thread."""
        if self._pending is None:
            return
        other, thread = self._pending[0](), self._pending[1]
        here = threading.current_thread()
        if other is None or (other is lease and thread is here):
            return
        raise BufferStateError(
            f"{lease.user} (thread {here.name}) needs the shared backward buffers while {other.user} (thread "
            f"{thread.name}) is pending: run the backward of {other.user} first, or use separate buffers"
        )


class Lease:
    """One user's access to a workspace."""

    def __init__(self, workspace: Workspace, user: str) -> None:
        self.workspace = workspace
        self.user = user

    def __getitem__(self, name: str) -> torch.Tensor:
        shared = self.workspace
        with shared._lock:
            shared._check_live(self)
            if name not in shared._buffers:
                raise KeyError(f"no buffer {name!r} in this workspace; accepted: {', '.join(shared._buffers)}")
            return shared._buffers[name]

    def begin(self) -> None:
        """Mark that the buffers contain gradients of this user until `end`."""
        shared = self.workspace
        with shared._lock:
            shared._check_live(self)
            shared._check_pending(self)
            shared._pending = weakref.ref(self), threading.current_thread()

    def end(self) -> None:
        with self.workspace._lock:
            self.workspace._check_pending(self)
            self.workspace._pending = None

    def release(self) -> None:
        """End the access. The last release frees the buffers."""
        shared = self.workspace
        with shared._lock:
            shared._users.discard(self)
            if shared._pending and shared._pending[0]() is self:
                shared._pending = None
            if not shared._users:
                shared._freed = True
                shared._buffers.clear()


def _describe(buffers: Needs, device: torch.device | str) -> str:
    """Everything that must agree, as text. A device without an index is the device on which torch would allocate."""
    where = torch.empty(0, device=device).device
    inside = ", ".join(f"{name} {tuple(s)} {str(dtype).removeprefix('torch.')}" for name, (s, dtype) in buffers.items())
    return f"{{{inside}}} on {where}"
