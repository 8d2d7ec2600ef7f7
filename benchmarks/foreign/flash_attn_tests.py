"""flash-attention's own tests through `tilegrad.flash`: a pytest plugin that is their package `flash_attn`.

tests/test_flash_attn.py is Dao-AILab/flash-attention's (BSD-3-Clause); the reader fetches it, and nothing of it is in this
repository. Their package need not be built: its Python files that the tests read (bert_padding.py) are those of the checkout.

    git clone --depth 1 https://github.com/Dao-AILab/flash-attention && cd flash-attention && pip install einops
    export PYTHONPATH=$TILEGRAD/benchmarks/foreign CASES=100 SEED=1 LONGEST=2048
    python -m pytest -p flash_attn_tests tests/test_flash_attn.py
    sed 's/"cuda"/"cpu"/' tests/test_flash_attn.py > tests/test_on_a_cpu.py     # without a GPU

CASES is how many of each test are drawn, LONGEST leaves out longer sequences. Always left out are dropout (their tests need the
probabilities), what tilegrad refuses by name (paged caches, padding at the left of a cache, rotary embeddings inside decoding),
and tests of their extension's own functions.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

import tilegrad.flash

if TYPE_CHECKING:
    import pytest

LENGTHS = ("seqlen", "seqlen_q", "seqlen_k")
REFUSED = ("dropout_p", "paged_kv_block_size", "rotary_fraction", "has_leftpad")
THEIR_EXTENSION = ("test_flash_attn_varlen_paged_kv_num_splits", "test_flash_attn_generator_arg_must_be_none")


def _package() -> ModuleType:
    """`flash_attn` with our functions and the other modules of the checkout that pytest runs in."""
    package = ModuleType("flash_attn")
    package.__path__ = [str(Path.cwd() / "flash_attn")]
    vars(package).update({name: getattr(tilegrad.flash, name) for name in tilegrad.flash.__all__})
    return package


def _interface() -> ModuleType:
    """What the tests read of the module that loads their kernels; the block is for the probabilities of dropout."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(USE_TRITON_ROCM=False, _get_block_size_n=lambda *_: 128)
    return interface


def _pretend_a_gpu() -> None:
    """The tests ask for its generation and memory while they are read."""
    names: dict[str, Any] = {
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**37),
    }
    for name, answer in names.items():
        setattr(torch.cuda, name, answer)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases, longest = int(os.environ.get("CASES", "20")), int(os.environ.get("LONGEST", "260"))
    dice, tests = random.Random(int(os.environ.get("SEED", "1"))), dict[str, list[Any]]()
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        name = getattr(item, "originalname", item.name)
        refused = any(given.get(option) for option in REFUSED) or name in THEIR_EXTENSION
        if not refused and all(given.get(length, 0) <= longest for length in LENGTHS):
            tests.setdefault(name, []).append(item)
    items[:] = [item for them in tests.values() for item in dice.sample(them, min(len(them), cases))]


sys.modules["flash_attn"], sys.modules["flash_attn.flash_attn_interface"] = _package(), _interface()
if not torch.cuda.is_available():
    _pretend_a_gpu()
