"""Reading and writing Hugging Face folders: names, shapes, shards, errors; loss, gradients and text against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import CONFIG, LLAMA, QWEN3

import tilegrad
from tilegrad import Engine, ModelConfig
from tilegrad.engine.decoder import Decoder, Prompt
from tilegrad.engine.sampling import Sampling
from tilegrad.kernels.rope.frequencies import RopeScaling
from tilegrad.pretrained.families import config_json, config_of, theirs
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training.generation import draw

KINDS = {
    "gpt2": CONFIG,
    "gpt2, untied": replace(CONFIG, tie_embeddings=False),
    "llama": LLAMA,
    "llama, tied, biases": replace(LLAMA, tie_embeddings=True, qkv_bias=True, proj_bias=True, ffn_bias=True),
    "llama, rope of llama 3": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, original=8)),
    "llama, rope of yarn": replace(LLAMA, rope_scaling=RopeScaling("yarn", 4.0, original=6)),
    "llama, linear rope": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0), rope_theta=500.0),
    "mistral": replace(LLAMA, window=5, head_size=6),
    "qwen2": replace(LLAMA, qkv_bias=True, window=5, window_layers=(1,), norm_eps=1e-6),
    "qwen3": replace(QWEN3, qkv_bias=False),
    "qwen3, biases": replace(QWEN3, proj_bias=True),
}


def engine_of(config: ModelConfig, b: int = 2, t: int = 12) -> Engine:
    engine = Engine(config, b, t)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.2)
    return engine


def resolved(config: ModelConfig) -> ModelConfig:
    """The config with the default instead of None."""
    norms = config.norm == "rmsnorm"
    biases: dict[str, Any] = {
        name: config.bias if (own := getattr(config, name)) is None else own
        for name in ("qkv_bias", "proj_bias", "ffn_bias")
    }
    return replace(
        config, n_kv_head=config.kv_heads, ffn_dim=config.ffn, bias=config.bias and not norms,
        head_size=None if config.head_dim * config.n_head == config.n_embd else config.head_dim,
        **biases,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_written_weights_are_read_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]
    engine = engine_of(config)
    write_weights(tmp_path / "out", engine.params, config)
    source = open_weights(tmp_path / "out")
    assert source.origin["model_type"] == kind.split(",")[0]
    assert resolved(source.config) == resolved(config)
    again = Engine(source.config, 2, 12, seed=1)
    source.load(again.params)
    assert all(torch.equal(again.params[name], p) for name, p in engine.params.items())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_has_the_same_loss_gradients_and_text(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = KINDS[kind]
    engine = engine_of(config)
    write_weights(tmp_path / "out", engine.params, config)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    model = model.eval()
    tokens = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -1)], 1)
    assert engine.gradients(tokens, targets) == pytest.approx(float(out.loss.detach()), rel=1e-5)
    gradients, want = dict(theirs(kind.split(",")[0], engine.grads, config)), dict(model.named_parameters())
    assert gradients.keys() == want.keys()
    largest = max(float(p.grad.norm()) for p in want.values())
    for name, p in want.items():
        assert float((gradients[name] - p.grad).norm()) < 2e-5 * max(float(p.grad.norm()), 1e-2 * largest), name
    padded, mask = tokens[:, :5].clone(), torch.ones(2, 5, dtype=torch.int64)
    padded[1, :2], mask[1, :2] = 0, 0  # the second prompt has three tokens, and transformers pads on the left
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = model.generate(padded, attention_mask=mask, **how)[:, 5:].tolist()
    decoder, greedy = Decoder(config, engine.params, 2, 13), Sampling(temperature=0.0)
    decoder.prefill(
        {0: Prompt(tokens[0, :5].tolist(), sampling=greedy), 1: Prompt(tokens[1, 2:5].tolist(), sampling=greedy)}
    )
    for _ in range(7):
        decoder.submit()
    assert [list(row) for row in zip(*(each.tokens for each in decoder.finished(wait=True)), strict=True)] == written
    model.save_pretrained(tmp_path / "theirs")
    source = open_weights(tmp_path / "theirs")
    assert resolved(source.config) == resolved(config)
    again = Engine(source.config, 1, 4)
    source.load(again.params)
    assert all(torch.equal(again.params[name], p) for name, p in engine.params.items())


def saved(tmp_path: Path, config: ModelConfig = LLAMA, **changed: Any) -> Path:
    folder = tmp_path / "model"
    write_weights(folder, engine_of(config).params, config)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changed
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_weights_may_be_shards_or_one_file_with_bare_names_and_short_dtypes(tmp_path: Path) -> None:
    folder = saved(tmp_path, CONFIG)
    tensors = {
        name.removeprefix("transformer."): x.bfloat16() for name, x in load_file(folder / "model.safetensors").items()
    }
    half = dict(list(tensors.items())[::2])
    save_file(half, folder / "a.safetensors")
    rest = {name: x for name, x in tensors.items() if name not in half}
    # old checkpoints have this buffer
    save_file(rest | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, folder / "b.safetensors")
    index = {name: "a.safetensors" if name in half else "b.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    whole = open_weights(folder / "model.safetensors")  # the single file in float32
    for source, exact in ((whole, True), (open_weights(folder), False)):
        engine = Engine(source.config, 1, 4, seed=1)
        source.load(engine.params)
        for name, want in engine_of(CONFIG).params.items():
            assert torch.equal(engine.params[name], want if exact else want.bfloat16().float()), name
    (folder / "b.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"b.safetensors: no such file, but model.safetensors.index.json lists it"
    ):
        open_weights(folder)


def test_an_export_in_shards_gives_the_same_model(tmp_path: Path) -> None:
    engine = engine_of(LLAMA)
    write_weights(tmp_path / "one", engine.params, LLAMA, dtype=torch.bfloat16)
    write_weights(tmp_path / "more", engine.params, LLAMA, dtype=torch.bfloat16, max_shard_bytes=2000)
    one = load_file(tmp_path / "one" / "model.safetensors")
    files = sorted((tmp_path / "more").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    found: dict[str, torch.Tensor] = {}
    for file in files:
        shard = load_file(file)
        assert len(shard) == 1 or sum(x.nbytes for x in shard.values()) <= 2000
        found |= shard
    assert found.keys() == one.keys() and all(torch.equal(found[name], x) for name, x in one.items())
    index = json.loads((tmp_path / "more" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in one.values())
    params = open_weights(tmp_path / "more").read()
    assert all(torch.equal(params[name], p.bfloat16().float()) for name, p in engine.params.items())
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "more", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "bloom"}, "model_type: got 'bloom'; accepted: 'gpt2', 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; accepted: 'silu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "rope_parameters: got .*longrope"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_parameters: got .*mscale"),
        ({"attention_dropout": 0.1}, "attention_dropout: got 0.1; accepted: 0"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: got .'chunked_attention'.; accepted"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: got"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; accepted: 1"),
    ],
)
def test_an_unsupported_feature_of_a_config_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_weights(saved(tmp_path, **changed))


def test_a_wrong_file_changes_no_weight(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    engine = Engine(open_weights(folder).config, 1, 4, seed=1)
    before = {name: p.clone() for name, p in engine.params.items()}
    last = "model.norm.weight"
    for wrong, message in (
        ({**tensors, last: torch.ones(3)}, r"model.norm.weight: got shape \(3,\); accepted: \(16,\), by config.json"),
        ({**tensors, "more.weight": torch.ones(3)}, "unexpected tensors: .'more.weight'."),
        ({name: x for name, x in tensors.items() if name != last}, "missing tensors: .'model.norm.weight'."),
    ):
        save_file(wrong, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            open_weights(folder).load(engine.params)
        assert all(torch.equal(before[name], p) for name, p in engine.params.items())


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle, which is never read"):
        open_weights(folder)
    with pytest.raises(ValueError, match=r"got .bin; accepted: .safetensors; a pickle is never read"):
        open_weights(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no such file; accepted: a folder with"):
        open_weights(tmp_path)


def test_a_failed_export_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(CONFIG)
    for config, message in (
        (replace(CONFIG, activation="relu"), "activation: got 'relu'; accepted: 'swiglu', or 'gelu' with"),
        (replace(CONFIG, window=4), "window: got 4; accepted: None"),
        (replace(CONFIG, logit_softcap=5.0), "logit_softcap: got 5.0; accepted: None, because these families"),
        (replace(LLAMA, residual_scalars=True), "residual_scalars: got True; accepted: False"),
        (replace(CONFIG, value_embeddings=1), "value_embeddings: got 1; accepted: 0"),
        (replace(LLAMA, embedding_scale=8.0), "embedding_scale: got 8.0; accepted: 1.0"),
        (replace(LLAMA, logit_softcap=5.0), "exported as llama: logit_softcap: got 5.0; accepted: None"),
        (replace(LLAMA, ffn_bias=True, qkv_bias=True), r"qkv_bias, proj_bias, ffn_bias: got \[True, False, True\]"),
    ):
        with pytest.raises(ValueError, match=message):
            config_json(config, torch.float32)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilegrad.text.atomic.save_file", full)
    with pytest.raises(OSError, match="No space"):
        write_weights(tmp_path / "out", engine.params, CONFIG)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="got a folder that already exists; accepted: a new name"):
        write_weights(tmp_path / "out", engine.params, CONFIG)


def test_an_export_has_the_config_and_tokenizer_of_the_imported_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, LLAMA, initializer_range=0.05)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "generation_config.json").write_text("{}", encoding="utf-8")
    source = open_weights(folder)
    engine = Engine(source.config, 1, 4)
    source.load(engine.params)
    write_weights(tmp_path / "out", engine.params, replace(source.config, block_size=8), origin=folder)
    content = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert content == json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()}
    a, b = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "out"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_command_line_imports_trains_and_exports_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights with a tokenizer are imported, fine-tuned and exported: transformers writes the text of `generate`."""
    pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")
    from tilegrad.cli import main
    from tilegrad.data.documents import default_text
    from tilegrad.data.tokenizer import load_tokenizer, train_bpe
    from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint

    monkeypatch.chdir(tmp_path)
    text = default_text().read_text(encoding="utf-8")[20_000:50_000]
    Path("book.txt").write_text(text, encoding="utf-8")
    config = replace(KINDS[kind], vocab_size=300, block_size=64, tie_embeddings=True)
    write_weights(Path("theirs"), engine_of(config).params, config)
    Path("theirs/tokenizer.json").write_text(train_bpe(text, 290).json(), encoding="utf-8")
    assert main(["import", "theirs", "--out", "model"]) == 0
    assert f"a {kind} model with " in capsys.readouterr().out
    assert main(["import", "theirs", "--out", "model"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["generate", "model", "Call me", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("Call me")
    assert tilegrad.load("model").step == 0
    flags = ["--data", "book.txt", "--steps", "6", "--batch-size", "2", "--seq-len", "32", "--learning-rate", "1e-3"]
    flags += ["--model.dropout", "0.1"]  # of training alone, so an export leaves it out
    assert main(["train", "--init", "model", "--out", "run", *flags]) == 0
    first = json.loads(Path("run/run.json").read_text(encoding="utf-8"))
    assert first["model"]["n_kv_head"] == 2 and first["train"]["init"] == "model"
    assert first["model"]["window_layers"] == ([1] if kind == "qwen2" else None)  # layer_types are mixed
    assert main(["train", "--resume", "run", "--steps", "8"]) == 0
    assert main(["export", "run", "out"]) == 0
    assert f"a {kind} model for transformers, after 8 steps" in capsys.readouterr().out
    assert sorted(p.name for p in Path("out").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    path = latest_checkpoint(Path("run/checkpoints"))
    assert path
    tensors = load_checkpoint(path).tensors
    source = open_weights(Path("out"))
    params = source.read()
    assert all(torch.equal(params[name], tensors[name]) for name in params)
    began = open_weights(Path("theirs")).read()
    moved = max(float((params[name] - began[name]).abs().max()) for name in params)
    assert 1e-4 < moved < 0.05  # a few steps of 1e-3 from the start
    prompt = load_tokenizer(Path("out/tokenizer.json")).encode("Call me").tolist()
    mine = list(draw(source.config, params, prompt, 8, temperature=0.0))
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    model = transformers.AutoModelForCausalLM.from_pretrained("out").eval()
    written = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert written[0, len(prompt) :].tolist() == mine


def test_bad_options_of_training_from_weights_are_refused(tmp_path: Path) -> None:
    from tilegrad.training.sections import run_from

    folder = saved(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json: no such file; accepted: weights with their tokenizer"
    ):
        run_from({"train": {"init": str(folder)}}, "flags")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    run = run_from({"train": {"init": str(folder), "steps": 5}, "model": {"dropout": 0.1}}, "flags")
    assert (run.model.n_embd, run.model.dropout, run.train.learning_rate, run.train.seq_len) == (16, 0.1, 2e-5, 16)
    own = run_from({"train": {"init": str(folder)}}, "flags").train
    assert (own.steps, own.batch_size, own.min_learning_rate, own.eval_interval) == (200, 4, 2e-6, 50)
    assert run.data.tokenizer == str(folder / "tokenizer.json")
    with pytest.raises(ValueError, match="init: got 3; accepted: None, or the name of a folder of weights"):
        run_from({"train": {"init": 3}, "model": {"n_layer": 1}}, "flags")
    with pytest.raises(ValueError, match="tokenizer: got 'words'; accepted: 'bytes', 'bpe', or"):
        run_from({"data": {"tokenizer": "words"}}, "flags")


def test_missing_keys_of_a_config_have_the_defaults_of_transformers() -> None:
    sizes = {
        "num_attention_heads": 2,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 10,
        "intermediate_size": 16,
    }
    c = config_of({"model_type": "llama", **sizes})
    assert (c.block_size, c.n_kv_head, c.norm_eps, c.rope_theta, c.tie_embeddings) == (2048, 2, 1e-6, 10000.0, False)
    assert (c.qkv_bias, c.proj_bias, c.ffn_bias, c.head_size, c.window) == (False, False, False, None, None)
    c = config_of({"model_type": "gpt2", "vocab_size": 10, "n_layer": 1, "n_head": 2, "n_embd": 8})
    assert (c.block_size, c.ffn_dim, c.norm_eps, c.tie_embeddings, c.dropout) == (1024, None, 1e-5, True, 0.1)
