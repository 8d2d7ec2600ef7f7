"""Reading and writing PEFT's adapters: names, shapes and options compared with files of PEFT 0.21.2; errors; merged weights.
tests/integrations/test_peft.py runs PEFT itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.models import CONFIG, LLAMA, equal
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.cli import main
from tilegrad.model.lora import LoraConfig
from tilegrad.pretrained.adapters import CONFIG as SETTINGS
from tilegrad.pretrained.adapters import TENSORS, adapter_shapes, merge, open_adapter, write_adapter
from tilegrad.pretrained.weights import open_weights, write_weights

PEFT = json.loads((Path(__file__).parents[1] / "support" / "peft_0_21_2.json").read_text(encoding="utf-8"))
SMALL: dict[str, Any] = {"vocab_size": 32, "n_layer": 2}
KINDS = {"gpt2": replace(CONFIG, **SMALL, n_head=2), "llama": replace(LLAMA, **SMALL, ffn_dim=24)}
LORA = LoraConfig(rank=4, alpha=8, dropout=0.05)


def base_of(kind: str, folder: Path) -> Path:
    write_weights(folder / "base", Engine(KINDS[kind], 1, 4).params, KINDS[kind])
    return folder / "base"


def drawn(config: ModelConfig, lora: LoraConfig = LORA) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in adapter_shapes(config, lora).items()}


def as_peft_wrote_it(kind: str, folder: Path, **changed: object) -> Path:
    home = folder / "adapter"
    home.mkdir(exist_ok=True)
    (home / SETTINGS).write_text(json.dumps(PEFT[kind]["config"] | changed), encoding="utf-8")
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(PEFT[kind]["shapes"].items())
    }
    save_file(tensors, home / TENSORS, PEFT[kind]["metadata"])
    return home


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_the_names_shapes_and_options_of_peft(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]
    write_adapter(tmp_path / "out", drawn(config), config, LORA, kind=kind, base="base")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [SETTINGS, TENSORS]
    with safe_open(tmp_path / "out" / TENSORS, framework="pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == PEFT[kind]["shapes"]  # noqa: SIM118
        assert file.metadata() == PEFT[kind]["metadata"]
    ours = json.loads((tmp_path / "out" / SETTINGS).read_text(encoding="utf-8"))
    want = PEFT[kind]["config"] | {"base_model_name_or_path": "base"}
    assert ours == {name: want[name] for name in ours}
    assert {"peft_type", "r", "lora_alpha", "target_modules", "bias", "task_type", "fan_in_fan_out"} <= {*ours}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_by_peft_is_read_and_written_again(kind: str, tmp_path: Path) -> None:
    base, home = open_weights(base_of(kind, tmp_path)), as_peft_wrote_it(kind, tmp_path)
    adapter = open_adapter(home, base)
    assert adapter.lora == LORA
    write_adapter(tmp_path / "again", adapter.read(), base.config, adapter.lora, kind=kind, base="base")
    assert equal(load_file(tmp_path / "again" / TENSORS), load_file(home / TENSORS))


@pytest.mark.parametrize(
    ("kind", "layers", "targets"),
    [
        ("gpt2", "all", ["c_attn", "c_fc", "c_proj"]),
        ("gpt2", "attention", ["attn.c_proj", "c_attn"]),
        ("gpt2", "ffn", ["c_fc", "mlp.c_proj"]),
        ("llama", ("v", "q"), ["q_proj", "v_proj"]),
        ("llama", "down", ["down_proj"]),
    ],
)
def test_layers_to_adapt_are_chosen_by_name(
    kind: str, layers: str | tuple[str, ...], targets: list[str], tmp_path: Path
) -> None:
    config, lora = KINDS[kind], replace(LORA, layers=layers)
    write_adapter(tmp_path / "out", drawn(config, lora), config, lora, kind=kind, base="base")
    assert json.loads((tmp_path / "out" / SETTINGS).read_text(encoding="utf-8"))["target_modules"] == targets
    adapter = open_adapter(tmp_path / "out", open_weights(base_of(kind, tmp_path)))
    assert adapter.lora.layers == {("v", "q"): ("q", "v"), "down": ("down",)}.get(layers, layers)
    assert equal(adapter.read(), drawn(config, lora))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_equal_w_plus_s_b_a(kind: str) -> None:
    config = KINDS[kind]
    params = {name: x.clone() for name, x in Engine(config, 1, 4).params.items()}
    before, adapters = {name: x.clone() for name, x in params.items()}, drawn(config)
    merge(params, adapters, config, LORA)
    changed = {name for name, x in params.items() if not torch.equal(x, before[name])}
    weights = {name for name in params if name.startswith("blocks.") and ".ln" not in name and name.endswith("weight")}
    assert changed == weights
    a, b = adapters["blocks.1.ffn.in.lora_a"], adapters["blocks.1.ffn.up.lora_b"]
    up = "blocks.1.ffn.up.weight" if kind == "gpt2" else "blocks.1.ffn.up_gate.weight"
    want = before[up][: len(b)].double() + 2.0 * b.double() @ a[-4:].double()
    assert torch.equal(params[up][: len(b)], want.float())
    part = "qkv" if kind == "gpt2" else "v"
    a, b = adapters["blocks.0.attn.in.lora_a"], adapters[f"blocks.0.attn.{part}.lora_b"]
    rows = slice(None) if kind == "gpt2" else slice(24, 32)
    want = before["blocks.0.attn.qkv.weight"][rows].double() + 2.0 * b.double() @ a[-4:].double()
    assert torch.equal(params["blocks.0.attn.qkv.weight"][rows], want.float())


OPTIONS: dict[str, object] = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "layers_to_transform": [0],
    "layer_replication": [[0, 2]],
    "lora_bias": True,
    "target_parameters": ["x"],
    "trainable_token_indices": [1],
    "alora_invocation_tokens": [1],
    "init_lora_weights": "pissa",
    "task_type": "SEQ_CLS",
    "peft_type": "IA3",
    "use_of_tomorrow": 1,
    "r": 0,
    "lora_alpha": -1,
    "lora_dropout": 1.0,
    "use_rslora": "yes",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_changes_the_mathematics_is_refused_by_name(option: str, tmp_path: Path) -> None:
    base, home = (
        open_weights(base_of("llama", tmp_path)),
        as_peft_wrote_it("llama", tmp_path, **{option: OPTIONS[option]}),
    )
    with pytest.raises(ValueError, match=rf"adapter_config\.json: {option}: got .*; accepted: "):
        open_adapter(home, base)


def edit(home: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(home / TENSORS)
    change(tensors)
    save_file(tensors, home / TENSORS)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BAD: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "of another width": (
        lambda x: x.update({Q: torch.zeros(4, 20)}), r"q_proj.lora_A.weight: got shape \(4, 20\); accepted: \(4, 16\)",
    ),
    "of another rank": (lambda x: x.update({Q: torch.zeros(5, 16)}), r"got shape \(5, 16\); accepted: \(4, 16\)"),
    "of integers": (lambda x: x.update({Q: torch.zeros(4, 16, dtype=torch.int8)}), "got dtype I8; accepted: F64"),
    "of the head": (
        lambda x: x.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 16)}), r"got '.*lm_head.*q, k, v, proj",
    ),
    "of a block too many": (
        lambda x: x.update({Q.replace("layers.0", "layers.2"): torch.zeros(4, 16)}), r"got '.*layers\.2.*in 2 blocks",
    ),
    "without one block's": (lambda x: x.pop(Q), r"missing tensors: \['base_model.*q_proj.lora_A.weight'\]; accepted: the same"),
    "empty": (lambda x: x.clear(), "got no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_the_error_for_adapters_of_another_model_names_the_tensor_and_both_shapes(what: str, tmp_path: Path) -> None:
    base, home = open_weights(base_of("llama", tmp_path)), as_peft_wrote_it("llama", tmp_path)
    change, message = BAD[what]
    edit(home, change)
    with pytest.raises(ValueError, match=message):
        open_adapter(home, base).read()


def test_damaged_files_and_paths_outside_the_folder_are_refused(tmp_path: Path) -> None:
    base, home = open_weights(base_of("gpt2", tmp_path)), as_peft_wrote_it("gpt2", tmp_path)
    whole, settings = (home / TENSORS).read_bytes(), (home / SETTINGS).read_bytes()
    for content in (b"", whole[:50], whole[:-1], b"\xff" * 64):
        (home / TENSORS).write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors: is not a safetensors file, or is damaged"):
            open_adapter(home, base)
    (home / TENSORS).unlink()
    (home / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match=r"adapter_model.bin is a pickle, which is never read"):
        open_adapter(home, base)
    (tmp_path / "outside").write_bytes(whole)
    (home / TENSORS).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="got a link to"):
        open_adapter(home, base)
    (home / TENSORS).unlink()
    (home / TENSORS).write_bytes(whole)
    for content in (b"[]", b"{", b"[" * 5000, b'{"r": NaN}', b"{}", settings.replace(b'"r": 4', b'"r": 1000000000')):
        (home / SETTINGS).write_bytes(content)
        with pytest.raises(ValueError, match=r"adapter_config\.json"):
            open_adapter(home, base)
    with pytest.raises(FileNotFoundError, match="no such folder; accepted: a folder with adapter_config"):
        open_adapter(tmp_path / "nowhere", base)


def test_a_false_rank_allocates_no_memory(tmp_path: Path) -> None:
    base, home = open_weights(base_of("llama", tmp_path)), as_peft_wrote_it("llama", tmp_path, r=131072)
    with pytest.raises(ValueError, match=r"got shape \(4, 16\); accepted: \(131072, 16\)"):
        open_adapter(home, base).read()


def test_an_existing_folder_is_not_overwritten_and_an_error_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = KINDS["llama"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="got a folder that already exists"):
        write_adapter(tmp_path / "mine", drawn(config), config, LORA, kind="llama", base="base")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilegrad.pretrained.adapters.save_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "new", drawn(config), config, LORA, kind="llama", base="base")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_import_merges_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, home = base_of("llama", tmp_path), as_peft_wrote_it("llama", tmp_path, use_rslora=True)
    assert main(["import", str(base), "--adapter", str(home), "--out", str(tmp_path / "merged")]) == 0
    assert "of rank 4 are merged into the weights" in capsys.readouterr().out
    source = open_weights(base)
    want, adapter = source.read(), open_adapter(home, source)
    assert adapter.lora.scale == 8 / 2
    merge(want, adapter.read(), source.config, adapter.lora)
    assert equal(open_weights(tmp_path / "merged").read(), want)
    (home / TENSORS).write_bytes(b"")
    assert main(["import", str(base), "--adapter", str(home), "--out", str(tmp_path / "no")]) == 2
    assert not (tmp_path / "no").exists()
