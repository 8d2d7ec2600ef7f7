"""`benchmarks.five_minutes` on a CPU: the text of small wheels, a few steps of small models, the table and the picture."""

from __future__ import annotations

import json
import runpy
import sys
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.forked import CONTEXT

from benchmarks.five_minutes import __main__ as five_minutes
from benchmarks.five_minutes import data as text
from benchmarks.five_minutes import training
from benchmarks.five_minutes.__main__ import main, rates_of
from benchmarks.five_minutes.contenders import CONTENDERS, SIZES
from benchmarks.five_minutes.nanochat import NanochatModel, muon_directions
from benchmarks.five_minutes.report import check_comparable, read_runs, report, seconds_to, to_json
from benchmarks.five_minutes.training import STRETCH, Point, Run, Settings, next_steps, rate_at, train
from benchmarks.peer import initial_parameters
from tilegrad.model import reference
from tilegrad.text.atomic import sha256_of

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
HERE = Path(__file__).parents[2]
ON_CPU = [name for name, chosen in CONTENDERS.items() if not chosen.needs_gpu]


def write_wheel(path: Path, files: Mapping[str, str | bytes]) -> text.Wheel:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    name, version, _ = path.name.split("-", 2)
    return text.Wheel(name, version, sha256_of(path))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("five")
    words = np.random.default_rng(0).integers(0, 50, (300, 60))
    files = {f"m{i}.py": " ".join(f"word{n}" for n in row) for i, row in enumerate(words)}
    write_wheel(folder / "small-1.0-py3-none-any.whl", files)
    text.make(folder, [folder / "small-1.0-py3-none-any.whl"], "0" * 64, vocab_size=300, sampled=1)
    return folder


def settings(made: Path, name: str, **given: object) -> Settings:
    few = {"steps": 6, "size": "tiny", "device": "cpu", "evaluations": 2, "eval_tokens": 64}
    return Settings(made, name, **(few | given))  # type: ignore[arg-type]


# ── the text ──


def test_every_listed_wheel_has_a_digest() -> None:
    wheels = text.listed(text.WHEELS)
    assert len({wheel.name.lower() for wheel in wheels}) == len(wheels) > 100
    recorded = text.read_manifest(text.RECORDED)
    assert recorded.wheels == len(wheels) and recorded.wheels_sha256 == sha256_of(text.WHEELS)


