"""Users share backward buffers explicitly: they are counted, freed once, and have one pending owner at a time."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch

from tilegrad.memory.types import BufferStateError
from tilegrad.specification.workspace import Lease, Workspace

NEEDS = {"grad_Q": ((2, 3, 4), torch.float32), "grad_scores": ((5,), torch.float64)}


def leases(count: int) -> list[Lease]:
    workspace = Workspace(NEEDS, "cpu")
    return [workspace.acquire(f"layer {n}", NEEDS, "cpu") for n in range(count)]


def test_all_users_see_the_same_buffers() -> None:
    first, second = leases(2)
    assert first["grad_Q"].shape == (2, 3, 4)
    assert second["grad_scores"].dtype is torch.float64
    assert first["grad_Q"].data_ptr() == second["grad_Q"].data_ptr()
    with pytest.raises(KeyError, match="no buffer 'grad_K' in this workspace; accepted: grad_Q, grad_scores"):
        first["grad_K"]


def test_twelve_users_hold_no_more_bytes_than_one() -> None:
    assert leases(12)[0].workspace.nbytes == leases(1)[0].workspace.nbytes == 4 * 24 + 8 * 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_release_frees_the_buffers_in_any_order(order: tuple[int, ...]) -> None:
    users = leases(3)
    workspace = users[0].workspace
    buffer = weakref.ref(users[0]["grad_Q"])
    for position, index in enumerate(order):
        assert buffer() is not None
        users[index].release()
        with pytest.raises(BufferStateError, match=f"layer {index} was freed"):
            users[index]["grad_Q"]
        with pytest.raises(BufferStateError, match=f"layer {index} was freed"):
            users[index].begin()
        for other in order[position + 1 :]:
            users[other]["grad_Q"].fill_(1)
    assert buffer() is None
    assert workspace.nbytes == 0
    with pytest.raises(BufferStateError, match="late cannot share this workspace: its last user was freed"):
        workspace.acquire("late", NEEDS, "cpu")


def test_releasing_twice_is_harmless() -> None:
    first, second = leases(2)
    first.release()
    first.release()
    assert second["grad_Q"].numel() == 24
    second.release()
    second.release()


def test_a_deleted_user_counts_as_released_and_is_no_longer_pending() -> None:
    first, second = leases(2)
    workspace = first.workspace
    first.begin()
    del first
    gc.collect()
    second.begin()
    second.end()
    second.release()
    assert workspace.nbytes == 0


@pytest.mark.parametrize(
    ("needs", "device", "message"),
    [
        (
            {"grad_Q": ((2, 3, 5), torch.float32), "grad_scores": ((5,), torch.float64)},
            "cpu",
            r"\(2, 3, 5\).*\(2, 3, 4\)",
        ),
        ({"grad_Q": ((2, 3, 4), torch.float16), "grad_scores": ((5,), torch.float64)}, "cpu", "float16.*float32"),
        ({"grad_Q": ((2, 3, 4), torch.float32)}, "cpu", "needs .*, but the workspace has .*grad_scores"),
        (NEEDS, "meta", "on meta, but the workspace has .* on cpu"),
    ],
)
def test_different_sizes_are_refused_by_an_error_that_names_both(needs: dict, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leases(1)[0].workspace.acquire("layer 1", needs, device)


def test_there_is_one_pending_owner_at_a_time() -> None:
    first, second = leases(2)
    first.begin()
    first.begin()
    for step in (second.begin, second.end):
        with pytest.raises(
            BufferStateError, match=r"layer 1 .* while layer 0 .* is pending: run the backward of layer 0"
        ):
            step()
    first.end()
    second.begin()
    second.end()


def test_releasing_the_pending_owner_lets_other_users_work() -> None:
    first, second = leases(2)
    first.begin()
    first.release()
    second.begin()


def test_another_thread_is_refused_even_for_the_same_owner() -> None:
    (lease,) = leases(1)
    lease.begin()
    caught: list[str] = []

    def other() -> None:
        try:
            lease.begin()
        except BufferStateError as error:
            caught.append(str(error))

    thread = threading.Thread(target=other, name="second thread")
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "layer 0 (thread second thread)" in caught[0]
    assert "layer 0 (thread MainThread) is pending" in caught[0]


def test_one_of_many_threads_owns_the_buffers_at_a_time() -> None:
    users = leases(8)
    barrier = threading.Barrier(len(users))
    inside, most, refused, entered = 0, 0, 0, 0
    lock = threading.Lock()

    def work(lease: Lease) -> None:
        nonlocal inside, most, refused, entered
        barrier.wait()
        for _ in range(300):
            try:
                lease.begin()
            except BufferStateError:
                with lock:
                    refused += 1
                continue
            with lock:
                inside, entered = inside + 1, entered + 1
                most = max(most, inside)
            with lock:
                inside -= 1
            lease.end()

    threads = [threading.Thread(target=work, args=(lease,)) for lease in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert entered + refused == 8 * 300
    assert entered > 0
