"""Triton's compiler without a GPU: a driver that only names an architecture takes the place of CUDA's, and a launch compiles
instead of running. Argument specialisation, tile choice and ptxas are the real ones.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

SHARED_MEMORY_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class Compiled(NamedTuple):
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    sass: str


_dumped: dict[
    bytes, tuple[int, int, str]
] = {}  # cubin → registers, spilled bytes, code: tests launch many kernels twice


def resources(name: str, compiled: Any, folder: Path) -> Compiled:
    code: bytes = compiled.asm["cubin"]
    if code not in _dumped:
        (cubin := folder / f"{name}.cubin").write_bytes(code)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("cuobjdump", "-res-usage", cubin))
        assert usage is not None
        sass = dump("cuobjdump", "-lelf", cubin) + dump("nvdisasm", "-c", "-ndf", cubin)  # with the architecture's name
        _dumped[code] = int(usage[1]), int(usage[2]), sass
    registers, spilled, sass = _dumped[code]
    return Compiled(name, registers, spilled, compiled.metadata.shared, sass)


def dump(tool: str, *arguments: str | Path) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


@contextmanager
def compiling(architecture: int, folder: Path) -> Iterator[dict[str, Compiled]]:
    """What was launched inside, by name; a kernel launched again is "‹name› again"."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver  # its own default fails where there is no GPU, so it is put back by hand
    from triton.runtime.jit import JITFunction

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return architecture  # a device of its own: Triton remembers the target of each

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert kwargs["enable_fp_fusion"], f"{self.__name__} leaves it to Triton whether a·b + c is one instruction"
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            name = self.__name__ if self.__name__ not in found else f"{self.__name__} again"
            found[name] = resources(name, compiled, folder)
        return compiled

    driver.set_active(Driver())
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield found
    finally:
        driver._active = None
