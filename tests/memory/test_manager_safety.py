"""AttentionBufferManager: misuse is caught, and a buffer that someone still holds is never handed out."""

import gc
import threading

import pytest
import torch

from tilegrad.memory import AttentionBufferManager, BufferStateError, BufferType
from tilegrad.memory.managed.cache import BufferCache
from tilegrad.memory.managed.slab import BucketSlab

pytestmark = pytest.mark.usefixtures("hits")
Q, K = BufferType.QUERY, BufferType.KEY


@pytest.fixture(params=[True, False], ids=["lightweight", "tracked"])
def manager(request):
    return AttentionBufferManager(lightweight=request.param, pressure=lambda _device: 0.0)


@pytest.fixture(params=[(64,), (1200, 1024), (2, 1024, 8, 64)], ids=["bucketed", "direct", "fragment"])
def shape(request):
    """One shape for each strategy."""
    return request.param


def test_a_second_free_raises_and_hands_nothing_out_twice(manager, shape):
    t = manager.allocate(Q, shape)
    manager.deallocate(t)
    with pytest.raises(BufferStateError, match="deallocated already"):
        manager.deallocate(t)
    a, b = manager.allocate(Q, shape), manager.allocate(Q, shape)
    assert a.data_ptr() != b.data_ptr()


def test_a_second_free_after_eviction_raises(manager, shape):
    t = manager.allocate(Q, shape)
    manager.deallocate(t)
    manager.clear_cache()
    with pytest.raises(BufferStateError, match="not a buffer in use"):
        manager.deallocate(t)


def test_a_tracked_manager_catches_a_stale_handle_whose_buffer_was_handed_out_again(shape):
    manager = AttentionBufferManager()
    stale = manager.allocate(Q, shape)
    address = stale.data_ptr()
    manager.deallocate(stale)
    fresh = manager.allocate(Q, shape)
    assert fresh.data_ptr() == address
    with pytest.raises(BufferStateError):
        manager.deallocate(stale)
    fresh.fill_(1)
    stale.fill_(2)
    assert float(fresh.min()) == 1
    manager.deallocate(fresh)
    assert manager.get_stats()["quarantined"] == 0


@pytest.mark.parametrize("foreign", [torch.empty(4), None, "tensor"])
def test_a_foreign_tensor_raises(manager, foreign):
    manager.allocate(Q, (4,))
    with pytest.raises(BufferStateError, match="tensor"):
        manager.deallocate(foreign)


def test_a_view_of_a_buffer_is_not_the_buffer(manager):
    t = manager.allocate(Q, (4, 4))
    for other in (t[0], t.view(16), t.detach(), t.data):
        with pytest.raises(BufferStateError, match="view of a buffer"):
            manager.deallocate(other)


def test_an_address_reused_by_a_foreign_tensor_is_not_the_buffer(manager):
    """The dropped buffer's Python object can live on as another tensor with the same id."""
    for _ in range(50):
        t = manager.allocate(Q, (4,))
        known = id(t)
        del t
        foreign = torch.empty(4)
        if id(foreign) == known:
            with pytest.raises(BufferStateError):
                manager.deallocate(foreign)
            return
    pytest.skip("the interpreter never reused the address")


def test_a_wrong_type_raises_and_the_buffer_stays_in_use(manager):
    t = manager.allocate(Q, (4,))
    with pytest.raises(BufferStateError, match="this buffer has type QUERY"):
        manager.deallocate(t, K)
    manager.deallocate(t, "query")


def test_a_tensor_in_a_graph_raises(manager):
    leaf = manager.allocate(Q, (4,))
    leaf.requires_grad_()
    with pytest.raises(BufferStateError, match="requires_grad=True"):
        manager.deallocate(leaf)
    leaf.requires_grad_(requires_grad=False)
    manager.deallocate(leaf)
    result = manager.allocate(K, (4,))
    result.add_(torch.ones(4, requires_grad=True))
    with pytest.raises(BufferStateError, match="grad_fn"):
        manager.deallocate(result)
    assert manager.get_stats()["bytes_in_use"] > 0


