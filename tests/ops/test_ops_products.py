"""Products in pieces (kernels/linear/cpu.py) have the bits of torch's product, whichever thread computes a piece."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.threads import switching_often
from torch import Tensor

from tilegrad.kernels import linear
from tilegrad.kernels.cpu import abi, library
from tilegrad.kernels.linear import LINEAR, Problem, cpu, linear_bwd_input, linear_bwd_weight, linear_fwd
from tilegrad.native.openmp import SPINS

HERE = Path(__file__).parent.parent
MODELS = (  # (N, Cin, Cout) of the presets' products, with fewer rows and a smaller vocabulary
    (1024, 128, 384), (1024, 128, 128), (1024, 128, 512), (1024, 512, 128), (1024, 128, 256), (64, 768, 2304), (64, 3072, 768),
    (32, 768, 5025), (32, 1600, 1600), (96, 576, 1536), (96, 1536, 576), (96, 576, 192), (16, 32, 32), (256, 16, 16),
)  # fmt: skip
RAGGED = ((2, 2, 2), (17, 33, 65), (113, 37, 50), (63, 1001, 31), (1003, 7, 129), (33, 656, 799))
NATIVE = next(row for row in LINEAR.rows if row.name == "native")
needs_blas = pytest.mark.skipif(
    NATIVE.refuses(Problem(torch.empty(2, 2), torch.empty(2, 2))) is not None, reason="needs torch's OpenBLAS"
)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1009 * rows + columns))


def products(shape: tuple[int, int, int], kernel: str | None) -> dict[str, Tensor]:
    """All products of a linear layer, also over strided rows, written over NaN or added to the output."""
    n, cin, cout = shape
    x, w, dy = matrix(n, cin + 3)[:, :cin], matrix(cout, cin), matrix(n, cout + 5)[:, 5:]
    out = {name: torch.full((n, cout), torch.nan) for name in ("y", "y + b")}
    out |= {"dx": torch.full((n, cin), torch.nan), "dw": torch.full((cout, cin), torch.nan)}
    out |= {"dx +": matrix(n, cin), "dw +": matrix(cout, cin)}
    linear_fwd(x, w, None, y=out["y"], kernel=kernel)
    linear_fwd(x, w, matrix(1, cout)[0], y=out["y + b"], kernel=kernel)
    linear_bwd_weight(dy, x, w, dw=out["dw"], accumulate=False, kernel=kernel)
    linear_bwd_weight(dy, x, w, dw=out["dw +"], kernel=kernel)
    linear_bwd_input(dy, w, dx=out["dx"], accumulate=False, kernel=kernel)
    linear_bwd_input(dy, w, dx=out["dx +"], accumulate=True, kernel=kernel)
    return out


def of_torch(shape: tuple[int, int, int]) -> dict[str, Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return products(shape, "torch")
    finally:
        torch.set_num_threads(before)


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    return [name for name in want if not torch.equal(got[name], want[name])]


@needs_blas
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [*MODELS, *RAGGED])
def test_products_on_any_number_of_threads_have_the_bits_of_torchs_on_one(shape: tuple[int, int, int]) -> None:
    want = of_torch(shape)
    for count in (2, 7):
        torch.set_num_threads(count)
        assert LINEAR.select(Problem(torch.empty(shape[:2]), torch.empty(shape[:0:-1]))).name == "native"
        assert differing(products(shape, None), want) == [], count


@needs_blas
@pytest.mark.usefixtures("threads")
@settings(max_examples=15)
@given(st.tuples(*[st.one_of(st.integers(2, 80), st.integers(2, 900))] * 3), st.integers(1, 9))
def test_random_shapes_have_the_bits_of_torchs_product(shape: tuple[int, int, int], count: int) -> None:
    torch.set_num_threads(count)
    assert differing(products(shape, "native"), of_torch(shape)) == []


@needs_blas
@pytest.mark.parametrize(("field", "wrong"), [("k", -1), ("lda", 1), ("ldc", -1), ("m", -1), ("accumulate", 1)])
def test_canary_a_product_of_other_sizes_is_seen(monkeypatch: pytest.MonkeyPatch, field: str, wrong: int) -> None:
    shape, pack = (96, 64, 80), abi.pack_gemm
    want = of_torch(shape)

    def wrongly(*values: int) -> bytes:
        fields = dict(zip((name for name, *_ in abi.Gemm._fields_), values, strict=True))
        return pack(**fields | {field: fields[field] + wrong})

    monkeypatch.setattr(cpu, "pack_gemm", wrongly)
    if field == "ldc":
        wide = torch.full((96, 81), torch.nan)[:, :80]
        cpu.product(matrix(96, 64), matrix(64, 80), out=wide, accumulate=False)
        assert wide.isnan().any()
    else:
        assert differing(products(shape, "native"), want) != []


SGEMM = ctypes.CFUNCTYPE(None, *[ctypes.c_char_p] * 2, *[ctypes.POINTER(ctypes.c_int)] * 3, *[ctypes.c_void_p] * 6,
                         ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))  # fmt: skip
Piece = tuple[int, int]


class Pieces:
    """A BLAS that adds 1 to each number of a piece instead of a product. It records sizes and the threads allowed inside."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.sizes: list[Piece] = []
        self.allowed: dict[int, int] = {}
        self.inside: list[int] = []
        self.before = before
        get, put = ctypes.CFUNCTYPE(ctypes.c_int)(self._get), ctypes.CFUNCTYPE(None, ctypes.c_int)(self._put)
        self.functions: tuple[Any, ...] = (SGEMM(self._sgemm), get, put)

    def _get(self) -> int:
        return self.allowed.get(threading.get_ident(), 5)

    def _put(self, count: int) -> None:
        self.allowed[threading.get_ident()] = count

    def _sgemm(self, *arguments: Any) -> None:
        (m, n), c, ldc = arguments[2:4], *arguments[-2:]
        self.before()
        self.inside.append(self._get())
        for column in range(n[0]):
            at = (ctypes.c_float * m[0]).from_address(c + 4 * column * ldc[0])
            np.frombuffer(at, np.float32)[:] += 1
        self.sizes.append((m[0], n[0]))


