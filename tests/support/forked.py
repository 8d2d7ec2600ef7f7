"""Python code in its own process, forked from one that has imported torch: it begins in a tenth of the time."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")  # processes are forked from one that has imported the slow modules
CONTEXT.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "pytest"])


def python(code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `python -c code arguments` in this folder and environment, without this process's threads and modules."""
    with tempfile.TemporaryDirectory() as name:
        out, error = Path(name, "out"), Path(name, "error")
        how = (code, arguments, str(out), str(error), os.getcwd(), dict(os.environ))
        process = CONTEXT.Process(target=_run, args=how)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout)
        texts = (path.read_text(encoding="utf-8") if path.exists() else "" for path in (out, error))
        return subprocess.CompletedProcess(["python", *arguments], process.exitcode, *texts)


def _run(code: str, arguments: tuple[str, ...], out: str, error: str, folder: str, there: dict[str, str]) -> None:
    for number, path in ((1, out), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(there)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
