"""Words and turns of phrase that docs/glossary.md does not use stay out of src, tests, docs and pages of results."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
SOURCES = sorted((HERE / "src" / "tilegrad").rglob("*.py"))
PROSE = sorted(
    path
    for folder, ends in (("src", "py cpp h"), ("tests", "py cpp"), ("benchmarks", "py md"), ("docs", "py md"))
    for end in ends.split()
    for path in (HERE / folder).rglob(f"*.{end}")
    if path != Path(__file__)
) + [HERE / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hatch_build.py")]
ANYWHERE = re.compile(  # in code, docstrings and comments; -ffp-contract is the compiler's
    r"\b(walk(s|ed|ing)?|(?<!-ffp-)contracts?|rings?|crossed|limbo|carver|durabl[ey]|rowwise|weigh(s|ed)?|loaders?)\b",
    re.IGNORECASE,
)
NAMES = {"half", "sees", "lane", "lanes", "LANES"}  # fine words, but not for a variable
OF_TORCH = {"half_to_float"}  # a keyword of _softmax
NOT_USED = (HERE / "docs" / "glossary.md").read_text(encoding="utf-8").split("## Words not used")[1]

VERB = r"(?:is|are|was|were|has|have|had|does|do|would|could|can|can't|cannot|may|must|will|needs|always|never|only)"
RELATIVE = r"(?:that|which|who|whose|where|when|in|of|as)"
IN_PROSE = {  # what to say instead → the habit, in comments, strings and pages
    "another beginning": re.compile(r"""(?:^[\s"'#*|>/-]*|[.:!?|]\s+)Of\b"""),
    "next to, besides": re.compile(r"\bbeside\b", re.IGNORECASE),
    "because": re.compile(
        rf", for (?:(?:it|they|we|you|there|nothing|nobody)\b|(?:(?!{RELATIVE}\b)[^\s,.;:]+ ){{1,6}}?{VERB}\b)"
    ),
    "again": re.compile(r"\banew\b", re.IGNORECASE),
    "so, therefore": re.compile(r"\bhence\b", re.IGNORECASE),
    "continues, resumes": re.compile(r"\bgo(?:es)? on\b"),
    "is, has the address": re.compile(r"\blies\b"),
    "is": re.compile(r"\bstands\b"),
    "got, given": re.compile(r"\btold\b"),
}
IN_RESULTS = {
    "run": re.compile(r"\bleases?\b", re.IGNORECASE),
    "goal": re.compile(r"\bbars?\b|\basked was\b", re.IGNORECASE),
}
CODE_IN_PAGES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAME_IN_PROSE = re.compile(r"`[^`\n]*`")