@pytest.fixture
def use_blas() -> Iterator[Callable[[Pieces], None]]:
    """Makes native products use another BLAS; after the test they use that of torch."""

    def use(functions: tuple[Any, ...]) -> None:
        found.tilegrad_native_use_blas(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))

    if isinstance(library.library(), str):
        pytest.skip(f"the native library {library.library()}")
    found = library.native()
    yield lambda pieces: use(pieces.functions)
    torchs = library.blas()
    if not isinstance(torchs, str):
        use((torchs.sgemm_, torchs.omp_get_max_threads, torchs.omp_set_num_threads))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "shape", [(2, 2), (16, 16), (33, 31), (17, 4097), (4097, 17), (1000, 513), (128, 4096), (15, 700)]
)
def test_pieces_cover_every_number_once_and_none_is_a_vector(
    use_blas: Callable[[Pieces], None], shape: tuple[int, int]
) -> None:
    for count in (1, 2, 3, 16):
        torch.set_num_threads(count)
        pieces, out = Pieces(), torch.zeros(shape[0], shape[1] + 1)
        use_blas(pieces)
        cpu.product(torch.empty(shape[0], 512), torch.empty(512, shape[1]), out=out[:, :-1], accumulate=False)
        assert torch.equal(out[:, :-1], torch.ones(shape)) and not out[:, -1].any(), count
        sides = Counter(side for piece in pieces.sizes for side in piece)
        assert min(sides) >= min(16, *shape), "a vector's product would be formed by another function"
        assert len(pieces.sizes) <= (1 if count == 1 else 4 * count)
        assert set(pieces.inside) == {1} and set(pieces.allowed.values()) == {5}, "one thread inside, as before outside"


@pytest.mark.usefixtures("threads")
def test_while_a_thread_is_delayed_the_other_threads_take_its_pieces(use_blas: Callable[[Pieces], None]) -> None:
    """As on a core that another process uses. With equal shares, or a wait for this thread, the call would not end."""
    others, first, done = threading.Event(), threading.Lock(), [0]

    def hold_up() -> None:
        if first.acquire(blocking=False):
            assert others.wait(30), "no other thread took the rest"
        else:
            done[0] += 1
            if done[0] == 7:
                others.set()

    torch.set_num_threads(2)
    pieces, out = Pieces(hold_up), torch.zeros(1024, 2048)
    use_blas(pieces)
    cpu.product(torch.empty(1024, 16), torch.empty(16, 2048), out=out, accumulate=False)
    assert others.is_set() and len(pieces.sizes) == 8 and torch.equal(out, torch.ones(1024, 2048))


@needs_blas
@pytest.mark.usefixtures("threads")
def test_several_python_threads_may_compute_products_at_once() -> None:
    torch.set_num_threads(3)
    shapes = ((512, 128, 384), (256, 512, 128), (300, 37, 200))
    want = [of_torch(shape) for shape in shapes]
    wrong: list[str] = []

    def work(n: int) -> None:
        torch.set_num_threads(3)
        for _ in range(3):
            wrong.extend(differing(products(shapes[n % 3], "native"), want[n % 3]))

    switching_often(work, 6)
    assert wrong == []