HOLDERS = {
    "view": lambda t: t[0],
    "reshaped": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: t.__dlpack__(),
    "storage": lambda t: t.untyped_storage(),
    "typed view": lambda t: t.view(torch.int32),
    "saved by autograd": lambda t: torch.ones(t.shape, requires_grad=True) * t,
    "view saved by autograd": lambda t: torch.ones(t.shape[0], requires_grad=True) * t.view(t.shape[0], -1)[:, 0],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_freed_buffer_that_something_still_holds_is_quarantined(manager, shape, holder):
    t = manager.allocate(Q, shape)
    t.fill_(3)
    address = t.data_ptr()
    held = HOLDERS[holder](t)
    manager.deallocate(t)
    stats = manager.get_stats()
    assert (stats["quarantined"], stats["bytes_in_use"], stats["bytes_cached"]) == (1, 0, 0)
    others = [manager.allocate(Q, shape) for _ in range(3)]
    assert address not in [o.data_ptr() for o in others]
    for other in others:
        other.fill_(5)
    assert float(t.min()) == float(t.max()) == 3
    with pytest.raises(BufferStateError):
        manager.deallocate(t)
    del held


def test_autograd_gets_the_right_gradient_from_a_freed_buffer(manager):
    x = torch.ones(64, requires_grad=True)
    t = manager.allocate(Q, (64,))
    t.fill_(3)
    y = (x * t).sum()
    manager.deallocate(t)
    del t
    manager.allocate(Q, (64,)).fill_(9)
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((64,), 3.0))


def test_a_quarantined_block_returns_to_its_slab_when_its_holder_is_deleted(manager):
    shape = (2, 1024, 8, 64)
    t = manager.allocate(Q, shape)
    address, view = t.data_ptr(), t[0]
    manager.deallocate(t)
    assert manager.allocate(Q, shape).data_ptr() != address
    del t, view
    manager.clear_cache()
    assert manager.allocate(Q, shape).data_ptr() == address


def test_a_variable_that_still_names_a_freed_buffer_does_not_prevent_its_reuse(manager, shape):
    names = []
    for _ in range(5):
        names.append(manager.allocate(Q, shape))
        manager.deallocate(names[-1])
    stats = manager.get_stats()
    assert (stats["cache_hits"], stats["quarantined"]) == (4, 0)


def test_a_freed_buffer_with_a_new_view_is_not_handed_out():
    manager = AttentionBufferManager()
    t = manager.allocate(Q, (64,))
    manager.deallocate(t)
    late = t[0:2]
    with manager.scope("next"):
        assert manager.allocate(Q, (64,)).data_ptr() != late.data_ptr()
    stats = manager.get_stats()
    assert (stats["quarantined"], stats["cache_hits"], stats["cache_misses"]) == (1, 0, 2)
    assert stats["per_scope"]["next"]["cache_hits"] == 0


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_every_kind_of_holder_made_after_the_free_is_seen(holder, shape, named):
    manager = AttentionBufferManager()
    t = manager.allocate(Q, shape)
    manager.deallocate(t)
    address, late = t.data_ptr(), HOLDERS[holder](t)
    if not named:
        del t
    assert manager.allocate(Q, shape).data_ptr() != address
    assert manager.get_stats()["quarantined"] == 1
    del late


def test_changes_of_shape_by_a_caller_do_not_reach_the_next_caller(manager):
    for change in (
        lambda t: t.t_(),
        lambda t: t.resize_(2, 2),
        lambda t: t.unsqueeze_(0),
        lambda t: t.as_strided_((2,), (1,), 5),
    ):
        manager.clear_cache()
        t = manager.allocate(Q, (8, 4))
        change(t)
        manager.deallocate(t)
        del t
        again = manager.allocate(Q, (8, 4))
        assert (again.shape, again.stride()) == ((8, 4), (4, 1))
        again.fill_(1)


def test_a_buffer_whose_storage_was_exchanged_is_not_cached(manager, shape):
    t = manager.allocate(Q, shape)
    t.data = torch.zeros(shape)
    manager.deallocate(t)
    stats = manager.get_stats()
    assert (stats["quarantined"], stats["bytes_cached"]) == (1, 0)


def test_a_holder_of_the_exchanged_storage_is_not_taken_for_the_tensor(manager, shape):
    t = manager.allocate(Q, shape)
    alias = t.detach()
    t.data = torch.zeros(shape)
    manager.deallocate(t)
    assert manager.allocate(Q, shape).data_ptr() != alias.data_ptr()
    assert manager.get_stats()["quarantined"] == 1


