"""A run on macOS, where there is no /proc; Windows, which is refused by name."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.forked import python
from support.native import needs_library

import tilegrad
from tilegrad.memory.managed.pressure import memory_available, memory_limit
from tilegrad.training.config import DataConfig, RunConfig, TrainConfig
from tilegrad.training.run import train

CPU = torch.device("cpu")
RUN = RunConfig(
    tilegrad.ModelConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16),
    TrainConfig(steps=3, batch_size=2, warmup_steps=1, eval_batches=1, sample_tokens=4),
    DataConfig(files=("text.txt",)),
)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")


def test_training_needs_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    for name in ("exists", "is_file"):
        there = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda self, there=there: not str(self).startswith("/proc") and there(self))
    peaks = iter(range(10**9, 10**10, 10**6))
    monkeypatch.setattr(resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=next(peaks)))
    result = train(RUN, Path("run"))
    assert result.steps == 3 and result.measured.measured_bytes % 10**6 == 0 and result.measured.unplanned_bytes > 0


def test_windows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        ValueError, match=r"platform: got win32; accepted: linux or darwin \(macOS\); on Windows, use Linux in"
    ):
        train(RUN, Path("run"))
    assert not Path("run").exists()


ON_WINDOWS = """
import signal, sys
import tilegrad.cli
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import torch
for name in ("fcntl", "resource", "termios", "pwd"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
del signal.SIGHUP
sys.platform = "win32"
sys.exit(tilegrad.cli.main(sys.argv[1:]))
"""


@needs_library  # without it there is a warning on stderr
def test_on_windows_the_error_of_a_run_is_one_sentence_and_generate_works() -> None:
    """Only training uses functions of POSIX."""
    train(RUN, Path("run"))
    done = python(ON_WINDOWS, "train", "--data", "text.txt", "--out", "other")
    assert done.returncode == 2 and not Path("other").exists()
    assert (
        done.stderr
        == "tilegrad: platform: got win32; accepted: linux or darwin (macOS); on Windows, use Linux in WSL\n"
    )
    done = python(ON_WINDOWS, "generate", "run", "--prompt", "the", "--max-tokens", "4")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("the")


def test_the_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 1000 kB\n", encoding="utf-8")
    assert memory_limit(CPU, tmp_path) == 4000 * 1024 and memory_available(CPU, tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n", encoding="utf-8")
    group = tmp_path / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("5\n", encoding="utf-8")
    (group / "memory.max").write_text("2000000\n", encoding="utf-8")
    assert memory_limit(CPU, tmp_path) == 2000000 and memory_available(CPU, tmp_path) == 1000 * 1024
    (group / "memory.current").write_text("1999000\n", encoding="utf-8")
    assert memory_available(CPU, tmp_path) == 1000
    assert memory_limit(torch.device("meta"), tmp_path) is memory_available(torch.device("meta"), tmp_path) is None


def test_without_proc_the_limit_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_limit(CPU, tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(os, "sysconf_names", {})
    assert memory_limit(CPU, tmp_path) is None
