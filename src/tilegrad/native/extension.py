"""A Python extension module from one C++ source file of the package. Without the module the package is slower.

`tilegrad doctor --build` compiles the module against the running torch and Python. This needs a C++ compiler and the headers of
Python; the headers of torch are part of its package. The C++ interface of torch changes between versions. So the file name
contains the versions of torch and Python, and a module that was built for other versions is never loaded. The module contains a
digest of its source and flags.
"""

from __future__ import annotations

import hashlib
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import torch

from .build import HOW, compiler, is_cut, replace_file, run


@dataclass(frozen=True, slots=True)
class NativeModule:
    """An extension module. libraries: torch libraries to link; folder: the folder of the compiled file."""

    name: str
    source: Path
    libraries: tuple[str, ...]
    folder: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DMODULE={self.name}")

    def path(self) -> Path:
        version = torch.__version__.replace("+", "_")
        return self.folder / f"{self.name}_torch{version}{EXTENSION_SUFFIXES[0]}"

    def digest(self) -> str:
        return hashlib.sha256(b"\0".join((repr(self.flags).encode(), self.source.read_bytes()))).hexdigest()[:16]

    def build(self) -> Path:
        """Compiles and links the file. Raises RuntimeError with the message of the compiler."""
        cxx = compiler()
        if cxx is None:
            raise RuntimeError("no C++ compiler (Debian: apt install g++)")
        root, to = Path(torch.__file__).parent, self.path()
        includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / to.name
            run(
                [
                    cxx,
                    *self.flags,
                    f'-DDIGEST="{self.digest()}"',
                    *(f"-I{include}" for include in includes),
                    str(self.source),
                    "-o",
                    str(compiled),
                    f"-L{root / 'lib'}",
                    *(f"-l{library}" for library in self.libraries),
                ]
            )
            replace_file(to, compiled)
        return to

    def load(self) -> ModuleType | str:
        """The module, or the reason why it cannot be used and what to do."""
        path = self.path()
        if not path.exists():
            return f"was not built for torch {torch.__version__}; {HOW}"
        built = path.read_bytes()
        if self.digest().encode() not in built:
            return f"was built from another source than this package's; {HOW}"
        if is_cut(built):
            return f"can't be loaded (its file is truncated); {HOW}"
        file = ExtensionFileLoader(self.name, str(path))
        spec = spec_from_loader(self.name, file)
        assert spec is not None
        try:
            module = module_from_spec(spec)
            file.exec_module(module)
        except ImportError as error:
            return f"can't be loaded ({error}); {HOW}"
        return module
