"""./tg on a copy of its own: a stub package stands in for the gigabyte of torch, so that set-up takes seconds."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tilegrad"
version = "0"
[project.optional-dependencies]
dev = []
[tool.hatch.build.targets.wheel]
packages = ["src/tilegrad"]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    package = root / "src" / "tilegrad"
    package.mkdir(parents=True)
    shutil.copy(HERE / "tg", root)
    (root / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (root / "constraints.txt").write_text("", encoding="utf-8")
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "__main__.py").write_text("import sys; print('ran', *sys.argv[1:])", encoding="utf-8")
    return root


def environment(**more: str) -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if k not in ("TG_PYTHON", "TG_VENV", "PYTHONPATH", "VIRTUAL_ENV")
    } | more


def tg(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "tg", *arguments], capture_output=True, text=True, env=environment(**more), timeout=300, cwd="/"
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    subprocess.run(["shellcheck", "--shell=sh", HERE / "tg"], check=True)


def test_tg_python_installs_nothing(checkout: Path) -> None:
    done = tg(checkout, "some", "command", TG_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, "ran some command\n")
    assert not (checkout / ".venv").exists()


def test_tg_python_that_is_none_is_named(checkout: Path) -> None:
    done = tg(checkout, TG_PYTHON="no-such-python")
    assert done.returncode == 2
    assert "TG_PYTHON=no-such-python is not a Python 3.11" in done.stderr


@pytest.mark.slow
def test_first_use_installs_once_and_again_when_requirements_change(checkout: Path) -> None:
    first, second = tg(checkout, "a"), tg(checkout, "b")
    assert first.stdout == "ran a\n" and "installing" in first.stderr, first.stderr
    assert second.stdout == "ran b\n" and second.stderr == ""
    (checkout / "constraints.txt").write_text("# changed\n", encoding="utf-8")
    assert "installing" in tg(checkout, "c").stderr


@pytest.mark.slow
def test_a_killed_install_is_repaired(checkout: Path) -> None:
    """Killed at two moments, and while pip asks an index that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(200)
        asks = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/", "NO_PROXY": "127.0.0.1"}
        for delay, more in ((0.2, {}), (2.0, {}), (None, asks)):
            launch = subprocess.Popen(
                [checkout / "tg", "x"], env=environment(**more), start_new_session=True, stderr=subprocess.DEVNULL
            )
            if delay is None:
                index.accept()[0].close()
            else:
                time.sleep(delay)
            os.killpg(launch.pid, signal.SIGKILL)
            launch.wait()
    assert tg(checkout, "after").stdout == "ran after\n"


@pytest.mark.slow
def test_a_launcher_killed_alone_leaves_its_pip_to_finish_first(checkout: Path) -> None:
    launch = subprocess.Popen([checkout / "tg", "x"], env=environment(), stderr=subprocess.DEVNULL)
    time.sleep(4.0)
    launch.kill()
    launch.wait()
    assert tg(checkout, "after").stdout == "ran after\n"


@pytest.mark.slow
def test_two_launches_at_once(checkout: Path) -> None:
    launches = [
        subprocess.Popen(
            [checkout / "tg", str(i)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(3)
    ]
    results = [launch.communicate(timeout=300) for launch in launches]
    assert [out for out, _ in results] == [f"ran {i}\n" for i in range(3)]
    assert sum("installing" in err for _, err in results) == 1


@pytest.mark.slow
def test_a_second_start_needs_no_network_and_a_moved_checkout_is_installed_anew(checkout: Path) -> None:
    assert tg(checkout, "a").stdout == "ran a\n"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "HTTPS_PROXY": "http://127.0.0.1:9"}
    second = tg(checkout, "b", **nowhere)
    assert (second.stdout, second.stderr) == ("ran b\n", "")
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    third = tg(moved, "c")
    assert third.stdout == "ran c\n" and "installing" in third.stderr