def test_a_list_without_digests_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wheels.txt"
    path.write_text("small==1.0\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"wheels.txt, line 1: got 'small==1.0'; accepted: NAME==VERSION --hash"):
        text.listed(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="got no package"):
        text.listed(path)


def test_a_missing_wheel_and_one_with_a_different_digest_are_refused_by_name(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "Some_Name-1.0-py3-none-any.whl", {"a.py": "x"})
    assert text.checked([replace(wheel, name="some.name")], tmp_path)[0].name.startswith("Some_Name")
    with pytest.raises(ValueError, match=r"Some_Name-1.0-py3-none-any.whl: got SHA-256 .*; accepted: 00.*; delete"):
        text.checked([replace(wheel, sha256="0" * 64)], tmp_path)
    with pytest.raises(ValueError, match=r"got no wheel of some-name 1\.1; accepted"):
        text.checked([replace(wheel, name="some-name", version="1.1")], tmp_path)


def test_pip_fetches_the_listed_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "index"
    there.mkdir()
    info = "small-1.0.dist-info"
    files = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.0\nRequires-Python: <3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    wheel = write_wheel(there / "small-1.0-py3-none-any.whl", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(there))
    listed = tmp_path / "wheels.txt"
    listed.write_text(f"small==1.0 --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    text.fetch(listed, tmp_path / "wheels")
    assert text.checked(text.listed(listed), tmp_path / "wheels") == [
        tmp_path / "wheels" / "small-1.0-py3-none-any.whl"
    ]


def test_documents_are_the_text_files_of_usual_length_without_repeats(tmp_path: Path) -> None:
    long = "x" * text.LEAST_BYTES
    files: dict[str, str | bytes] = {
        "z.py": f"{long}z", "again.py": f"{long}z", "../out.md": f"{long}m", "a.json": long, "short.py": "x",
        "bad.py": b"\xff" * 300, "zero.py": f"{long}\0", "big.txt": "x" * (text.MOST_BYTES + 1),
        "d/METADATA": f"{long}d",
    }  # fmt: skip
    path = tmp_path / "small-1.0-py3-none-any.whl"
    write_wheel(path, files)
    assert [found for _, found in text.documents([path, path])] == [f"{long}m", f"{long}z", f"{long}d"]
    assert not (tmp_path.parent / "out.md").exists()


def test_the_same_wheels_give_the_same_tokens_and_a_file_is_in_one_split(made: Path, tmp_path: Path) -> None:
    wheel = made / "small-1.0-py3-none-any.whl"
    again = text.make(tmp_path, [wheel], "0" * 64, vocab_size=300, sampled=1)
    first = text.read_manifest(made / text.MANIFEST)
    assert not text.differences(again, first)
    assert text.differences(replace(again, wheels=2), first) == ["wheels: got 2, recorded 1"]
    assert first.train.files + first.validation.files == 300 and 0 < first.validation.files < 15
    data = text.open_data(made)
    assert int(data.token_bytes[data.validation].sum()) == first.validation.bytes
    assert "validation" in text.report(first)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    text.check_folder(tmp_path)
    text.check_folder(tmp_path / "new")
    (tmp_path / "tokenizer.json").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"folder: got .*, which has tokenizer.json; accepted: an empty or new folder"):
        text.main([str(tmp_path), "--no-fetch"])
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == "mine"


def test_wrong_bytes_of_tokens_are_refused_by_name(made: Path, tmp_path: Path) -> None:
    for path in made.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    np.save(tmp_path / text.TOKEN_BYTES, np.load(made / text.TOKEN_BYTES, allow_pickle=False) + 1)
    with pytest.raises(ValueError, match=r"token_bytes.npy: got \d+ bytes of validation text; accepted: \d+"):
        text.open_data(tmp_path)


def test_a_folder_without_text_and_damaged_tokens_are_refused_by_name(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data: got .*nowhere, which has no manifest.json; accepted: a folder that"):
        text.open_data(tmp_path / "nowhere")
    text.make(tmp_path, [made / "small-1.0-py3-none-any.whl"], "0" * 64, vocab_size=300, sampled=1)
    tokens = tmp_path / "train.bin"
    content = bytearray(tokens.read_bytes())
    content[-2] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(ValueError, match=r"train.bin: got tokens of SHA-256 .*; accepted: .*manifest"):
        text.open_data(tmp_path)


# ── training ──


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Runs torch with one thread, because small ops on busy cores would wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ON_CPU)
def test_every_contender_learns_and_repeats_to_the_same_bits(
    made: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "STRETCH", 4)
    first, again = (train(settings(made, name)) for _ in range(2))
    assert [point.steps for point in first.curve] == [0, 4, 6] and first.steps == 6
    assert first.curve[-1].bits_per_byte < first.curve[0].bits_per_byte
    assert first.weights_sha256 == again.weights_sha256
    assert [a.bits_per_byte for a in first.curve] == [b.bits_per_byte for b in again.curve]
    assert train(settings(made, name, seed=1, steps=1)).weights_sha256 != first.weights_sha256
    assert first.tokens == 6 * 4 * 16 and first.peak_bytes > 0


def test_a_run_ends_at_its_time(made: Path) -> None:
    of_ten = settings(made, "adamw", steps=None, seconds=10.0)
    counts = [
        next_steps(of_ten, clock, 99, step_s) for clock, step_s in ((0.0, 0.0), (1.0, 0.25), (9.0, 0.25), (9.8, 0.25))
    ]
    assert counts == [1, STRETCH, 4, 0]
    assert [next_steps(settings(made, "adamw"), 99.0, steps, 0.25) for steps in (0, 2, 6)] == [6, 4, 0]
    run = train(replace(of_ten, seconds=0.01))
    assert run.curve[-1].steps == run.steps >= 1 and run.limit == "0.01 s" and run.curve[-1].seconds == run.seconds > 0


def test_the_rate_rises_stays_and_falls() -> None:
    assert rate_at(0.0, 1.0) < 1e-3 and rate_at(0.01, 1.0) == pytest.approx(0.5, abs=1e-3)
    assert rate_at(0.3, 1.0) == 1.0 and rate_at(0.8, 1.0) == pytest.approx(0.5, abs=1e-3)
    assert rate_at(1.0, 1.0) == 0.0


def test_nanochat_has_the_loss_of_the_reference_model() -> None:
    config = SIZES["tiny"].modern(61)
    params = initial_parameters(config, seed=1)
    params["wte.weight"].mul_(50.0)  # so that the eps of the norms is negligible
    model = NanochatModel(config, torch.float32)
    same = {"wte.weight": "wte.weight", "lm_head.weight": "lm_head.weight"}
    for i in range(config.n_layer):
        same |= {f"blocks.{i}.{part}.weight": f"blocks.{i}.attn.{part}.weight" for part in ("q", "k", "v", "proj")}
        same |= {f"blocks.{i}.{part}.weight": f"blocks.{i}.ffn.{part}.weight" for part in ("up", "down")}
    params |= {name: torch.rand(()) + 0.5 for name in params if ".scalars." in name}
    scalars = {
        own: torch.stack([params[f"blocks.{i}.scalars.{name}"] for i in range(config.n_layer)])
        for own, name in (("a", "x"), ("b", "x0"))
    }
    model.load_state_dict({name: params[ours] for name, ours in same.items()} | scalars)
    drawn = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    tokens, targets = drawn[:, :-1], drawn[:, 1:]
    torch.testing.assert_close(model(tokens, targets), reference.loss(params, tokens, targets, config))


def test_nanochat_compiles_to_one_graph() -> None:
    model = NanochatModel(SIZES["tiny"].modern(61), torch.bfloat16)
    model.initialise(0)
    drawn = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
    graph = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(graph(drawn[:, :-1], drawn[:, 1:]), model(drawn[:, :-1], drawn[:, 1:]))
    directions = torch.compile(muon_directions, fullgraph=True, backend="eager", dynamic=False)
    given = torch.randn(2, 12, 4), torch.zeros(2, 12, 4), torch.tensor(0.9), torch.float32
    torch.testing.assert_close(directions(*given), muon_directions(given[0], torch.zeros(2, 12, 4), *given[2:]))


def test_muon_directions_are_nearly_orthogonal() -> None:
    grads = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0))
    m = torch.zeros_like(grads)
    o = muon_directions(grads, m, torch.tensor(0.9), torch.float32) / 3**0.5
    torch.testing.assert_close(m, 0.1 * grads)
    singular = torch.linalg.svdvals(o)
    assert float(singular.min()) > 0.85 and float(singular.max()) < 1.15
    u, _, vh = torch.linalg.svd(grads, full_matrices=False)
    assert float((o - u @ vh).abs().max()) < 0.15


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"contender": "no"}, "case: got 'no'; accepted: nanogpt"), ({"size": "no"}, "size: got 'no'; accepted: 124m"),
        ({"seconds": 0.0}, "seconds: got 0.0"), ({"steps": 0}, "steps: got 0"), ({"rate": -1.0}, "rate: got -1.0"),
        ({"contender": "muon-fp8"}, "device: got 'cpu' with muon-fp8; accepted: 'cuda'"),
    ],
)  # fmt: skip
def test_bad_settings_of_five_minutes_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(Settings(Path(), "adamw", device="cpu"), **given)  # type: ignore[arg-type]