def test_debug_does_not_poison_a_storage_that_the_caller_put_into_the_buffer():
    manager = AttentionBufferManager(debug=True)
    t = manager.allocate(Q, (64,))
    alias, other = t.detach(), torch.ones(64)
    t.data = other
    manager.deallocate(t)
    assert torch.equal(other, torch.ones(64))
    assert manager.get_stats()["quarantined"] == 1
    del alias


@pytest.mark.parametrize("change", [lambda t: t.resize_(3), lambda t: t.resize_(3, 2), lambda t: t.t_()])
def test_the_layout_that_a_stale_handle_changed_is_undone(manager, change):
    for held in (True, False):
        t = manager.allocate(Q, (2, 3))
        manager.deallocate(t)
        change(t)
        if not held:
            del t
        again = manager.allocate(Q, (2, 3))
        assert again.shape == (2, 3) and again.is_contiguous() and again.untyped_storage().nbytes() >= 24
        again.fill_(1)
        manager.deallocate(again)


def test_dropped_tensors_are_not_leaked(manager, shape):
    """The code that this replaces leaked one returned output per forward, because nobody deallocated it."""
    for _ in range(20):
        manager.allocate(Q, shape)
    stats = manager.get_stats()
    assert (stats["bytes_in_use"], stats["bytes_cached"], stats["bytes_reserved"]) == (0, 0, 0)
    assert len(manager._cache.slots) == 0


def test_a_dropped_tensor_in_a_graph_lives_as_long_as_the_graph(manager):
    x = torch.ones(4096, requires_grad=True)
    t = manager.allocate(Q, (4096,))
    t.fill_(3)
    y = x * t
    del t
    gc.collect()
    assert manager.get_stats()["bytes_in_use"] == 4096 * 4
    manager.allocate(Q, (4096,)).fill_(9)
    y.sum().backward()
    assert x.grad is not None and float(x.grad[0]) == 3
    del y
    gc.collect()
    assert manager.get_stats()["bytes_in_use"] == 0


def test_the_memory_of_a_dropped_tensor_is_released_at_once():
    manager = AttentionBufferManager(lightweight=True)
    t = manager.allocate(Q, (1200, 1024))
    storage = manager._cache.slots[id(t)].storage_object
    assert storage() is not None
    del t
    assert storage() is None


def test_a_deleted_manager_releases_its_cache(shape):
    gc.disable()
    try:
        manager = AttentionBufferManager()
        t = manager.allocate(Q, shape)
        storage = manager._cache.slots[id(t)].storage_object
        manager.deallocate(t)
        del t, manager
        assert storage() is None
    finally:
        gc.enable()


def test_buffers_outlive_their_manager(shape):
    manager = AttentionBufferManager()
    t = manager.allocate(Q, shape)
    del manager
    gc.collect()
    t.fill_(2)
    assert float(t.sum()) == 2 * t.numel()


def test_buffers_are_ordinary_tensors_inside_and_outside_inference_mode(manager):
    with torch.inference_mode():
        manager.deallocate(manager.allocate(Q, (64,)))
        manager.deallocate(manager.allocate(Q, (60,)))
        kept = manager.allocate(Q, (60,))
        manager.deallocate(kept)
        t = manager.allocate(Q, (60,))
        assert not t.is_inference()
        manager.deallocate(t)
    t = manager.allocate(Q, (60,))
    t.fill_(2)
    x = torch.ones(60, requires_grad=True)
    (x * t).sum().backward()
    assert x.grad is not None and float(x.grad[0]) == 2


def test_a_buffer_can_be_written_in_an_autograd_graph(manager):
    """No buffer is a view: a view made without grad could not be written with it."""
    for shape in ((64,), (60,), (2, 1024, 8, 64)):
        t = manager.allocate(Q, shape, zero_init=True)
        assert t._base is None
        t.add_(torch.ones(shape, requires_grad=True))
        assert t.grad_fn is not None


class FreesAtTheEnd:
    """An object in a reference cycle, so that only the garbage collector deletes it. `held` has its buffer."""

    def __init__(self, manager, held):
        self.manager, self.held, self.me = manager, held, self
        held.append(manager.allocate(K, (64,)))

    def __del__(self):
        self.manager.deallocate(self.held.pop(), K)


