"""`tilegrad doctor`: prints a line for each part of the package, which says whether this installation can run the part.

`--kernels` adds the table of kernels of every op: which kernel runs a call without options, and why other kernels do not.
`--build` compiles three parts that are in C++: the native CPU kernel, eager calls, and the cache hits of the memory manager.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from types import ModuleType

import torch

from .. import __version__
from ..functional import fast_path
from ..kernels import (
    activation,
    adamw,
    cache_attention,
    column_sum,
    cross_entropy,
    dropout,
    embedding,
    fp8_linear,
    global_norm,
    linear,
    low_rank,
    mix,
    muon,
    norm,
    rope,
    sampling,
    scaled_sum,
)
from ..kernels.attention import problem as attention
from ..kernels.attention.mask import Mask
from ..kernels.attention.table import ATTENTION
from ..kernels.cpu import library as native_library
from ..kernels.table import Problem, Table
from ..memory.managed import hit
from ..native import build as native_build
from ..native import openmp
from ..text.spelling import dtype_name

EXTRAS = {  # extra → (packages, their purpose)
    "rich": (("rich",), "a live progress bar while a run trains"),
    "plot": (("matplotlib",), "tilegrad bench attention --plot"),
    "bpe": (("tokenizers",), "BPE tokenizers, and Hugging Face weights with their tokenizers"),
    "chat": (("jinja2", "tokenizers"), "conversations: chat templates of tokenizers"),
    "tensorboard": (("tensorboard",), "a run's curves in TensorBoard"),
    "gguf": (("gguf", "tokenizers"), "GGUF files of llama.cpp and Ollama"),
    "wandb": (("wandb",), "a run's curves in Weights & Biases (--log wandb)"),
    "mlflow": (("mlflow",), "a run's curves in MLflow (--log mlflow)"),
    "hf": (("transformers", "accelerate", "peft", "trl"), "attention in Hugging Face models and trainers"),
}


def doctor(*, build: bool = False, kernels: bool = False) -> int:
    """Print the report. Returns the exit code: 1 if the native kernel can't be built, in which case the error is printed."""
    if build and not build_modules():
        return 1
    lines = list(report())
    width = max(len(name) for name, _ in lines)
    for name, line in lines:
        print(f"{name:<{width}}  {line}")
    if kernels:
        for device, dtype in _targets():
            for table, call in plain_calls(device, dtype):
                print(f"\n{table.op}, {dtype_name(dtype)} on {device}\n{table.explain(call)}")
    return 0


def build_modules(*, only_missing: bool = False) -> bool:
    """Build the native kernel and the other C++ modules; only_missing: those that can't be loaded. Returns whether the native
    kernel exists."""
    if not only_missing or isinstance(native_library.library(), str):
        try:
            print(f"built {native_build.build()}")
        except RuntimeError as error:
            print(f"tilegrad: the native kernel was not built: {error}", file=sys.stderr)
            return False
        native_library.library.cache_clear()
    for what, module, time in (("the manager's hits", hit, "ten seconds"), ("eager calls", fast_path, "half a minute")):
        if only_missing and not isinstance(module.load(), str):
            continue
        try:
            print(f"building {what} in C++, {time} …", flush=True)
            print(f"built {module.MODULE.build()}")
        except RuntimeError as error:
            print(f"tilegrad: {what} in C++ were not built, so they run in Python: {error}", file=sys.stderr)
        module.load.cache_clear()
    return True


def report() -> Iterator[tuple[str, str]]:
    """(name of a part, what this installation has of it)"""
    yield "tilegrad", f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    yield "CPU", f"{platform.machine()}, {torch.get_num_threads()} threads (torch.set_num_threads changes it)"
    yield "OpenMP", openmp.WAITING
    yield (
        "compiler",
        native_build.compiler() or "none: $CXX, c++, g++ and clang++ are not there (Debian: apt install g++)",
    )
    yield "native kernel", _native()
    yield "eager calls", _in_cpp(fast_path)
    yield "manager's hits", _in_cpp(hit)
    yield "Triton", _version("triton") or "missing: pip install triton; it is for CUDA devices"
    yield "CUDA", _cuda()
    for extra, (packages, purpose) in EXTRAS.items():
        yield f"extra {extra}", f"{_versions(extra, packages)}: {purpose}"
    for device, dtype in _targets():
        accepting = "; ".join(_accepting(*call) for call in plain_calls(device, dtype))
        yield f"on {device}", f"{dtype_name(dtype)} {accepting}"


def plain_calls(device: str, dtype: torch.dtype) -> tuple[tuple[Table, object], ...]:
    """(table of kernels, a call of its op without options) for each op."""
    q = torch.empty(1, 1, 64, 64, device=device, dtype=dtype)
    x = q[0, 0]
    return (
        (ATTENTION, attention.Problem(q, q, q, Mask())),
        (cache_attention.CACHE_ATTENTION, cache_attention.Problem(q, 1)),
        (norm.NORM, Problem(x)),
        (activation.ACTIVATION, activation.Problem(x, "gelu")),
        (linear.LINEAR, linear.Problem(x, x)),
        (fp8_linear.FP8_LINEAR, fp8_linear.Problem(x, x)),
        (column_sum.COLUMN_SUM, Problem(x)),
        (low_rank.LOW_RANK, low_rank.Problem(x, x, x)),
        (embedding.EMBEDDING, Problem(x)),
        (rope.ROPE, Problem(q)),
        (mix.MIX, Problem(q)),
        (scaled_sum.SCALED_SUM, Problem(x)),
        (dropout.DROPOUT, Problem(x)),
        (sampling.SAMPLING, Problem(x.float())),
        (cross_entropy.CROSS_ENTROPY, cross_entropy.Problem(x, x)),
        (global_norm.GLOBAL_NORM, global_norm.Problem(x.view(-1))),
        (adamw.ADAMW, adamw.Problem(x.view(-1))),
        (muon.MUON, muon.Problem(x.view(-1), (muon.Matrix(0, *x.shape),), cautious=False)),
    )


def _targets() -> Iterator[tuple[str, torch.dtype]]:
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        for dtype in (torch.float32, torch.bfloat16):
            yield device, dtype


def _in_cpp(module: ModuleType) -> str:
    loaded = module.load()
    return f"through Python: the C++ module {loaded}" if isinstance(loaded, str) else f"in C++, {module.MODULE.path()}"


def _native() -> str:
    library = native_library.library()
    if isinstance(library, str):
        return f"missing: it {library}"
    return (
        f"{native_build.LIBRARY}, instruction sets {', '.join(native_library.supported())} (TILEGRAD_ISA selects one)"
    )


def _versions(extra: str, packages: Sequence[str]) -> str:
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return f"missing {', '.join(missing)} (pip install 'tilegrad[{extra}]')"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "no device" if torch.version.cuda else "no device: this torch is built for the CPU"
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ", ".join(
        f"{name} ({'.'.join(map(str, torch.cuda.get_device_capability(n)))})" for n, name in enumerate(names)
    )


def _accepting(table: Table, call: object) -> str:
    """The kernels that accept a call, in the order of the table: the first of them runs."""
    names = [row.name for row in table.rows if not row.by_name_only and row.refuses(call) is None]
    return f"{table.op}: {', then '.join(names) or 'none'}"
