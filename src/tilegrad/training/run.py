"""How a training run begins: new or resumed, in one process or on all ranks. loop.py is the run itself.

Every check comes before the first write into the run's folder (`folder.py`). Under torchrun rank 0 prepares the data first. If
a rank is lost, the others end at once and save nothing, because a save would wait for the lost rank.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from ..data.documents import Numbers, Show, default_text, quiet
from ..data.tokenizer import Tokenizer
from ..data.tokens import TokenFile
from ..dist.mesh import Mesh, RankLost
from ..engine.engine import Engine
from ..engine.machine import check_device, check_platform
from ..engine.parallel import BUCKET_BYTES, Shard, check_accumulation, check_agreed, check_ranks, digest
from ..engine.state import write_param
from ..pretrained.weights import open_weights
from .config import RunConfig, Sections, check_vocab_size
from .dataset import Dataset, needs_documents, prepare_data
from .folder import check_shared, claimed, forget, own_data
from .loggers import check_installed, chosen_loggers
from .loop import Run, RunResult
from .ranks import Ranks
from .signals import end_on_signals
from .start import Start, StrPath, resolve


def train(
    config: RunConfig | Sections | None,
    out: StrPath | None,
    *,
    resume: StrPath | bool | None = None,
    where: str = "config",
    name: str | None = None,
    show: Show = quiet,
    shard: Shard = "optimizer",
    bucket_bytes: int = BUCKET_BYTES,
    context: int = 1,
    timeout_s: float = 600.0,
) -> RunResult:
    """Train in the folder `out`; `resolve` documents the first arguments. The last four are for several
    ranks; a collective waits for a rank at most `timeout_s`."""
    check_platform()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    start = resolve(config, out, resume=resume, where=where, name=name, world=world)
    t = start.config.train
    check_ranks(start.config.model, t.seq_len, t.linear, world=world, shard=shard, context=context)
    if start.saved is None:  # a run may resume with more ranks than micro-batches, and then says how many are idle
        check_accumulation(t.gradient_accumulation, world, context)
    check_device(t.device)
    check_installed(chosen_loggers(t.log))
    mesh = Mesh(t.device, timeout_s)
    ranks = Ranks(mesh, {"shard": shard, "bucket_bytes": bucket_bytes, "context": context})
    with end_on_signals(), mesh.watch(), ExitStack() as until_the_end:
        try:
            _claim(start.folder, mesh, until_the_end, new=start.saved is None)
            result = _open(start, show if mesh.rank == 0 else quiet, ranks).train()
        except RankLost as error:
            print(f"tilegrad: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # nothing here may wait for the rank that is lost
    mesh.close()
    return result


def _claim(folder: Path, mesh: Mesh, until_the_end: ExitStack, *, new: bool) -> None:
    """Rank 0 claims the folder, and all ranks must find it. A refusal is raised on all of them."""
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


def _open(start: Start, show: Show, ranks: Ranks) -> Run:
    """The run with its data, which a new run prepares. After an error, the data that it prepared is deleted."""
    folder, mesh, weights = start.folder, ranks.mesh, start.config.train.init
    existed = (folder / "data").exists()
    summary: Numbers = {}
    try:
        if start.saved is None:
            tokens, tokenizer = _prepare(start, show, mesh, summary)
        else:
            documents = needs_documents(start.config.data)
            tokens, tokenizer = own_data(folder, start.saved[1], documents=documents)
        dataset = Dataset.split(tokens, tokenizer, start.config, summary)
        start = start.with_steps(dataset.batches.rows_in)
        run = Run(start, dataset, show, ranks)
        if start.saved is None:
            if mesh.rank == 0:
                forget(folder)
            if weights is not None:
                _begin_with(Path(weights), run.engine, folder, mesh)
        return run
    except BaseException:
        if not existed and mesh.rank == 0:
            shutil.rmtree(folder / "data", ignore_errors=True)
        raise


def _prepare(start: Start, show: Show, mesh: Mesh, summary: Numbers) -> tuple[TokenFile, Tokenizer]:
    """The tokens of a new run; rank 0 prepares them first. `summary` gets the counts."""
    config, data = start.config, start.config.data

    def show_but_summary(event: str, numbers: Numbers) -> None:
        if event == "data":
            summary.update(numbers)  # shown once the run has begun, when a closed output ends it with a save
        else:
            show(event, numbers)

    def prepared() -> tuple[TokenFile, Tokenizer]:
        return prepare_data(config, start.folder / "data", show_but_summary)

    mesh.at("preparing data")
    tokens, tokenizer = mesh.first(prepared)
    if not needs_documents(data) and len(tokens.tokens) <= config.train.seq_len:
        raise ValueError(
            f"{', '.join(data.files) or default_text()}: got {len(tokens.tokens)} tokens; accepted: at least seq_len + 1 = "
            f"{config.train.seq_len + 1}; give more text, or a smaller seq_len"
        )
    check_vocab_size(config, tokens.vocab_size)
    return tokens, tokenizer


def _begin_with(weights: Path, engine: Engine, folder: Path, mesh: Mesh) -> None:
    source = open_weights(weights)
    if mesh.world == 1:
        source.load(engine.params)
    else:
        values = source.read()
        check_agreed(mesh, {"init": digest(values.values())})
        for name, value in values.items():
            write_param(engine, name, value)
    if mesh.rank == 0:
        source.keep_origin(folder / "origin")
