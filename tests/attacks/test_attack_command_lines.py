"""Attacks by command lines that are drawn from the parser itself, with right and broken values, on real and damaged texts, runs
and weights. Each line ends with an exit code, and with a sentence if the code is not 0. Existing files do not change."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import random
import re
import shutil
import signal
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tilegrad.bench import memory as bench_memory
from tilegrad.cli import build_parser, main
from tilegrad.cli.arguments import Parser
from tilegrad.cli.doctor import EXTRAS
from tilegrad.engine import gradcheck
from tilegrad.text.spelling import dtype_name
from tilegrad.training import loop
from tilegrad.training.keys import flag_value, keys

TOML = """[model]
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
[train]
steps = 2
batch_size = 2
eval_batches = 1
sample_tokens = 4
[data]
files = ["text.txt"]
"""
SMALL = (
    "--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16", "--batch-size", "2",
)  # fmt: skip
TRAINED = (*SMALL, "--steps", "2", "--train.eval_batches", "1", "--train.sample_tokens", "4", "--data", "text.txt")
ALWAYS: dict[str, tuple[str, ...]] = {  # flags that keep a command small; the drawn flags come after them and override them
    "train": (*TRAINED, "--out", "new"),
    "plan": SMALL,
    "generate": ("--max-tokens", "3"),
    "chat": ("--once", "the", "--max-tokens", "3"),
    "bench attention": ("--shape", "1,1,8,8", "--repeats", "2", "--dtype", "float32"),
    "bench host": ("--repeats", "2", "--dtype", "float32"),
    "bench generate": ("--preset", "tiny", "--max-tokens", "3", "--repeats", "2", "--no-peers"),
}  # fmt: skip
OFTEN = {
    "train": 8,
    "generate": 6,
    "plan": 4,
    "export": 4,
    "import": 4,
    "evaluate": 3,
    "chat": 2,
}  # how many times as often as another command
NEVER = {"demo"}  # demo takes no argument and trains for a minute
ENDLESS = {
    "repeats",
    "max_tokens",
    "num_samples",
    "train.steps",
}  # a large number is accepted, and runs for that long
LARGE = "99999999999999999999"
LIMIT_S = 60.0
UNSAFE = {"--build", "--tune", "--help"}  # --build and --tune compile and write into the package

VALID: dict[str, tuple[str, ...]] = {  # valid values of a key or an argument, besides its default
    "model.preset": ("tiny",), "model.vocab_size": ("256", "300"), "model.block_size": ("16", "24"),
    "model.n_layer": ("1", "2"),
    "model.n_head": ("1", "2", "4"), "model.n_embd": ("16", "32"), "model.n_kv_head": ("1", "2", "none"),
    "model.ffn_dim": ("24", "none"), "model.activation": ("gelu", "tanh", "relu", "relu2", "swiglu"),
    "model.norm": ("rmsnorm", "layernorm"), "model.position": ("rope", "learned"), "model.bias": ("true", "false"),
    "model.tie_embeddings": ("true", "false"),
    "model.projection": ("dense", "per_head"), "model.loss": ("cross_entropy", "embedding_mse"), "model.window": ("3", "none"),
    "model.dropout": ("0.1", "0"), "model.head_size": ("8", "none"), "model.qk_norm": ("true", "false"),
    "model.logit_softcap": ("none", "20"), "model.residual_scalars": ("true", "false"), "model.value_embeddings": ("1", "0"),
    "model.embedding_scale": ("50", "1"),
    "model.window_layers": ("none", "[0]"), "model.rope_scaling": ("none", '{kind = "linear", factor = 2.0}'),
    "train.steps": ("1", "2", "3"), "train.batch_size": ("1", "3"), "train.seq_len": ("0", "8"),
    "train.warmup_steps": ("-1", "0"), "train.gradient_accumulation": ("1", "2"), "train.learning_rate": ("1e-3", "0"),
    "train.min_learning_rate": ("0", "1e-4"),
    "train.eval_interval": ("0", "1"), "train.eval_batches": ("0", "1"), "train.checkpoint_interval": ("0", "1"),
    "train.keep_checkpoints": ("1", "2"), "train.log_interval": ("1",), "train.sample_tokens": ("0", "3"),
    "train.memory_budget": ("none", "1GB", "30MiB"), "train.device": ("cpu",), "train.linear": ("plain",),
    "train.dtype": ("auto", "fp32", "float64", "bf16"), "train.seed": ("0", "7"), "train.init": ("none", "weights"),
    "data.files": ("text.txt", "lines.jsonl", "text.txt.gz", "texts"), "data.tokenizer": ("bytes", "weights/tokenizer.json"),
    "data.bpe_vocab_size": ("256",), "data.validation": ("windows", "end"), "data.validation_fraction": ("0", "0.3"),
    "config": ("run.toml",), "file": ("new.toml",), "html": ("page.html",), "json": (), "world_size": ("1", "2"),
    "shard": ("none", "optimizer"), "bucket_mb": ("1", "0.5"), "context": ("1",), "timeout": ("5",), "resume": ("run", "bpe"),
    "run_folder": ("run", "bpe", "weights", "run/best/000001-step-2"), "text": ("the", "é"), "prompt": ("fox",),
    "max_tokens": ("1", "4"), "temperature": ("0", "0.7", "1e-300"), "top_k": ("1", "5", "999"), "seed": ("0", "3"),
    "source": ("weights", "weights/model.safetensors", "some/model"), "data": ("text.txt", "lines.jsonl"), "system": ("Hi",),
    "once": ("fox",), "prompt_file": ("text.txt", "lines.jsonl"), "num_samples": ("1", "2"), "stop": ("e", "é"),
    "top_p": ("0.5", "1"), "min_p": ("0", "0.2"), "repetition_penalty": ("1", "1.2"),
    "batch_size": ("1", "4"), "seq_len": ("8", "16"), "train.log": ("none", "auto"),
    "out": ("new", "deep/new"), "max_shard_size": ("1KB", "5GB"),
    "kernel": ("tiled", "native"), "device": ("cpu",), "dtype": ("float32", "fp32"), "kernels": ("tiled",),
    "peers": ("sdpa",), "repeats": ("2",), "shapes": ("1,1,8,8", "1,2,9,8,causal"),
}  # fmt: skip
RUNS = (
    "run-cut",
    "run-flipped",
    "run-false",
    "run-bare",
    "folder",
    "notes.txt",
    "nope",
    "run/checkpoints",
    "weights-cut",
)
WEIGHTS = ("weights-cut", "weights-null", "weights-list", "weights-huge", "run", "folder", "notes.txt", "nope")
THERE = (
    "notes.txt",
    "text.txt",
    "folder",
    "run",
    "weights",
    ".",
    "dangling",
    "notes.txt/new",
    "/dev/null/new",
)  # existing paths, as the output of a command
DAMAGED: dict[str, tuple[str, ...]] = {  # damaged values of an argument that names a file
    "run_folder": RUNS, "resume": RUNS, "source": WEIGHTS, "train.init": WEIGHTS, "out": THERE, "html": THERE, "file": THERE,
    "data": ("empty.txt", "binary.txt", "bad.jsonl", "folder", "run"),
    "data.files": ("empty.txt", "binary.txt", "latin.txt", "cut.txt.gz", "bad.jsonl", "folder", "dangling", "run", "weights"),
    "data.tokenizer": ("bpe", "weights/config.json", "notes.txt", "run/data/tokenizer.json", "nope.json", "bad.json"),
    "config": ("bad.toml", "misspelt.toml", "text.txt", "folder", "nope.toml", "binary.txt"),
}  # fmt: skip
BROKEN = (
    "", " ", "-1", "0", "nan", "inf", "-inf", "1e400", "1e-400", "1.5", "none", "true", "é\u2028", "\x00", "x" * 300, "[]",
    "{}", "[1, 2]", "'", "2000-01-01", "0x10", "../..", "-", "--", "cuda:99", "mps", LARGE,
    "nope", "empty.txt", "folder", "/", "/dev/null", "dangling", "bad.toml", "run", "run/run.json", "weights",
)  # fmt: skip


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: texts, a configuration, two runs and their weights, and damaged copies of all."""
    folder = tmp_path_factory.mktemp("user")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "chosen_loggers", lambda _log: ())
        text = "the quick brown fox jumps over the lazy dog. " * 12
        for name, content in {"text.txt": text, "empty.txt": "", "notes.txt": "mine", "run.toml": TOML}.items():
            Path(name).write_text(content, encoding="utf-8")
        Path("bad.toml").write_text("[[[", encoding="utf-8")
        Path("bad.json").write_text('{"model": []}', encoding="utf-8")
        Path("misspelt.toml").write_text(TOML.replace("steps", "step"), encoding="utf-8")
        Path("binary.txt").write_bytes(bytes(range(256)))
        Path("latin.txt").write_bytes(text.encode() + b"\xff")
        Path("text.txt.gz").write_bytes(gzip.compress(text.encode()))
        Path("cut.txt.gz").write_bytes(gzip.compress(text.encode())[:40])
        Path("lines.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
        Path("bad.jsonl").write_text('{"text": 3}\n[\n', encoding="utf-8")
        Path("texts").mkdir()
        Path("texts/one.txt").write_text(text, encoding="utf-8")
        Path("folder").mkdir()
        Path("folder/picture.png").write_bytes(b"\x89PNG")
        Path("dangling").symlink_to("nowhere")
        assert main(["train", *TRAINED, "--out", "run"]) == 0
        assert main(["train", *TRAINED, "--out", "bpe", "--data.tokenizer", "bpe", "--data.bpe_vocab_size", "260"]) == 0
        assert main(["export", "bpe", "weights"]) == 0
        Path("weights/chat_template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
        _damage_runs()
        _damage_weights()
    return folder


def _damage_runs() -> None:
    for name in ("run-cut", "run-flipped", "run-false", "run-bare"):
        shutil.copytree("run", name)
    for place in ("checkpoints", "best"):
        (cut,) = Path("run-cut", place).glob("*/tensors.safetensors")
        cut.write_bytes(cut.read_bytes()[:-7])
        (flipped,) = Path("run-flipped", place).glob("*/tensors.safetensors")
        whole = bytearray(flipped.read_bytes())
        whole[-9] ^= 1
        flipped.write_bytes(whole)
        (manifest,) = Path("run-false", place).glob("*/manifest.json")
        manifest.write_text(manifest.read_text(encoding="utf-8").replace("16", "-1"), encoding="utf-8")
    shutil.rmtree("run-bare/data")


def _damage_weights() -> None:
    for name in ("weights-cut", "weights-null", "weights-list", "weights-huge"):
        shutil.copytree("weights", name)
    cut = Path("weights-cut/model.safetensors")
    cut.write_bytes(cut.read_bytes()[:-7])
    config = json.loads(Path("weights/config.json").read_text(encoding="utf-8"))
    for name, content in {
        "weights-null": dict.fromkeys(config), "weights-list": [config],
        "weights-huge": {k: v if isinstance(v, bool | str) or not v else 10**9 for k, v in config.items()},
    }.items():  # fmt: skip
        Path(name, "config.json").write_text(json.dumps(content), encoding="utf-8")


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, Parser]]:
    """Every command without subcommands, with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for word, command in action.choices.items():
            yield from leaves(command, f"{name} {word}".strip())
    if not below and isinstance(parser, Parser):
        yield name, parser


DEFAULTS = {f"{key.section}.{key.name}": key.default.strip('"') for key in keys()}


def values(action: argparse.Action, dice: random.Random, *, broken: bool) -> list[str]:
    """Values for the argument, as many as it takes."""
    right = [str(choice) for choice in action.choices or VALID.get(action.dest, ())]
    right += [DEFAULTS[action.dest]] if action.dest in DEFAULTS else []
    if not right:
        right = {int: ["1"], float: ["1"]}.get(action.type, ["new.out"])  # type: ignore[call-overload]
    count = dice.choice((1, 2)) if action.nargs in ("+", "*") else 1
    if not broken:
        return [dice.choice(right) for _ in range(count)]
    if action.dest in DAMAGED and dice.random() < 0.8:
        return [dice.choice(DAMAGED[action.dest])]
    if action.type in (int, float) and dice.random() < 0.7:  # a broken value that is still a number
        numbers = ["-1", "0", "1" if action.dest in ENDLESS else LARGE]
        return [dice.choice(numbers if action.type is int else [*numbers, "nan", "inf", "1e400", "1e-320"])]
    words = [dice.choice(BROKEN) for _ in range(count)]
    return ["0" if action.dest in ENDLESS and word == LARGE else word for word in words]


def draw(dice: random.Random, commands: list[tuple[str, Parser]]) -> list[str]:
    """Draw a command line: a command, its positional arguments, the flags that keep it small, and up to four other flags."""
    name, parser = dice.choices(commands, [OFTEN.get(name, 1) for name, _ in commands])[0]
    words = [*name.split()]
    flags = [a for a in parser._actions if a.option_strings and UNSAFE.isdisjoint(a.option_strings)]
    for action in parser._actions:
        if not action.option_strings and (action.nargs is None or dice.random() < 0.3):
            words += values(action, dice, broken=dice.random() < (0.5 if action.dest in DAMAGED else 0.2))
    words += ALWAYS.get(name, ())
    few = [
        a for a in flags if a.type is not flag_value
    ]  # flags that are not keys of a run, because there are many keys
    chosen = dice.sample(flags, min(len(flags), dice.randint(0, 3))) + dice.sample(
        few, min(len(few), dice.randint(0, 1))
    )
    for action in chosen:
        spelling = dice.choice(action.option_strings)
        if dice.random() < 0.03:
            spelling += "s"
        words += [spelling, *([] if action.nargs == 0 else values(action, dice, broken=dice.random() < 0.35))]
    if dice.random() < 0.02:
        words.insert(0, dice.choice(BROKEN))
    return words


class Hangs(BaseException):
    pass


@contextlib.contextmanager
def in_time(words: list[str]) -> Iterator[None]:
    def late(_number: int, _frame: object) -> None:
        raise Hangs(f"{words}: not done after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Tally:
    lines: int = 0
    reached: int = 0  # lines that argparse accepted
    done: int = 0  # lines that ended with 0
    commands: Counter[str] = field(default_factory=Counter)  # the commands of the lines that argparse accepted


def look(folder: Path) -> dict[str, bytes | str]:
    """Every path below `folder`, and its content."""
    return {
        str(path.relative_to(folder)): "link"
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else "folder"
        for path in folder.rglob("*")
    }


def attack(users: Path, here: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> Tally:
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())
    monkeypatch.setattr(gradcheck, "SAMPLES", 1)
    monkeypatch.setattr(bench_memory, "bench_memory", lambda **_options: 0)
    shutil.copytree(users, here / "user", symlinks=True)
    folder, before, tally = here / "user", look(users), Tally()
    monkeypatch.chdir(folder)
    commands = [(name, parser) for name, parser in leaves(build_parser()) if name not in NEVER]
    for seed in seeds:
        words = draw(random.Random(seed), commands)
        out, err = io.StringIO(), io.StringIO()
        reached = True
        with in_time(words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as end:
                code, reached = end.code if isinstance(end.code, int) else 1, False
        tally.lines += 1
        tally.reached += reached
        tally.done += code == 0
        tally.commands[" ".join(words[:2] if words[0] in ("bench", "check") else words[:1])] += reached
        check_end(words, code, out.getvalue(), err.getvalue(), reached=reached)
        if check_folder(words, code, err.getvalue(), before, look(folder)):
            shutil.rmtree(folder)
            shutil.copytree(users, folder, symlinks=True)
            monkeypatch.chdir(folder)
    return tally


def check_end(words: list[str], code: int, out: str, err: str, *, reached: bool) -> None:
    assert code in (0, 1, 2), (words, code, err)
    assert "Traceback" not in err + out, (words, err)
    if not reached:
        assert code == 0 or err.startswith("usage: tilegrad"), (words, err)
    elif code:
        assert err.startswith("tilegrad: ") or "FAIL" in out, (words, code, err)
    assert all(line.startswith("tilegrad: ") for line in err.rstrip("\n").split("\n") if reached and err), (words, err)


def check_folder(
    words: list[str], code: int, err: str, before: dict[str, bytes | str], after: dict[str, bytes | str]
) -> bool:
    """Existing files do not change, except those of a resumed run and a file to which a benchmark appends. A refused command
    leaves no file. Returns whether something changed."""
    changed = {path for path in before if after.get(path) != before[path]}
    if words[0] == "bench":
        changed = {path for path in changed if after.get(path, b"")[: len(before[path])] != before[path]}
    if "--resume" in words and code != 2:
        changed = {path for path in changed if path.split("/")[0] not in ("run", "bpe")}
    assert not changed, (words, code, changed, err)
    made = {path for path in after if path not in before}
    assert code != 2 or not made, (words, made, err)
    return after != before


def test_random_command_lines_end_with_a_sentence(users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = attack(users, tmp_path, range(50), monkeypatch)
    assert tally.reached >= 0.6 * tally.lines and tally.done >= 0.2 * tally.lines, tally


@pytest.mark.slow
def test_a_thousand_random_command_lines_end_with_a_sentence(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_seed: int
) -> None:
    tally = attack(users, tmp_path, range(fresh_seed, fresh_seed + 1500), monkeypatch)
    assert tally.reached >= 0.6 * tally.lines and tally.done >= 0.2 * tally.lines, tally
    missing = {name for name, _ in leaves(build_parser()) if name not in NEVER} - {*tally.commands}
    assert not missing, missing


def test_every_drawn_value_belongs_to_an_existing_argument() -> None:
    """A key or a flag that is renamed is drawn under its new name only when it is renamed here too."""
    actions = [action for _, parser in leaves(build_parser()) for action in parser._actions]
    assert {*VALID, *DAMAGED} <= {action.dest for action in actions}
    assert {action.type for action in actions if action.type} <= {int, float, Path, flag_value, dtype_name}
    assert {*ALWAYS} | NEVER <= {name for name, _ in leaves(build_parser())}


@pytest.mark.usefixtures("two_ranks_of_an_agent")
def test_a_usage_error_of_all_ranks_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["train", "--shard", "x"], ["train", "--stesp", "3"]):
        for rank in "10":
            monkeypatch.setenv("RANK", rank)
            with pytest.raises(SystemExit) as end:
                main(words)
            assert end.value.code == 2
        assert capsys.readouterr().err.count("error: ") == 1


def test_a_plot_does_not_overwrite_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.png").write_bytes(b"mine")
    assert main(["bench", "attention", *ALWAYS["bench attention"], "--plot", "mine.png"]) == 2
    assert capsys.readouterr().err == "tilegrad: mine.png: got a file that already exists; accepted: a new name\n"
    assert Path("mine.png").read_bytes() == b"mine"


def test_doctor_lists_every_extra_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name in EXTRAS}
    assert {*project["optional-dependencies"]} - {*extras} == {"test", "lint", "docs", "dev"}
    for name, packages in extras.items():
        assert [re.match(r"[\w-]+", package)[0] for package in packages] == list(EXTRAS[name][0])  # type: ignore[index]
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: {"rich": "14.1"}[name] if name == "rich" else missing()
    )
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^extra rich +rich 14\.1: a live progress bar", out, re.MULTILINE)
    assert re.search(r"^extra bpe +missing tokenizers \(pip install 'tilegrad\[bpe\]'\): BPE", out, re.MULTILINE)


def missing() -> str:
    raise PackageNotFoundError
