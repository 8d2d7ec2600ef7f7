"""System calls for NUMA policies, without libnuma: bind a range of memory to a node, and query the node of a range.

mbind(addr, len, MPOL_BIND, {node})        pages of the range may only come from that node
get_mempolicy(addr, MPOL_F_ADDR)           the policy of the range around addr, even before a page of it is touched
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_MPOL_BIND = 2
_MPOL_F_ADDR = 2
_MASK_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_NodeMask = ctypes.c_ulong * (_MASK_BITS // _WORD_BITS)

_SYSCALLS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "getcpu": 309},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "getcpu": 168},
}


def nodes(sys_root: Path = Path("/sys")) -> list[int]:
    """The nodes that have memory; [0] if Linux does not list them."""
    for name in ("has_memory", "online"):
        file = sys_root / "devices/system/node" / name
        if file.is_file():
            return _parse_list(file.read_text(encoding="utf-8"))
    return [0]


def _parse_list(text: str) -> list[int]:
    """'0-2,4' → [0, 1, 2, 4]"""
    nodes: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes


def supported() -> bool:
    return platform.system() == "Linux" and platform.machine() in _SYSCALLS


def _syscall(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(ctypes.c_long(_SYSCALLS[platform.machine()][name]), *arguments) < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{name}: {os.strerror(errno)}")


def current_node() -> int:
    """The node of the processor that runs the calling thread now."""
    cpu, node = ctypes.c_uint(), ctypes.c_uint()
    _syscall("getcpu", ctypes.byref(cpu), ctypes.byref(node), None)
    return node.value


def bind(address: int, nbytes: int, node: int) -> None:
    """Binds the pages of [address, address + nbytes) to `node`; address must be page aligned."""
    mask = _NodeMask()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    _syscall(
        "mbind",
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask),
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_uint(0),
    )


def bound_nodes(address: int) -> list[int]:
    """The nodes to which the memory at `address` is bound; [] if its policy is not MPOL_BIND."""
    mode, mask = ctypes.c_int(), _NodeMask()
    _syscall(
        "get_mempolicy",
        ctypes.byref(mode),
        ctypes.byref(mask),
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_MPOL_F_ADDR),
    )
    if mode.value != _MPOL_BIND:
        return []
    return [bit for bit in range(_MASK_BITS) if mask[bit // _WORD_BITS] >> bit % _WORD_BITS & 1]
