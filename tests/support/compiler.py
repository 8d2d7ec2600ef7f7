"""Triton's compiler without a GPU. A driver that only names an architecture replaces CUDA's, and a launch compiles
instead of running. Argument specialisation, the choice of tiles and ptxas are the real ones.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

SHARED_MEMORY_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def slowly(case: object) -> Any:
    """Marks a case as slow; several arguments are a tuple. CI compiles every kernel for every architecture."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


class Compiled(NamedTuple):
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    sass: str


# cubin → registers, spilled bytes, code: tests launch many kernels twice
_dumped: dict[bytes, tuple[int, int, str]] = {}
INSTRUCTION_BYTES = 16


@contextmanager
def without_line_numbers() -> Iterator[None]:
    """Triton compiles inside without the source line of each instruction: the same instructions in nine tenths of the time. In
    the names of its cached files, its version replaces the hash of its 400 MB, which takes a second in each process."""
    import triton
    from triton.runtime import cache

    with (
        mock.patch.dict(os.environ, {"TRITON_DISABLE_LINE_INFO": "1"}),
        mock.patch.object(cache, "triton_key", return_value=triton.__version__),
    ):
        yield


def resources(kernels: dict[str, Any], folder: Path) -> dict[str, Compiled]:
    """The kernels of one architecture by name. nvdisasm takes longer to start than to run, so it runs once for all."""
    new = {code: folder / f"{name}.cubin" for name, x in kernels.items() if (code := x.asm["cubin"]) not in _dumped}
    if new:
        for code, path in new.items():
            path.write_bytes(code)
        listed = [dump("cuobjdump", "-lelf", path) for path in new.values()]  # the listing has the architecture's name
        (architecture,) = {name for line in listed for name in re.findall(r"\.sm_(\w+)\.cubin", line)}
        (every := folder / "instructions").write_bytes(b"".join(map(instructions, new)))
        code_lines = re.findall(
            r"^ +/\*[0-9a-f]+\*/.*", dump("nvdisasm", "-b", f"SM{architecture}", every), re.MULTILINE
        )
        assert len(code_lines) * INSTRUCTION_BYTES == every.stat().st_size
        for (code, path), line in zip(new.items(), listed, strict=True):
            usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("cuobjdump", "-res-usage", path))
            assert usage is not None
            count = len(instructions(code)) // INSTRUCTION_BYTES
            own, code_lines = code_lines[:count], code_lines[count:]
            _dumped[code] = int(usage[1]), int(usage[2]), "\n".join([line, *own])
    found = {}
    for name, x in kernels.items():
        registers, spilled, sass = _dumped[x.asm["cubin"]]
        found[name] = Compiled(name, registers, spilled, x.metadata.shared, sass)
    return found


def instructions(cubin: bytes) -> bytes:
    """The contents of the .text sections of a 64-bit ELF file."""
    at, count, names = (int.from_bytes(cubin[a:b], "little") for a, b in ((40, 48), (60, 62), (62, 64)))
    sections = [struct.unpack_from("<I20xQQ", cubin, at + 64 * i) for i in range(count)]  # name, place, size
    start = sections[names][1]
    parts = [cubin[place : place + n] for name, place, n in sections if cubin.startswith(b".text.", start + name)]
    assert parts and not any(len(part) % INSTRUCTION_BYTES for part in parts)
    return b"".join(parts)


def dump(tool: str, *arguments: str | Path) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@contextmanager
def compiling(architecture: int, folder: Path) -> Iterator[dict[str, Compiled]]:
    """Yields a dict that has the launched kernels by name after the block; a kernel launched again is "‹name› again"."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver  # its default fails without a GPU, so it is restored explicitly
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return architecture  # its own number for a device: Triton remembers the target of each

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    launched: dict[str, Any] = {}
    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert "enable_fp_fusion" in kwargs, f"{self.__name__} leaves it to Triton whether a·b + c is one instruction"
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            launched[self.__name__ if self.__name__ not in launched else f"{self.__name__} again"] = compiled
        return compiled

    driver.set_active(Driver())
    try:
        with mock.patch.object(JITFunction, "run", compile_only), without_line_numbers():
            yield found
        found |= resources(launched, folder)
    finally:
        driver._active = None