@pytest.mark.parametrize("buffer_in_cycle", [True, False])
def test_a_finalizer_that_frees_does_not_deadlock(manager, buffer_in_cycle):
    """The garbage collector runs inside the manager too, and the finalizers that it calls may free buffers."""
    done = threading.Event()
    outside: list[torch.Tensor] = []

    def work():
        for n in range(200):
            FreesAtTheEnd(manager, [] if buffer_in_cycle else outside)
            manager.deallocate(manager.allocate(Q, (64 + 64 * (n % 40),)))
        gc.collect()
        done.set()

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert done.wait(20), "the manager waits for itself"
    finally:
        gc.set_threshold(*threshold)
    assert manager.get_stats()["bytes_in_use"] == 0


def test_a_buffer_freed_during_a_search_of_the_cache_is_cached_at_once(manager, monkeypatch):
    held = manager.allocate(K, (64,))
    make_room = BufferCache.make_room

    def freeing(cache, nbytes):
        monkeypatch.undo()
        manager.deallocate(held, K)
        assert manager.get_stats()["per_type"]["key"]["buffers_cached"] == 1
        return make_room(cache, nbytes)

    monkeypatch.setattr(BufferCache, "make_room", freeing)
    manager.allocate(Q, (64,))
    assert manager.get_stats()["per_type"]["key"]["buffers_cached"] == 1


@pytest.mark.parametrize("change", ["take", "sweep"])
def test_a_finalizer_that_runs_during_a_change_of_a_slab_does_not_deadlock(manager, monkeypatch, change):
    """The finalizer gets memory of torch's allocator, and the buffer that it frees is collected later."""
    held = manager.allocate(K, (64,))
    inner = getattr(BucketSlab, change)

    def finalizing(slab, *arguments):
        monkeypatch.undo()
        manager.deallocate(held, K)
        manager.clear_cache()
        manager.allocate(Q, (64,)).fill_(1)
        return inner(slab, *arguments)

    monkeypatch.setattr(BucketSlab, change, finalizing)
    manager.allocate(Q, (64,)).fill_(2)
    assert manager.get_stats()["strategies"]["direct"] == 1
    manager.clear_cache()
    assert manager.get_stats()["bytes_reserved"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_debug_poisons_and_reports_a_write_after_free(dtype, shape):
    manager = AttentionBufferManager(debug=True)
    t = manager.allocate(Q, shape, dtype, zero_init=True)
    manager.deallocate(t)
    if dtype.is_floating_point or dtype.is_complex:
        assert bool(t.isnan().all())
    else:
        assert set(t.untyped_storage()[:8].tolist()) == {0xCB}
    again = manager.allocate(Q, shape, dtype)
    manager.deallocate(again)
    again.view(-1)[5] = 1
    with pytest.raises(BufferStateError, match=r"QUERY buffer .* was written after deallocate"):
        manager.allocate(Q, shape, dtype)
    manager.deallocate(manager.allocate(Q, shape, dtype))


def test_debug_reports_a_write_after_free_when_the_buffer_is_reshaped():
    manager = AttentionBufferManager(debug=True)
    t = manager.allocate(Q, (100, 10))
    manager.deallocate(t)
    t[3] = 7
    with pytest.raises(BufferStateError, match="first at byte 122"):
        manager.allocate(Q, (99, 10))


def test_a_view_made_after_the_free_is_seen_by_a_request_of_another_shape():
    manager = AttentionBufferManager()
    t = manager.allocate(Q, (64, 10))
    manager.deallocate(t)
    late = t[0:2]
    with manager.scope("another"):
        assert manager.allocate(Q, (10, 64)).data_ptr() != late.data_ptr()
    stats = manager.get_stats()
    assert (stats["quarantined"], stats["per_scope"]["another"]["cache_hits"]) == (1, 0)


def test_a_square_buffer_that_was_transposed_is_handed_out_untransposed(manager):
    t = manager.allocate(Q, (8, 8))
    manager.deallocate(t.t_())
    del t
    assert manager.allocate(Q, (8, 8)).stride() == (8, 1)


def test_a_buffer_freed_while_the_cache_is_cleared_is_cached_once(manager, monkeypatch):
    held = manager.allocate(K, (64,))
    manager.deallocate(manager.allocate(Q, (64,)))
    drop = BufferCache._drop

    def freeing_drop(cache, slot):
        monkeypatch.undo()
        manager.deallocate(held, K)
        return drop(cache, slot)

    monkeypatch.setattr(BufferCache, "_drop", freeing_drop)
    manager.clear_cache(Q)
    per_type = manager.get_stats()["per_type"]
    assert (per_type["query"]["buffers_cached"], per_type["key"]["buffers_cached"]) == (0, 1)
