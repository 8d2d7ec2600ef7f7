"""How a training run begins: new or resumed, of one process or of all ranks. loop.py is the run itself.

Every check comes before the first write into the run's folder (`folder.py`). Launched by torchrun, the run is that of all
ranks: data is prepared by rank 0 first. A lost rank ends the process at once and never in a save, for the others would wait
in it.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..data.documents import default_text
from ..data.prepare import prepare
from ..data.tokenizer import Tokenizer
from ..data.tokens import TokenFile
from ..dist.mesh import Mesh, RankLost
from ..engine.engine import Engine
from ..engine.machine import check_device, check_platform
from ..engine.parallel import BUCKET_BYTES, Shard, check_accumulation, check_agreed, check_ranks, digest
from ..pretrained.weights import open_weights
from .checkpoint import read_state
from .config import RunConfig, resumed
from .folder import check_shared, checkpoint_of, claimed, forget, holds_a_run, locate, own_data, own_run
from .loop import Ranks, Run, RunResult, Show
from .signals import end_on_signals


def _unseen(_event: str, _numbers: dict[str, Any]) -> None:
    """Nobody watches."""


def train(
    run: RunConfig | None,
    folder: Path,
    *,
    resume: Path | bool = False,
    show: Show = _unseen,
    shard: Shard = "optimizer",
    bucket_bytes: int = BUCKET_BYTES,
    context: int = 1,
    timeout_s: float = 600.0,
) -> RunResult:
    """Train in `folder`. `resume`: True goes on from the newest checkpoint there, a path from that one. A resumed run is
    the folder's own, with its own tokens: of `run` only what is in `MAY_CHANGE` may differ, and None changes nothing.
    `shard`, `bucket_bytes`, `context` and `timeout_s`, how long a collective waits for a rank, are of several ranks. Ranks that
    torchrun has restarted resume by themselves."""
    check_platform()
    given: Path | None = None
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun, with the arguments of the start
    resume = resume or (restarted and holds_a_run(folder))
    if resume:
        home, given = locate(resume) if isinstance(resume, Path) else (folder, None)
        if home.resolve() != folder.resolve():
            raise ValueError(f"resume: got {resume}; accepted: {folder}, or a checkpoint in it")
        own = own_run(folder, given)  # a folder without a checkpoint is not claimed, for that would make it
    elif run is None:
        raise ValueError("run: got None; accepted: a RunConfig, or None when resuming")
    asked: RunConfig = run if run is not None else own
    t, world = asked.train, int(os.environ.get("WORLD_SIZE", "1"))
    check_ranks(asked.model, t.seq_len, t.linear, world=world, shard=shard, context=context)
    if not resume:  # any number of ranks goes on: those that are too many have no micro-batch, and the start says so
        check_accumulation(t.gradient_accumulation, world, context)
    check_device(t.device)
    mesh = Mesh(t.device, timeout_s)
    ranks = Ranks(mesh, shard, bucket_bytes, context)
    show = show if mesh.rank == 0 else _unseen
    with end_on_signals(), mesh.watch(), ExitStack() as until_the_end:
        try:
            _claim(folder, mesh, until_the_end, new=not resume)
            if resume:
                checkpoint = checkpoint_of(folder, given, check=mesh.world == 1)
                result = _resumed(run, folder, checkpoint, show, ranks).go()
            else:
                result = _new(asked, folder, show, ranks).go()
        except RankLost as error:
            print(f"tilegrad: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # nothing here may wait for the rank that is lost
    mesh.close()
    return result


def _claim(folder: Path, mesh: Mesh, until_the_end: ExitStack, *, new: bool) -> None:
    """`claimed` by rank 0, and seen by all. Where it is refused, it is refused on all of them."""
    token, refusal = "", ""
    if mesh.rank == 0:
        try:
            token = until_the_end.enter_context(claimed(folder, new=new))
        except ValueError as error:
            refusal = str(error)
    refusal = mesh.gather(refusal)[0]
    if refusal:
        raise ValueError(refusal)
    if mesh.world > 1:
        mesh.at("looking for the run's folder")
        check_shared(folder, token, mesh)


def _new(run: RunConfig, folder: Path, show: Show, ranks: Ranks) -> Run:
    """A run that has not begun. What was written for it goes again where it is refused."""
    data, mesh = folder / "data", ranks.mesh
    files = [Path(name) for name in run.data.files] or [default_text()]
    existed = data.exists()
    found: dict[str, Any] = {}

    def tell(event: str, numbers: dict[str, Any]) -> None:
        if event == "data":
            found.update(numbers)  # told when the run has begun, which a closed output then stops
        else:
            show(event, numbers)

    def prepared() -> tuple[TokenFile, Tokenizer]:
        return prepare(
            files, data, tokenizer=run.data.tokenizer, vocab_size=run.data.vocab_size, text_field=run.data.text_field,
            show=tell,
        )  # fmt: skip

    try:
        mesh.at("preparing data")
        tokens, tokenizer = mesh.first(prepared)
        if len(tokens.tokens) <= run.train.seq_len:
            raise ValueError(
                f"{', '.join(map(str, files))}: got {len(tokens.tokens)} tokens; accepted: at least seq_len + 1 = "
                f"{run.train.seq_len + 1}; give more text, or a smaller seq_len"
            )
        if tokens.vocab_size > run.model.vocab_size:
            raise ValueError(
                f"vocab_size: got {run.model.vocab_size}; accepted: at least the tokenizer's, {tokens.vocab_size}"
            )
        session = Run(run, folder, tokens, tokenizer, show, ranks)
        if mesh.rank == 0:
            forget(folder)
        if run.train.init is not None:
            _begin_with(Path(run.train.init), session.engine, folder, mesh)
        session.found = found
        return session
    except BaseException:
        if not existed and mesh.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def _begin_with(weights: Path, engine: Engine, folder: Path, mesh: Mesh) -> None:
    source = open_weights(weights)
    if mesh.world == 1:
        source.begin(engine.params, folder / "origin")
        return
    values = source.read()
    check_agreed(mesh, {"init": digest(values.values())})
    for name, value in values.items():
        engine.write_param(name, value)
    if mesh.rank == 0:
        source.keep_origin(folder / "origin")


def _resumed(run: RunConfig | None, folder: Path, checkpoint: Path, show: Show, ranks: Ranks) -> Run:
    """The folder's run, as it was at the checkpoint. Nothing is written."""
    own, state = own_run(folder, checkpoint), read_state(checkpoint)
    run = own if run is None else resumed(own, run.plain())
    if run.train.steps < state["engine"]["steps"]:
        raise ValueError(f"steps: got {run.train.steps}; accepted: at least {state['engine']['steps']}, which are done")
    session = Run(run, folder, *own_data(folder, state), show, ranks)
    session.restore(checkpoint)
    return session