# Files that still have some, and how many at most. Numbers only get smaller, and a file that is not here has none.
STILL: dict[str, int] = {
    "CHANGELOG.md": 6,
    "benchmarks/breakdown.py": 4,
    "benchmarks/contenders.py": 3,
    "benchmarks/dilated.py": 1,
    "benchmarks/loss_curves.py": 1,
    "benchmarks/ops.py": 1,
    "benchmarks/peer.py": 1,
    "benchmarks/step_cost.py": 2,
    "benchmarks/training.py": 2,
    "benchmarks/tune.py": 2,
    "docs/log/hopper-backward.md": 6,
    "docs/log/hopper-forward.md": 7,
    "docs/log/host.md": 1,
    "docs/proof.md": 9,
    "src/tilegrad/bench/attention.py": 2,
    "src/tilegrad/bench/calls.py": 1,
    "src/tilegrad/bench/comparison.py": 1,
    "src/tilegrad/bench/memory.py": 1,
    "src/tilegrad/bench/roofline.py": 1,
    "src/tilegrad/cli/benches.py": 1,
    "src/tilegrad/cli/doctor.py": 1,
    "src/tilegrad/cli/faults.py": 1,
    "src/tilegrad/cli/runs.py": 6,
    "src/tilegrad/data/tokens.py": 7,
    "src/tilegrad/dist/mesh.py": 6,
    "src/tilegrad/dist/schedule.py": 4,
    "src/tilegrad/dist/units.py": 4,
    "src/tilegrad/engine/engine.py": 5,
    "src/tilegrad/engine/optimizer.py": 2,
    "src/tilegrad/engine/parallel.py": 4,
    "src/tilegrad/engine/planning.py": 1,
    "src/tilegrad/engine/recompute.py": 2,
    "src/tilegrad/functional/__init__.py": 4,
    "src/tilegrad/functional/call.py": 1,
    "src/tilegrad/functional/dilated/functional.py": 3,
    "src/tilegrad/functional/dilated/pattern.py": 1,
    "src/tilegrad/functional/dilated/reference.py": 3,
    "src/tilegrad/functional/dilated/run.py": 2,
    "src/tilegrad/functional/dispatch.py": 1,
    "src/tilegrad/functional/eager.cpp": 3,
    "src/tilegrad/functional/library.py": 1,
    "src/tilegrad/functional/scratch.py": 2,
    "src/tilegrad/integrations/transformers.py": 2,
    "src/tilegrad/kernels/activation/__init__.py": 1,
    "src/tilegrad/kernels/activation/triton_ops.py": 4,
    "src/tilegrad/kernels/adamw/__init__.py": 1,
    "src/tilegrad/kernels/attention/__init__.py": 1,
    "src/tilegrad/kernels/attention/api.py": 5,
    "src/tilegrad/kernels/attention/bounds.py": 1,
    "src/tilegrad/kernels/attention/checks.py": 2,
    "src/tilegrad/kernels/attention/context.py": 1,
    "src/tilegrad/kernels/attention/hopper/backward_mma.py": 2,
    "src/tilegrad/kernels/attention/hopper/backward_scheduler.py": 1,
    "src/tilegrad/kernels/attention/hopper/backward_store_dq.py": 1,
    "src/tilegrad/kernels/attention/hopper/forward.py": 3,
    "src/tilegrad/kernels/attention/hopper/forward_scheduler.py": 1,
    "src/tilegrad/kernels/attention/hopper/launch.py": 1,
    "src/tilegrad/kernels/attention/hopper/launch_backward.py": 2,
    "src/tilegrad/kernels/attention/hopper/launch_forward.py": 3,
    "src/tilegrad/kernels/attention/hopper/pieces.py": 1,
    "src/tilegrad/kernels/attention/hopper/pipeline.py": 2,
    "src/tilegrad/kernels/attention/hopper/tma.py": 1,
    "src/tilegrad/kernels/attention/mask.py": 3,
    "src/tilegrad/kernels/attention/problem.py": 4,
    "src/tilegrad/kernels/attention/qkv.py": 2,
    "src/tilegrad/kernels/attention/reference.py": 1,
    "src/tilegrad/kernels/attention/tiled.py": 1,
    "src/tilegrad/kernels/attention/triton/arguments.py": 3,
    "src/tilegrad/kernels/attention/triton/fit.py": 1,
    "src/tilegrad/kernels/attention/triton/forward.py": 1,
    "src/tilegrad/kernels/closeness.py": 2,
    "src/tilegrad/kernels/cpu/csrc/attention/amx_backward.h": 5,
    "src/tilegrad/kernels/cpu/csrc/attention/amx_forward.h": 1,
    "src/tilegrad/kernels/cpu/csrc/attention/backward.h": 1,
    "src/tilegrad/kernels/cpu/csrc/attention/bias.h": 1,
    "src/tilegrad/kernels/cpu/csrc/attention/forward.h": 1,
    "src/tilegrad/kernels/cpu/csrc/simd/vector.h": 1,
    "src/tilegrad/kernels/cpu/csrc/threads/thread_pool.cpp": 1,
    "src/tilegrad/kernels/cpu/library.py": 1,
    "src/tilegrad/kernels/cross_entropy/chunks.py": 1,
    "src/tilegrad/kernels/cross_entropy/triton_ops.py": 3,
    "src/tilegrad/kernels/cuda_launch.py": 2,
    "src/tilegrad/kernels/dropout/triton_ops.py": 1,
    "src/tilegrad/kernels/global_norm/__init__.py": 1,
    "src/tilegrad/kernels/gpu.py": 1,
    "src/tilegrad/kernels/linear/__init__.py": 2,
    "src/tilegrad/kernels/linear/cpu.py": 1,
    "src/tilegrad/kernels/norm/__init__.py": 2,
    "src/tilegrad/kernels/norm/triton_ops.py": 1,
    "src/tilegrad/kernels/op.py": 1,
    "src/tilegrad/kernels/philox.py": 1,
    "src/tilegrad/kernels/residual.py": 1,
    "src/tilegrad/kernels/scratch.py": 2,
    "src/tilegrad/memory/managed/hit.cpp": 2,
    "src/tilegrad/memory/managed/pattern.py": 1,
    "src/tilegrad/memory/planned/arena.py": 2,
    "src/tilegrad/memory/planned/plan.py": 1,
    "src/tilegrad/memory/planned/report.py": 4,
    "src/tilegrad/memory/planned/trace.py": 3,
    "src/tilegrad/model/feedforward.py": 1,
    "src/tilegrad/model/generate.py": 5,
    "src/tilegrad/model/layer.py": 4,
    "src/tilegrad/model/linear.py": 1,
    "src/tilegrad/model/norm.py": 1,
    "src/tilegrad/model/transformer.py": 1,
    "src/tilegrad/native/build.py": 1,
    "src/tilegrad/native/extension.py": 1,
    "src/tilegrad/nn/attention.py": 1,
    "src/tilegrad/pretrained/weights.py": 2,
    "src/tilegrad/specification/shared_attention.py": 1,
    "src/tilegrad/specification/workspace.py": 1,
    "src/tilegrad/text/untrusted.py": 1,
    "src/tilegrad/training/api.py": 3,
    "src/tilegrad/training/checkpoint.py": 3,
    "src/tilegrad/training/config.py": 5,
    "src/tilegrad/training/folder.py": 6,
    "src/tilegrad/training/keys.py": 1,
    "src/tilegrad/training/log.py": 2,
    "src/tilegrad/training/loop.py": 5,
    "src/tilegrad/training/report.py": 2,
    "src/tilegrad/training/resident.py": 9,
    "src/tilegrad/training/run.py": 4,
    "tests/attacks/test_attack_command_lines.py": 4,
    "tests/attacks/test_attack_files.py": 1,
    "tests/attacks/test_attack_interrupts.py": 1,
    "tests/attacks/test_attack_kernels.py": 1,
    "tests/attacks/test_attack_memory.py": 1,
    "tests/attacks/test_attack_weights.py": 2,
    "tests/attention/test_bounds.py": 1,
    "tests/attention/test_checks.py": 1,
    "tests/attention/test_cuda_launch.py": 1,
    "tests/attention/test_dilated.py": 1,
    "tests/attention/test_dilated_modules.py": 1,
    "tests/attention/test_eager.py": 1,
    "tests/attention/test_gluon_emulator.py": 3,
    "tests/attention/test_hopper_bwd.py": 2,
    "tests/attention/test_hopper_compile.py": 2,
    "tests/attention/test_tiled.py": 1,
    "tests/attention/test_triton.py": 2,
    "tests/attention/test_triton_compile.py": 1,
    "tests/bench/test_bench_memory.py": 1,
    "tests/dist/test_mesh.py": 2,
    "tests/integrations/test_torch.py": 1,
    "tests/integrations/test_transformers.py": 1,
    "tests/memory/test_manager_interrupts.py": 3,
    "tests/memory/test_report.py": 1,
    "tests/memory/test_trace.py": 1,
    "tests/model/test_bfloat16.py": 1,
    "tests/model/test_dropout.py": 1,
    "tests/model/test_families.py": 1,
    "tests/ops/test_closeness.py": 2,
    "tests/ops/test_ops_products.py": 1,
    "tests/ops/test_ops_triton.py": 1,
    "tests/package/test_cli.py": 1,
    "tests/support/gluon/language.py": 1,
    "tests/support/gluon/schedule.py": 2,
    "tests/support/gluon/shared_memory.py": 2,
    "tests/support/gluon/tma.py": 1,
    "tests/train/test_api.py": 1,
    "tests/train/test_best.py": 2,
    "tests/train/test_engine.py": 2,
    "tests/train/test_every_key.py": 1,
    "tests/train/test_fp8.py": 1,
    "tests/train/test_interrupts.py": 7,
    "tests/train/test_limits.py": 1,
    "tests/train/test_optimizer.py": 1,
    "tests/train/test_ranks.py": 2,
    "tests/train/test_resident.py": 4,
    "tests/train/test_run_report.py": 1,
    "tests/train/test_torchrun.py": 4,
    "tests/train/test_weights.py": 1,
}