FORK = """
import os, torch
import tilegrad
from tilegrad.kernels.linear import cpu
torch.set_num_threads(3)
a, b = torch.randn(512, 256), torch.randn(256, 512)
want, out = a @ b, torch.empty(512, 512)
def same():
    cpu.product(a, b, out=out, accumulate=False)
    return out.numpy().tobytes() == want.numpy().tobytes()
for _ in range(2):  # in the first child nothing was formed before
    child = os.fork()
    if child == 0:
        os._exit(0 if same() and same() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert same()
print("same")
"""


@needs_blas
def test_after_a_fork_parent_and_child_can_compute_products() -> None:
    assert python(FORK).stdout == "same\n"


def python(code: str, without: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(HERE), *sys.path))
    kept = {name: value for name, value in os.environ.items() if name not in without}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_strides_that_blas_cannot_read_are_refused() -> None:
    x, w, y = torch.ones(8, 6), torch.ones(4, 6), torch.ones(8, 4)
    for wrong in (torch.ones(8, 12)[:, ::2], torch.ones(1, 6).expand(8, 6), torch.ones(13).unfold(0, 6, 1)):
        with pytest.raises(
            ValueError, match=r"linear: got a matrix \(8, 6\) with strides .*; accepted: contiguous rows or columns"
        ):
            cpu.product(wrong, w.t(), out=y, accumulate=False)
    with pytest.raises(ValueError, match="strides"):
        cpu.product(x, w.t(), out=torch.ones(8, 8)[:, ::2], accumulate=False)


def test_the_table_says_why_products_are_not_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.empty(8, 6), torch.empty(4, 6)
    assert NATIVE.refuses(Problem(x.double(), w.double())) == "takes float32 only"
    assert str(NATIVE.refuses(Problem(x[:1], w))).startswith("takes matrices")
    monkeypatch.setattr(library, "blas", lambda: "needs a torch with OpenBLAS")
    assert LINEAR.select(Problem(x, w)).name == "torch"
    if not isinstance(library.library(), str):
        assert linear.LINEAR.explain(Problem(x, w)).reasons["native"] == "needs a torch with OpenBLAS"


@needs_blas
def test_products_call_the_function_that_torch_is_linked_with() -> None:
    torchs = library.blas()
    assert not isinstance(torchs, str)
    found = [
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if "/libopenblas" in line
    ]
    addresses = {ctypes.cast(ctypes.CDLL(path).sgemm_, ctypes.c_void_p).value for path in set(found) if "torch" in path}
    assert addresses == {ctypes.cast(torchs.sgemm_, ctypes.c_void_p).value}


VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SHOW = "import sys; print(sys.modules['tilegrad.native.openmp'].WAITING)"


def gomp() -> str:
    """The path of GNU's OpenMP runtime that torch has loaded, or "" if it has loaded another one."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    return next((line.split()[-1] for line in lines if "/libgomp" in line), "")


LOAD = f"import tilegrad, ctypes; {gomp()!r} and ctypes.CDLL({gomp()!r})"  # avoids the slow import of torch
TORCH_FIRST = "import sys; sys.modules['torch'] = sys"  # so does this


@pytest.mark.parametrize(
    ("imports", "environment", "spins", "expected"),
    [
        ("import tilegrad, torch", {}, SPINS, f"GOMP_SPINCOUNT={SPINS}, set before torch was loaded"),
        (LOAD, {"GOMP_SPINCOUNT": "7"}, "7", "GOMP_SPINCOUNT=7, from the environment"),
        (LOAD, {"OMP_WAIT_POLICY": "passive"}, "0", "OMP_WAIT_POLICY=passive, from the environment"),
        (
            f"{TORCH_FIRST}; {LOAD}",
            {},
            "300000",
            "threads poll long at the end of a loop because torch was imported",
        ),
    ],
)
def test_openmp_polls_less_unless_torch_is_imported_first_or_the_environment_sets_it(
    imports: str, environment: dict[str, str], spins: str, expected: str
) -> None:
    """GNU's runtime prints the settings that it uses."""
    done = python(f"{imports}; {SHOW}", without=VARIABLES, OMP_DISPLAY_ENV="VERBOSE", **environment)
    said = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert done.stdout.startswith(expected) and set(said) <= {spins}
    if gomp():
        assert said
