"""The start of a run: its configuration, its folder and the checkpoint to resume from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..text.untrusted import decoded, parse_json, shown
from .checkpoint import latest_good, read_state
from .config import RunConfig, Sections
from .folder import checkpoint_of, holds_a_run, locate, upgraded
from .manifest import DamagedCheckpoint
from .sections import resumed, run_from, settled, with_steps
from .state import RunState

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Start:
    config: RunConfig
    folder: Path
    saved: tuple[Path, RunState] | None  # the checkpoint to resume from, and its state; None: a new run

    def with_steps(self, rows: Callable[[int], int]) -> Start:
        """The start with its epochs converted to steps. Raises if a resumed run has done more steps. `rows(n)` is the number
        of rows in n epochs."""
        config = with_steps(self.config, rows)
        done = 0 if self.saved is None else self.saved[1]["engine"]["steps"]
        if config.train.steps < done:
            raise ValueError(f"steps: got {config.train.steps}; accepted: at least {done}, which are done")
        return replace(self, config=config)


def resolve(
    config: RunConfig | Sections | None,
    out: StrPath | None,
    *,
    resume: StrPath | bool | None,
    where: str,
    name: str | None,
    world: int,
) -> Start:
    """The start of a run with `world` ranks.

    config   a new run's configuration; in a resumed run only the keys in `MAY_CHANGE` may differ, and None changes nothing
    out      the run's folder; None: runs/`name`, or runs/PRESET
    resume   True: from the newest checkpoint in `out`; a path: from that run or checkpoint. Ranks that torchrun has
             restarted resume by themselves.
    where    the source of `config`, for errors
    """
    content: Sections = config.plain() if isinstance(config, RunConfig) else config or {}
    folder = Path(out or f"runs/{name or content.get('model', {}).get('preset', 'tiny')}")
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and holds_a_run(folder):
        resume = resume or True
    if not resume:
        if config is None:
            raise ValueError("config: got None; accepted: a RunConfig or its sections; None only when resuming")
        new = config if isinstance(config, RunConfig) else run_from(config, where, world)
        return Start(settled(new), folder, None)
    home, given = locate(folder if resume is True else Path(resume))
    if out and home.resolve() != folder.resolve():
        raise ValueError(f"out: got {folder}; accepted: the run's folder, {home}, when resuming")
    checkpoint = checkpoint_of(home, given, check=world == 1)
    own, state = _own_run(home, checkpoint)
    return Start(resumed(own, content), home, (checkpoint, state))


def _own_run(folder: Path, checkpoint: Path) -> tuple[RunConfig, RunState]:
    """The configuration and the state of the run in `folder`. run.json may differ from the checkpoint's configuration in keys
    that a resumed run may change."""
    try:
        state = read_state(checkpoint)
        saved = run_from(upgraded(state["run"]), f"{checkpoint}/manifest.json")
    except ValueError as error:
        reason = error.reason if isinstance(error, DamagedCheckpoint) else f"manifest.json: run: {error}"
        raise DamagedCheckpoint(checkpoint, reason, latest_good(checkpoint.parent, before=checkpoint)) from error
    file = folder / "run.json"
    if not file.exists():
        return saved, state
    try:
        content = parse_json(decoded(file), "configuration")
        if not isinstance(content, Mapping):
            raise ValueError(f"got {shown(content)}; accepted: the sections model, train and data")
        return resumed(saved, run_from(upgraded(dict(content)), "configuration").plain()), state
    except ValueError as error:
        raise ValueError(f"{file}: {error}; without this file, the checkpoint's own configuration is used") from error
