"""The native library: where it lies, how it is built, and why it is missing.

One shared library beside this file, built by the C++ compiler alone: at install (hatch_build.py) or by
`tilegrad doctor --build`. The kernels are compiled once for each instruction set of the processor's family, each into a
namespace of its own. The library carries a digest of the sources and flags it was built from: one built from others is
not used. This file needs the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
MACHINE = platform.machine().lower()
LIBRARY = Path(__file__).parent / f"native_{MACHINE}.so"
AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512")
TARGETS: dict[str, dict[str, Sequence[str]]] = {  # instruction set → the compiler's flags for it
    "x86_64": {
        "portable": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": AVX512,
        "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    },
    # Scheduling before registers are given out costs the products a fifth: GCC then copies accumulators about.
    "aarch64": {"portable": ("-fno-schedule-insns",)},
}
PORTABLE: dict[str, Sequence[str]] = {"portable": ()}
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-strict-aliasing",
)
HOW = "with a C++ compiler (Debian: apt install g++) run: tilegrad doctor --build"


ASKED = {  # what native.cpp asks the processor for
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "amx": ("avx512bf16", "amx-tile", "amx-bf16"),
}


def targets(cxx: str) -> dict[str, Sequence[str]]:
    """Those that this compiler knows: an old one builds a library without the newest instruction sets."""
    return {isa: flags for isa, flags in TARGETS.get(MACHINE, PORTABLE).items() if _knows(cxx, isa, flags)}


def _knows(cxx: str, isa: str, flags: Sequence[str]) -> bool:
    asked = " && ".join(f'__builtin_cpu_supports("{name}")' for name in ASKED.get(isa, ())) or "true"
    command = [cxx, *flags, "-fsyntax-only", "-x", "c++", "-"]
    return not subprocess.run(command, input=f"bool f() {{ return {asked}; }}".encode(), capture_output=True).returncode


def compiler() -> str | None:
    """$CXX, or the first there is of c++, g++, clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


@functools.cache
def digest() -> str:
    """Of everything that the library is made from."""
    parts = [repr((FLAGS, TARGETS)).encode()]
    parts += [path.read_bytes() for path in sorted(SOURCES.rglob("*")) if path.suffix in (".h", ".cpp")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _commands(cxx: str, flags: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """One compilation each. `folder` gets the objects."""
    isas = targets(cxx)
    withs = [f"-DWITH_{isa}" for isa in isas]
    for name in ("native", "threads/team", "threads/turns"):
        source, target = str(SOURCES / f"{name}.cpp"), str(folder / f"{Path(name).name}.o")
        yield [cxx, *flags, f"-I{SOURCES}", *withs, f'-DDIGEST="{digest()}"', "-c", source, "-o", target]
    for isa, own in isas.items():
        double = ["-DWITH_DOUBLE"] if isa == "portable" else []
        for name in (
            ("attention/kernels",) if isa == "amx" else ("attention/kernels", "rows/rowwise")
        ):  # rows have no use for tiles
            source, target = str(SOURCES / f"{name}.cpp"), str(folder / f"{Path(name).name}_{isa}.o")
            yield [cxx, *flags, f"-I{SOURCES}", *own, *double, f"-DISA={isa}", "-c", source, "-o", target]


def objects(cxx: str, folder: Path, flags: Sequence[str] = FLAGS) -> list[str]:
    """Compile into `folder`; raises RuntimeError with the compiler's words."""
    commands = list(_commands(cxx, flags, folder))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    return [command[-1] for command in commands]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-4000:]}")


def build(to: Path = LIBRARY) -> Path:
    """Compile and link; a process that reads the old library keeps it."""
    cxx = compiler()
    if cxx is None:
        given = os.environ.get("CXX")
        found = f"$CXX, {given!r}, is no program" if given else "none of c++, g++, clang++ is there"
        raise RuntimeError(f"no C++ compiler: {found} (Debian: apt install g++)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / to.name
        _run([cxx, "-shared", "-pthread", *objects(cxx, folder), "-o", str(made)])
        beside = to.with_name(f".{to.name}.{os.getpid()}")
        try:
            shutil.copy(made, beside)
            beside.replace(to)
        except OSError as error:
            raise RuntimeError(f"{to} can't be written: {error}") from error
    return to
