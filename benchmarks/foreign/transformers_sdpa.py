"""transformers' own model tests with tilegrad instead of "sdpa": a pytest plugin. "eager" remains their oracle.

The tests are huggingface/transformers' (Apache-2.0); the reader fetches them, and nothing of them is in this repository:

    git clone --depth 1 --branch v5.16.0 https://github.com/huggingface/transformers && cd transformers
    pip install -e . accelerate datasets parameterized pytest-timeout pytest-xdist
    export HF_HUB_OFFLINE=1 PYTHONPATH=$TILEGRAD/benchmarks/foreign
    python -m pytest -p transformers_sdpa tests/models/llama/test_modeling_llama.py

There is no counter of calls here: a number that changes inside a traced function makes torch.compile compile it again.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from tilegrad.integrations.transformers import attention_forward, mask

AttentionInterface.register("sdpa", attention_forward)
AttentionMaskInterface.register("sdpa", mask)
