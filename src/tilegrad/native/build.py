"""The build of the native library: sources, compiler flags for each instruction set, path, digest.

The library is one shared object in kernels/cpu. Its build needs only a C++ compiler, and runs when the package is installed
(hatch_build.py) or by `tilegrad doctor --build`. The kernels are compiled once for each instruction set of the processor
family, each time in a namespace of their own. The library contains a digest of its sources and flags; library.py rejects a
library with another digest. This file imports only the standard library, because hatch_build.py runs it before the package is
installed.
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

KERNELS = Path(__file__).parents[1] / "kernels" / "cpu"
SOURCES = KERNELS / "csrc"
MACHINE = platform.machine().lower()
LIBRARY = KERNELS / f"native_{MACHINE}.so"
AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512")
TARGETS: dict[str, dict[str, Sequence[str]]] = {  # instruction set → compiler flags
    "x86_64": {
        "portable": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": AVX512,
        "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    },
    # If GCC schedules instructions before register allocation, it spills accumulators, and products take a fifth longer.
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
OWN_FLAGS: dict[str, Sequence[str]] = {  # source → flags after FLAGS
    "rows/sampling": ("-ffp-contract=off",),
    "rows/adamw": ("-ffp-contract=off",),
}
HOW = "with a C++ compiler (Debian: apt install g++) run: tilegrad doctor --build"

CPU_FEATURES = {  # instruction set → features that native.cpp checks with __builtin_cpu_supports
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "amx": ("avx512bf16", "amx-tile", "amx-bf16"),
}


def targets(cxx: str) -> dict[str, Sequence[str]]:
    """The instruction sets that this compiler can target. With an old compiler, the newest instruction sets are left out."""
    return {isa: flags for isa, flags in TARGETS.get(MACHINE, PORTABLE).items() if _can_target(cxx, isa, flags)}


def _can_target(cxx: str, isa: str, flags: Sequence[str]) -> bool:
    features = " && ".join(f'__builtin_cpu_supports("{name}")' for name in CPU_FEATURES.get(isa, ())) or "true"
    command = [cxx, *flags, "-fsyntax-only", "-x", "c++", "-"]
    return not subprocess.run(
        command, input=f"bool f() {{ return {features}; }}".encode(), capture_output=True
    ).returncode


def compiler() -> str | None:
    """$CXX, or the first of c++, g++, clang++ that exists."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


@functools.cache
def digest() -> str:
    """The hash of all sources and flags."""
    parts = [repr((FLAGS, TARGETS, OWN_FLAGS)).encode()]
    parts += [path.read_bytes() for path in sorted(SOURCES.rglob("*")) if path.suffix in (".h", ".cpp")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _commands(cxx: str, flags: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """The compiler command of each object file, with output in `folder`."""
    isas = targets(cxx)
    defines = [f"-DWITH_{isa}" for isa in isas]
    for name in ("native", "gemm/gemm", "threads/thread_pool", "threads/work_queue"):
        source, target = str(SOURCES / f"{name}.cpp"), str(folder / f"{Path(name).name}.o")
        yield [cxx, *flags, f"-I{SOURCES}", *defines, f'-DDIGEST="{digest()}"', "-c", source, "-o", target]
    for isa, isa_flags in isas.items():
        double = ["-DWITH_DOUBLE"] if isa == "portable" else []
        names = ["attention/kernels"]  # only attention uses AMX, for products of tiles
        names += [] if isa == "amx" else ["rows/norm_gelu", "rows/sampling", "rows/adamw", "gemm/fixed_order"]
        for name in names:
            source, target = str(SOURCES / f"{name}.cpp"), str(folder / f"{Path(name).name}_{isa}.o")
            special = OWN_FLAGS.get(name, ())
            yield [
                cxx,
                *flags,
                *special,
                f"-I{SOURCES}",
                *isa_flags,
                *double,
                f"-DISA={isa}",
                "-c",
                source,
                "-o",
                target,
            ]


def objects(cxx: str, folder: Path, flags: Sequence[str] = FLAGS) -> list[str]:
    """Compiles the object files into `folder`. Raises RuntimeError with the message of the compiler."""
    commands = list(_commands(cxx, flags, folder))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    return [command[-1] for command in commands]


def run(command: Sequence[str]) -> None:
    """Runs a compiler. Raises RuntimeError with its message."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-4000:]}")


def build(to: Path = LIBRARY) -> Path:
    """Compiles and links the library, and replaces the file by a rename. A process that has loaded the old file keeps it."""
    cxx = compiler()
    if cxx is None:
        cxx_variable = os.environ.get("CXX")
        reason = f"$CXX={cxx_variable!r} is not a program" if cxx_variable else "none of c++, g++, clang++ exists"
        raise RuntimeError(f"no C++ compiler: {reason} (Debian: apt install g++)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = folder / to.name
        run([cxx, "-shared", "-pthread", *objects(cxx, folder), "-o", str(made)])
        replace_file(to, made)
    return to


def replace_file(to: Path, made: Path) -> None:
    """Replaces a library by one rename, so that no process loads a partial file."""
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        shutil.copy(made, temporary)
        temporary.replace(to)
    except OSError as error:
        raise RuntimeError(f"{to} can't be written: {error}") from error


def is_cut(library: bytes) -> bool:
    """Whether a 64-bit ELF file ends before its section headers, which come last. Loading such a file kills the process."""
    if library[:5] != b"\x7fELF\x02":
        return False
    start, size, count = (int.from_bytes(library[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return len(library) < max(64, start + size * count)