def found(text: str) -> list[str]:
    """`line: word` of each."""
    words = [(text.count("\n", 0, m.start()) + 1, m[0]) for m in ANYWHERE.finditer(text)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in OF_TORCH and NAMES & set(token.string.split("_")):
            words.append((token.start[0], token.string))
    return [f"{line}: {word}" for line, word in sorted(words)]


def prose(text: str, kind: str) -> Iterator[tuple[int, str]]:
    """The lines that people read, with their numbers: of a page those outside code, of a program comments and strings."""
    if kind == ".md":
        page = CODE_IN_PAGES.sub(lambda code: "\n" * code[0].count("\n"), text.split("## Words not used")[0])
        yield from enumerate(page.split("\n"), 1)
    elif kind == ".py":
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in kinds:
                yield from enumerate(token.string.split("\n"), token.start[0])
    else:
        for number, line in enumerate(text.split("\n"), 1):
            yield number, line.partition("//")[2]


def habits(text: str, kind: str, *, results: bool = False) -> list[str]:
    """`line: what was found; say …` of each."""
    patterns = IN_PROSE | (IN_RESULTS if results else {})
    return [
        f"{number}: {match[0].strip()!r}; say: {instead}"
        for number, line in prose(text, kind)
        for instead, pattern in patterns.items()
        for match in pattern.finditer(NAME_IN_PROSE.sub("`", line))
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(HERE / "src" / "tilegrad")))
def test_words_not_used(path: Path) -> None:
    assert not found(path.read_text(encoding="utf-8"))