def test_bad_rates_of_five_minutes_are_refused() -> None:
    assert rates_of(["muon=0.002"]) == {"muon": 0.002}
    for wrong in ("muon", "muon=x", "no=1"):
        with pytest.raises(ValueError, match=f"rate: got '{wrong}'; accepted: NAME=RATE"):
            rates_of([wrong])


# ── the report ──


def a_run(contender: str, seed: int, *values: float) -> Run:
    curve = tuple(Point(100.0 * i, i, value) for i, value in enumerate(values))
    return Run(contender, seed, "tiny", 1e-3, "300 s", "0" * 64, curve, 3, 3000, 300.0, 1 << 30, 9.0, 1.0, "1" * 64)


def test_the_table_says_when_a_goal_is_met() -> None:
    runs = [
        a_run("nanogpt", 0, 5.0, 3.0, 2.0, 1.6), a_run("nanogpt", 1, 5.0, 3.0, 2.0, 1.4),
        a_run("nanochat", 0, 5.0, 2.0, 1.8, 1.2), a_run("muon", 0, 5.0, 1.7, 1.5, 1.0), a_run("muon", 1, 5.0, 1.6, 1.4, 1.1),
    ]  # fmt: skip
    told = report(runs)
    assert "| nanochat | 1.2000 | – | 1 | " in told and "met" not in told.split("nanochat; goal: ")[1].splitlines()[0]
    assert "nanochat; goal: more than the spread, which needs two seeds of each" in told
    told = report([*runs, a_run("nanochat", 1, 5.0, 2.0, 1.7, 1.2)])
    assert "| nanogpt | 1.5000 | 0.2000 | 2 | 300.0 | 3,000 | 10 | 1.00 |" not in told  # seed 0 never reaches 1.5
    assert "| nanogpt | 1.5000 | 0.2000 | 2 | – | 3,000 | 10 | 1.00 |" in told
    assert "muon: +0.1500 bits per byte below nanochat; goal: more than 0.1000, met" in told
    assert "muon: 175.0 s to nanogpt's 1.5000; goal: ≤ 150 s, missed" in told
    assert seconds_to(9.0, runs[0]) == 0.0 and seconds_to(1.0, runs[0]) is None
    with pytest.raises(ValueError, match="got muon with seed 0 twice"):
        check_comparable([*runs, runs[3]])
    with pytest.raises(ValueError, match="got size 124m and tiny"):
        check_comparable([*runs, replace(runs[0], size="124m", seed=7)])


