"""Builds the native kernel into the wheel where there is a C++ compiler; without one the wheel is pure Python.

An editable install builds it into the source tree, unless the one there was built from these sources. `tilegrad doctor` says
which of these happened. A wheel to be published must have the kernel, with every instruction set of its family:
TILEGRAD_NATIVE=require makes any other an error.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILDER = "src/tilegrad/native/build.py"


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("native_build", Path(self.root) / BUILDER)
        assert spec is not None and spec.loader is not None
        native_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native_build)
        required = os.environ.get("TILEGRAD_NATIVE") == "require"
        try:
            library = native_build.LIBRARY
            if (
                version != "editable"
                or not library.exists()
                or native_build.digest().encode() not in library.read_bytes()
            ):
                library = native_build.build()
            missing = set(native_build.TARGETS.get(native_build.MACHINE, ())) - set(
                native_build.targets(native_build.compiler())
            )
            if required and missing:
                raise RuntimeError(f"{native_build.compiler()} can't compile for {', '.join(sorted(missing))}")
        except RuntimeError as error:
            if required:
                raise
            self.app.display_warning(f"tilegrad without its native CPU kernel: {error}")
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