def test_habits_of_prose() -> None:
    """One test for all files: there are 500, and each takes milliseconds."""
    wrong = {}
    for path in PROSE:
        name = str(path.relative_to(HERE))
        results = path.parent.name == "benchmarks" and path.suffix == ".md"
        there = habits(path.read_text(encoding="utf-8"), path.suffix, results=results)
        if len(there) > STILL.get(name, 0):
            wrong[name] = there
    assert not wrong


@pytest.mark.parametrize(
    "word", ["walk", "contract", "ring", "crossed", "limbo", "carver", "rowwise", "weigh", "loader", "durable"]
)
def test_the_glossary_says_so(word: str) -> None:
    assert ANYWHERE.fullmatch(word) and re.search(rf"\b{word}\b", NOT_USED)


@pytest.mark.parametrize(
    "text", ["walks = 1\n", '"""A Ring of stages."""\n', "x = 1  # its contract\n", "_MAX_LANES = 2\n"]
)
def test_canary_a_word_is_found(text: str) -> None:
    assert len(found(text)) == 1


def test_other_meanings_are_left() -> None:
    assert not found('x = "-ffp-contract=fast"  # half of it, each in turn, as the table sees it: string\n')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (".py", '"""Of one rank nothing is sent."""\n'),
        (".py", "x = 1  # it rounds. Of float64 the oracle rounds too\n"),
        (".md", "| a | Of each op |\n"),
        (".md", "Kept, for it is\nread again.\n"),
        (".md", "It has none, for the factor is in both.\n"),
        (".py", '"""What lies there is made\nagain."""\n'),
        (".cpp", "int x;  // drawn anew\n"),
        (".py", "raise ValueError(f'{x}: what is told')\n"),
        (".md", "beside\n"),
    ],
)
def test_canary_a_habit_is_found(kind: str, text: str) -> None:
    assert len(habits(text, kind)) == 1


def test_canary_results_speak_to_readers() -> None:
    assert len(habits("In one lease, 1.05 (bar 1.02).\n", ".md", results=True)) == 2


def test_what_is_no_habit_is_left() -> None:
    assert not habits("told = [x for x in y, for z]  # of it, for comparisons, and beneath\n", ".py")
    assert not habits("Kept, for example, for text whose order is time; `beside`.\n```\nbeside\n```\n", ".md")
    assert not habits("int beside, told;  // next to it\n", ".cpp")