def test_a_run_is_appended_to_the_file_and_is_in_the_table_and_the_picture(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(five_minutes, "get_context", {"spawn": CONTEXT}.__getitem__)  # its processes begin sooner
    out, picture = tmp_path / "runs.jsonl", tmp_path / "curves.svg"
    tiny = ["--size", "tiny", "--device", "cpu", "--steps", "3", "--eval-tokens", "64", "--evaluations", "1"]
    assert main(["--data", str(made), "--case", "adamw", "--seeds", "1", "--out", str(out), *tiny]) == 0
    assert "| adamw |" in capsys.readouterr().out
    assert main(["--report", str(out)]) == 0 and "| adamw |" in capsys.readouterr().out
    assert read_runs([out])[0].steps == 3 and "commit" in json.loads(out.read_text(encoding="utf-8").splitlines()[0])
    with out.open("a", encoding="utf-8") as file:
        file.write(to_json(a_run("nanochat", 0, 3.0, 2.0)) + "\n")
    monkeypatch.setattr(sys, "argv", ["charts.py", "five-minutes", str(picture), str(out)])
    runpy.run_path(str(HERE / "docs" / "charts.py"), run_name="__main__")
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.count("<polyline") == 2 and "tilegrad, AdamW" in drawn


def test_a_run_that_fails_is_named_and_the_others_continue(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_or_fail(given: Settings) -> Run:
        if given.seed == 0:
            raise RuntimeError("out of memory")
        return a_run(given.contender, given.seed, 2.0, 1.0)

    monkeypatch.setattr(five_minutes, "train", run_or_fail)
    monkeypatch.setattr(five_minutes, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers))
    runs, failed = five_minutes.measure([settings(made, "adamw", seed=seed) for seed in (0, 1)], None)
    assert failed and [run.seed for run in runs] == [1]
    assert "adamw, seed 0: failed: RuntimeError: out of memory" in capsys.readouterr().err
