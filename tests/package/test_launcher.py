"""The launcher ./tg in a copy of the checkout. A stub package replaces torch, so that the installation takes seconds."""

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
rich = []
bpe = []
chat = []
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
    more = {"CXX": "no-such-compiler"} | more
    return subprocess.run(
        [root / "tg", *arguments], capture_output=True, text=True, env=environment(**more), timeout=300, cwd="/"
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_the_launcher() -> None:
    subprocess.run(["shellcheck", "--shell=sh", HERE / "tg"], check=True)


def test_tg_python_installs_nothing(checkout: Path) -> None:
    done = tg(checkout, "some", "command", TG_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, "ran some command\n")
    assert done.stderr == "" and not (checkout / ".venv").exists()


def test_the_error_for_a_bad_tg_python_names_it(checkout: Path) -> None:
    done = tg(checkout, TG_PYTHON="no-such-python")
    assert done.returncode == 2
    assert "TG_PYTHON=no-such-python is not a Python 3.11" in done.stderr


STUB = """#!/bin/sh
# Replaces Python: makes no environment, installs nothing, and records its arguments.
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m tilegrad") PYTHONPATH=$SOURCES exec "$REAL" "$@" ;;
"-m pip" | "-m uv") for last; do :; done; echo "$2 $last" >>"$CALLS" ;;
"-m "*) echo "$2" >>"$CALLS" ;;
*) exec "$REAL" "$@" ;;
esac
"""
MAIN = """
import os, sys, time
if sys.argv[1:] == ["doctor", "--build"]:
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("build\\n")
    while os.path.exists(os.environ["CALLS"] + ".hold"):
        time.sleep(0.01)
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("built\\n")
else:
    print("ran", *sys.argv[1:])
"""


class Stubbed:
    """A checkout whose Python is a stub that installs nothing. `calls` has what it was asked to do."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root.parent / "calls"
        (root / "src" / "tilegrad" / "__main__.py").write_text(MAIN, encoding="utf-8")
        (root / "src" / "tilegrad" / "some.cpp").write_text("", encoding="utf-8")
        folder = root.parent / "bin"
        folder.mkdir()
        for name in ("python3", "a-compiler"):
            (folder / name).write_text(STUB, encoding="utf-8")
            (folder / name).chmod(0o755)
        self.environment = environment(
            PATH=f"{folder}:{os.environ['PATH']}",
            REAL=sys.executable,
            SOURCES=str(root / "src"),
            CALLS=str(self.log),
            CXX="no-such-compiler",
        )

    def tg(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Returns when no process holds the command's output any more."""
        command, env = [str(self.root / "tg"), *arguments], self.environment | more
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd="/")

    def calls(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []

    def wait_for(self, call: str, times: int = 1) -> None:
        end = time.monotonic() + 300
        while self.calls().count(call) < times:
            assert time.monotonic() < end, self.calls()
            time.sleep(0.02)


@pytest.fixture
def stubbed(checkout: Path) -> Stubbed:
    return Stubbed(checkout)


def test_a_command_installs_the_small_set_and_linters_install_the_rest(stubbed: Stubbed) -> None:
    small, rest = (["pip torch", f"uv {stubbed.root}[{extras}]"] for extras in ("rich,bpe,chat", "dev"))
    assert [stubbed.tg("demo").stdout, stubbed.tg("train").stdout] == ["ran demo\n", "ran train\n"]
    assert stubbed.calls() == small
    stubbed.tg("lint")
    stubbed.tg("docs")
    stubbed.tg("demo")
    assert stubbed.calls() == [*small, *rest, "ruff", "ruff", "mypy", "mkdocs"]


def test_tests_install_everything_at_once(stubbed: Stubbed) -> None:
    stubbed.tg("test")
    stubbed.tg("demo")
    assert stubbed.calls() == ["pip torch", f"uv {stubbed.root}[dev]", "pytest"]


def test_a_compiler_builds_once_in_the_background_and_again_for_other_sources(stubbed: Stubbed) -> None:
    announced = "tg: building the C++ modules in the background"
    first = stubbed.tg("demo", CXX="a-compiler")
    assert first.stdout == "ran demo\n" and first.stderr.count(announced) == 1
    stubbed.wait_for("built")
    while not (stubbed.root / ".venv" / ".tg-built").exists():
        time.sleep(0.02)
    assert stubbed.tg("demo", CXX="a-compiler").stderr == ""
    (stubbed.root / "src" / "tilegrad" / "some.cpp").write_text("int x;\n", encoding="utf-8")
    assert announced in stubbed.tg("demo", CXX="a-compiler").stderr
    stubbed.wait_for("built", 2)


def test_a_build_outlives_its_command_and_no_second_build_starts(stubbed: Stubbed) -> None:
    hold = stubbed.log.with_name("calls.hold")
    hold.touch()
    with subprocess.Popen(
        [stubbed.root / "tg", "demo"],
        env=stubbed.environment | {"CXX": "a-compiler"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as launch:
        assert launch.communicate(timeout=300)[0] == "ran demo\n"  # although the build still runs
    stubbed.wait_for("build")
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C, then the terminal closes
        os.killpg(launch.pid, number)
    second = stubbed.tg("demo", CXX="a-compiler")
    assert (second.stdout, second.stderr) == ("ran demo\n", "")
    hold.unlink()
    stubbed.wait_for("built")
    assert stubbed.calls().count("build") == 1


def test_a_missing_compiler_is_reported_once_and_a_later_one_builds(stubbed: Stubbed) -> None:
    first, second = stubbed.tg("demo"), stubbed.tg("demo")
    assert first.stderr.count("tg: no C++ compiler (no-such-compiler not found)") == 1
    assert second.stderr == "" and "build" not in stubbed.calls()
    assert "in the background" in stubbed.tg("demo", CXX="a-compiler").stderr
    stubbed.wait_for("built")


def test_tests_linters_and_doctor_start_no_build(stubbed: Stubbed) -> None:
    for verb in ("test", "lint", "docs", "doctor"):
        assert "background" not in stubbed.tg(verb, CXX="a-compiler").stderr
    assert "build" not in stubbed.calls()


def test_the_error_for_a_folder_that_cannot_be_written_names_it(stubbed: Stubbed) -> None:
    done = stubbed.tg("demo", TG_VENV="/proc/nowhere/venv")
    assert done.returncode == 2
    assert "tg: can't write into /proc/nowhere; name a place for the environment: TG_VENV=" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_checkout_is_not_built_and_this_is_reported_once(stubbed: Stubbed, tmp_path: Path) -> None:
    package = stubbed.root / "src" / "tilegrad"
    package.chmod(0o555)
    more = {"CXX": "a-compiler", "TG_VENV": str(tmp_path / "venv")}
    first, second = stubbed.tg("demo", **more), stubbed.tg("demo", **more)
    package.chmod(0o755)
    assert first.stderr.count("is read-only: its C++ modules are not built") == 1
    assert second.stderr == "" and "build" not in stubbed.calls()


@pytest.mark.slow
def test_first_use_installs_once_and_again_when_requirements_change(checkout: Path) -> None:
    first, second = tg(checkout, "a"), tg(checkout, "b")
    assert first.stdout == "ran a\n" and "installing" in first.stderr, first.stderr
    assert second.stdout == "ran b\n" and second.stderr == ""
    (checkout / "constraints.txt").write_text("# changed\n", encoding="utf-8")
    assert "installing" in tg(checkout, "c").stderr


@pytest.mark.slow
def test_a_killed_install_is_repaired(checkout: Path) -> None:
    """The install is killed at two moments, and while pip waits for an index that does not answer."""
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
def test_two_launches_at_once_both_succeed(checkout: Path) -> None:
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
def test_a_second_start_needs_no_network_and_a_moved_checkout_is_installed_again(checkout: Path) -> None:
    assert tg(checkout, "a").stdout == "ran a\n"
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0", "HTTPS_PROXY": "http://127.0.0.1:9"}
    second = tg(checkout, "b", **nowhere)
    assert (second.stdout, second.stderr) == ("ran b\n", "")
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    third = tg(moved, "c")
    assert third.stdout == "ran c\n" and "installing" in third.stderr
