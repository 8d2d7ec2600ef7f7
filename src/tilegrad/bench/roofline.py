"""`tilegrad bench attention --profile`: how close each kernel comes to the limits of the device.

The limits are measured: FLOP/s of a GEMM of two large matrices in the dtype of the benchmark, and bytes/s of a large copy. The
least time of a kernel is the larger of (its FLOPs) / (FLOP/s) and (its bytes) / (bytes/s); its share is the least time divided
by the measured time. Recomputed FLOPs are counted: the dk, dv kernel has four GEMMs (five if dk and dv are separate passes),
the dq kernel three.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

import torch

from ..text.table import table
from .calls import Inputs
from .shapes import Shape
from .timing import interleaved

COUNTERS = (
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",  # cycles, because one instruction takes many
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
PROFILED = 5
KERNELS = {"_attention_fwd_kernel": "fwd", "_dkdv_kernel": "dkdv", "_dq_kernel": "dq", "_delta_kernel": "delta"}


def limits(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """(FLOP/s of a GEMM, bytes/s of a copy) of this device. Bytes read and bytes written both count."""
    n, size = (8192, 1 << 30) if device.type == "cuda" else (512, 1 << 25)
    a, b, product = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    ms = interleaved({"product": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}, 10, device)
    return 2 * n**3 / min(ms["product"]) * 1e3, 2 * size / min(ms["copy"]) * 1e3


def demand(kernel: str, shape: Shape, element_bytes: int) -> tuple[float, float]:
    """(FLOPs, bytes) of a kernel, or of the whole forward or backward."""
    product = shape.flops(backward=False) / 2
    forward, backward = (shape.bytes(element_bytes, backward=x) for x in (False, True))
    q_bytes = shape.b * shape.h * shape.rows * shape.d * element_bytes
    k_bytes = shape.b * (shape.hkv or shape.h) * shape.t * shape.d * element_bytes
    return {
        "forward": (2 * product, forward),
        "backward": (5 * product, backward),
        "fwd": (2 * product, forward),
        "dkdv": (4 * product, backward - 2 * q_bytes),
        "dk, dv": (5 * product, backward + k_bytes),  # q, do and k are read twice
        "dq": (3 * product, forward + q_bytes),
        "delta": (0.0, 2 * q_bytes),
    }[kernel]


def kernel_times(inputs: Inputs, kernel: str) -> dict[str, float]:
    """name → milliseconds of each device kernel in a forward and a backward, by torch's profiler. If dk and dv are separate
    passes, their two launches of one kernel are added up as "dk, dv"."""
    from torch.profiler import ProfilerActivity, profile

    forward, backward, _ = inputs.ours(kernel)
    forward()
    backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            forward()
            backward()
        torch.cuda.synchronize()
    return _by_part([(event.name, event.device_time_total / 1e3) for event in seen.events()])


def _by_part(launches: Sequence[tuple[str, float]]) -> dict[str, float]:
    """part → mean ms, from the launches (kernel, ms) of PROFILED forwards and backwards."""
    times = dict.fromkeys(KERNELS.values(), 0.0)
    for name, ms in launches:
        if name in KERNELS:
            times[KERNELS[name]] += ms / PROFILED
    if sum(name == "_dkdv_kernel" for name, _ in launches) == 2 * PROFILED:
        times["dk, dv"] = times.pop("dkdv")
    return {name: ms for name, ms in times.items() if ms}


def print_roofline(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device, kernels: Sequence[str]) -> None:
    flops_limit, bytes_limit = limits(dtype, device)
    print(f"\nlimits here: {flops_limit / 1e12:.3g} TFLOP/s of a GEMM, {bytes_limit / 1e9:.0f} GB/s of a copy")
    lines = []
    for shape in shapes:
        inputs = Inputs(shape, dtype, device)
        for kernel in kernels:
            forward, backward, _ = inputs.ours(kernel)
            thunks = {"forward": forward} if shape.tq else {"forward": forward, "backward": backward}
            forward()
            times = {name: median(ms) for name, ms in interleaved(thunks, 5, device).items()}
            if device.type == "cuda" and kernel == "triton" and not shape.tq:
                times |= kernel_times(inputs, kernel)
            for part, ms in times.items():
                flops, moved = demand(part, shape, dtype.itemsize)
                by_flops, by_bytes = flops / flops_limit * 1e3, moved / bytes_limit * 1e3
                bound = "products" if by_flops > by_bytes else "memory"
                share = max(by_flops, by_bytes) / ms
                cells = [f"{flops / ms / 1e9:.3g}", f"{moved / ms / 1e6:.0f}", bound, f"{share:.0%}"]
                lines.append([str(shape), kernel, part, f"{ms:.3f}", *cells])
    print(table(("shape", "kernel", "part", "ms", "TFLOP/s", "GB/s", "bound by", "of its limit"), lines))
    if device.type == "cuda" and shutil.which("ncu"):
        print("\n" + counters(shapes[0], dtype, kernels[0]))


def counters(shape: Shape, dtype: torch.dtype, kernel: str) -> str:
    """The counters of ncu for one forward and backward, which run in a process of their own."""
    code = (
        "import torch; from tilegrad.bench.attention import Inputs\nfrom tilegrad.bench.shapes import Shape\n"
        f"forward, backward, _ = Inputs({shape!r}, {dtype}, torch.device('cuda')).ours({kernel!r})\n"
        "forward(); backward(); torch.cuda.synchronize()"
    )
    # The names of tilegrad's kernels begin with an underscore.
    command = ["ncu", "--clock-control", "none", "--metrics", ",".join(COUNTERS), "-k", "regex:^_"]
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"ncu gave no counters: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"
    return _counted(done.stdout)


def _counted(report: str) -> str:
    """The lines of ncu's report with kernels and their counters."""
    lines = (line.rstrip() for line in report.splitlines())
    return "\n".join(line for line in lines if line.lstrip().startswith(("_", *COUNTERS)))
