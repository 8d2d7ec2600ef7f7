"""Compiles every kernel with every version of Triton that the kernels know, each in its own process.

`--triton 3.9=FOLDER` names a folder with a version (`pip install --target FOLDER --no-deps triton==3.9.*`). A
version that is not named is installed like this for the session, and skipped where there is no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
TESTS = Path(__file__).parents[1]
COMPILED = ["attention/test_hopper_compile.py", "attention/test_triton_compile.py", "ops/test_ops_triton_compile.py"]
INSTALLED: dict[str, Path | str] = {}  # by version: the folder, or why there is none


def folder_of(version: str, named: list[str], new: Path) -> Path | str:
    folders = dict(each.split("=", 1) for each in named)
    if version in folders:
        return Path(folders[version]).resolve()
    if version not in INSTALLED:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(new)]
        done = subprocess.run([*pip, f"triton=={version}.*"], capture_output=True, text=True)
        INSTALLED[version] = f"pip: {done.stderr.strip()[-200:]}" if done.returncode else new
    return INSTALLED[version]


@pytest.mark.slow
@pytest.mark.parametrize("of", ["CI", "slow"])
@pytest.mark.parametrize("version", ["3.7", "3.8", "3.9"])
def test_every_kernel_compiles(
    version: str, of: str, pytestconfig: pytest.Config, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folder_of(version, pytestconfig.getoption("--triton"), tmp_path_factory.mktemp(f"triton-{version}"))
    if isinstance(folder, str):
        pytest.skip(folder)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    asked = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"{version}."), f"{folder} has Triton {found}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    command += [str(TESTS / name) for name in COMPILED] + (["--slow"] if of == "slow" else [])
    done = subprocess.run(command, env=env, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
