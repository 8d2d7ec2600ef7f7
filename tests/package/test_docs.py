"""The documentation's site builds without broken links, needs no other site, and has every public name."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import tilegrad
import tilegrad.memory
from tilegrad.training.sections import run_from

HERE = Path(__file__).parents[2]
PAGES = sorted((HERE / "docs").rglob("*.md"))
PROSE = [page for page in PAGES if page.parent.name != "log"]  # the rows of logs may be longer
LONGEST = 132  # columns of a line of prose
FILES_THAT_COUNT = 5  # the least number of test files whose counts are on the page of proof

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed (pip install 'tilegrad[docs]')",
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without its search index, without the sources below docstrings, and without the colours of code and the layout
    of signatures. These take three quarters of the time and have no links."""
    root = tmp_path_factory.mktemp("root")
    for name in ("docs", "src"):
        (root / name).symlink_to(HERE / name)
    config = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    for line, other in (
        ("  - search\n", ""),
        ("show_source: true\n", "show_source: false\n"),
        ("separate_signature: true\n", "separate_signature: false\n"),
        ("anchor_linenums: false }\n", "use_pygments: false }\n"),
    ):
        assert config.count(line) == 1
        config = config.replace(line, other)
    (root / "mkdocs.yml").write_text(config, encoding="utf-8")
    done = build(root, root / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "site"


@needs_mkdocs
def test_the_site_builds_strictly_and_needs_nothing_from_outside(site: Path) -> None:
    html = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(html) >= len(PAGES)
    fetched = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\s\">]*")
    outside = {str(page.relative_to(site)): found for page, text in html.items() if (found := fetched.findall(text))}
    assert not outside
    styles = "".join(style.read_text(encoding="utf-8") for style in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles)


@needs_mkdocs
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = set(
        re.findall(
            r"id=\"(tilegrad[\w.]*)\"", "".join(p.read_text(encoding="utf-8") for p in (site / "api").glob("*.html"))
        )
    )
    assert not {f"tilegrad.{name}" for name in tilegrad.__all__} - anchors
    assert {f"tilegrad.Engine.{name}" for name in ("params", "grads", "plan", "loss", "submit", "finished")} <= anchors
    ends = {anchor.rsplit(".", 1)[-1] for anchor in anchors if anchor.startswith("tilegrad.memory.")}
    assert not set(tilegrad.memory.__all__) - ends


@needs_mkdocs
def test_canary_only_broken_links_fail(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("site.css", "site.py"):
        shutil.copy(HERE / "docs" / name, tmp_path / "docs")
    config = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("nav:")], encoding="utf-8")
    links = "[back](index.md#a-page) [away](missing.md) [away](index.md#absent)"
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{links}\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "Aborted with 2 warnings in strict mode" in said, said
    assert "'missing.md'" in said and "'index.md#absent'" in said, said


def test_every_figure_is_used_and_needs_no_other_file() -> None:
    figures = sorted((HERE / "docs").rglob("*.svg"))
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert figures
    for figure in figures:
        text = figure.read_text(encoding="utf-8")
        names = {element.tag.rsplit("}", 1)[-1] for element in ElementTree.fromstring(text).iter()}
        assert {"title", "desc"} <= names and not {"script", "image", "foreignObject"} & names, figure.name
        assert "prefers-color-scheme: dark" in text, figure.name
        assert f"figures/{figure.name})" in pages, figure.name


def test_a_recorded_terminal_shows_its_final_state(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    code = r"print('\r\x1b[2Kearlier\r\x1b[2K\x1b[32mlater\x1b[0m'); [print(f'line{n}') for n in range(60)]"
    command = [sys.executable, str(HERE / "docs" / "terminal.py"), str(tmp_path / "t.svg"), sys.executable, "-c", code]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    text = (tmp_path / "t.svg").read_text(encoding="utf-8")
    names = {element.tag.rsplit("}", 1)[-1] for element in ElementTree.fromstring(text).iter()}
    assert {"title", "desc"} <= names and "url(http" not in text and "prefers-color-scheme: dark" in text
    assert ">later<" in text and ">earlier<" not in text
    assert ">line0<" in text and ">line59<" in text and ">line30<" not in text and "23&#160;more&#160;lines" in text


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(HERE / "docs")))
def test_lines_of_prose_fit_a_window(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > LONGEST and not line.startswith("|")]
    assert not long


def asserted_in(file: Path) -> dict[str, object]:
    """Name → value of the constants of a test file that its assertions or parameters use."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    named = {
        name.id
        for node in ast.walk(module)
        if isinstance(node, ast.Assert)
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    found: dict[str, object] = {}
    for node in module.body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name) and name.id in named:
                    with contextlib.suppress(ValueError):
                        found[name.id] = ast.literal_eval(value)
    return found


def test_every_count_on_the_page_of_proof_is_one_that_a_test_asserts() -> None:
    page = (HERE / "docs" / "proof.md").read_text(encoding="utf-8")
    section = page.partition("## What the tests reach")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(tests/[\w/]+\.py)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) >= FILES_THAT_COUNT
    for name, cell in rows:
        known = asserted_in(HERE / name)
        counts = re.findall(r"(\d[\d,]*) [^`|]*?\(`(\w+)(?:\[(\w+)\])?`\)", cell)
        assert counts, name
        for number, constant, key in counts:
            value = known[constant]
            value = value[key] if isinstance(value, dict) else value
            assert int(number.replace(",", "")) == value, f"{name}: {constant} {key}"


def test_the_runs_of_the_training_page_are_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (HERE / "docs" / "training.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        run = run_from(tomllib.loads(block), "training.md")
        assert run.train.warmup_steps < run.train.steps


def test_each_tutorial_has_its_notebook() -> None:
    spec = importlib.util.spec_from_file_location("notebooks", HERE / "docs" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebooks)
    pages = sorted((HERE / "docs" / "tutorials").glob("*.md"))
    assert len(pages) == 2
    for page in pages:
        made = notebooks.notebook(page.read_text(encoding="utf-8"))
        assert page.with_suffix(".ipynb").read_text(encoding="utf-8") == made, "run: python docs/notebooks.py"
