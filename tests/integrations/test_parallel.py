"""Under DDP and FSDP2 a model with tilegrad.nn.Attention has the losses of a single process."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

import tilegrad.nn

pytestmark = pytest.mark.slow
STEPS, B, T, C = 4, 4, 12, 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            tilegrad.nn.Attention(C, 4, batch_first=True, num_kv_heads=2, rope_theta=100.0, dtype=torch.float64)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, is_causal=True)[0]
        return x


def train(model: nn.Module, mine: slice, reduce: Any = lambda loss: loss) -> list[float]:
    x, y = torch.randn(2, B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = (model(x[mine]) - y[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(reduce(loss.detach())))
    return losses


def work(rank: int, kind: str, port: int, want: list[float]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model: Any = Model()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def mean(loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss / 2

    got = train(model, slice(rank * B // 2, (rank + 1) * B // 2), mean)
    dist.destroy_process_group()
    assert got == pytest.approx(want, rel=1e-10), (got, want)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_have_the_losses_of_one(kind: str) -> None:
    want = train(Model(), slice(None))
    assert want[-1] < want[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (kind, port, want), nprocs=2)  # type: ignore[attr-defined]
