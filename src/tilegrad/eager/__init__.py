"""Eager calls of attention in C++, where they were built: eager.cpp says what they do. Without them the same calls go through
Python, to the same bits: only the time of the host differs.

`tilegrad doctor --build` builds them, against the torch and the Python that run. It needs a C++ compiler, torch's headers,
which come with torch, and Python's. torch's C++ interface changes with its versions: the file's name has torch's and
Python's, so that one built for others is never loaded, and the module carries a digest of its source and flags.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from ..kernels.cpu.build import HOW, compiler, replace_file, run
from ..kernels.cpu.library import is_cut

SOURCE = Path(__file__).parent / "eager.cpp"
NAME = "tilegrad_eager"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DMODULE={NAME}")


def path() -> Path:
    version = torch.__version__.replace("+", "_")
    return SOURCE.with_name(f"{NAME}_torch{version}{sysconfig.get_config_var('EXT_SUFFIX')}")


@functools.cache
def digest() -> str:
    return hashlib.sha256(b"\0".join((repr(FLAGS).encode(), SOURCE.read_bytes()))).hexdigest()[:16]


def build() -> Path:
    """The module, compiled and linked; RuntimeError with the compiler's message where it can't be."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler (Debian: apt install g++)")
    root, to = Path(torch.__file__).parent, path()
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / to.name
        run([
            cxx, *FLAGS, f'-DDIGEST="{digest()}"', *(f"-I{include}" for include in includes), str(SOURCE), "-o", str(made),
            f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ])  # fmt: skip
        replace_file(to, made)
    return to


@functools.cache
def load() -> ModuleType | str:
    """The module, or the reason why eager calls go through Python instead and what to do."""
    if not path().exists():
        return f"was not built for torch {torch.__version__}; {HOW}"
    built = path().read_bytes()
    if digest().encode() not in built:
        return f"was built from another source than that here; {HOW}"
    if is_cut(built):
        return f"can't be loaded (its file is cut off); {HOW}"
    file = ExtensionFileLoader(NAME, str(path()))
    spec = spec_from_loader(NAME, file)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        file.exec_module(module)
    except ImportError as error:
        return f"can't be loaded ({error}); {HOW}"
    return module
