"""Modules on the buffer manager: dilated attention as in the specification, multihead attention, plain attention."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilegrad
from tilegrad.memory import AttentionBufferManager, create_attention_buffer_manager
from tilegrad.nn import Attention, DilatedAttention, ImprovedDilatedAttentionV2, MultiheadDilatedAttention

EXAMPLE = """
attention = ImprovedDilatedAttentionV2(
    segment_lengths=[256, 512, 1024],
    dilation_rates=[1, 2, 4],
    enable_buffer_manager=True,
    enable_buffer_reuse=True,
    enable_preallocation=False  # Optional
)

# Forward pass automatically uses optimized allocation
output = attention(query, key, value)

# Check buffer statistics
stats = attention.get_buffer_stats()
print(f"Cache hits: {stats['cache_hits']}")
print(f"Cache hit rate: {stats['cache_hit_rate']:.2%}")
"""


def qkv(*shape: int, **form: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(**form).requires_grad_() for _ in range(3)]


def test_the_specifications_example_runs_as_printed() -> None:
    query, key, value = qkv(1, 1024, 3, 16, dtype=torch.float32)
    names: dict[str, Any] = {"query": query, "key": key, "value": value}
    names["ImprovedDilatedAttentionV2"] = ImprovedDilatedAttentionV2
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(EXAMPLE, names)
    assert printed.getvalue() == "Cache hits: 0\nCache hit rate: 0.00%\n"
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    want = tilegrad.dilated_attention(q, k, v, (256, 512, 1024), (1, 2, 4)).transpose(1, 2)
    assert torch.equal(names["output"], want) and ImprovedDilatedAttentionV2 is DilatedAttention


def step(attention: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    y = attention(*tensors)
    return y, *torch.autograd.grad(y.square().sum(), tensors)


def tensor_bytes() -> int:
    """The bytes of all tensors that Python can reach."""
    gc.collect()
    # a wrapper left by a transform of another test has no storage
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and not wrapped(x)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["head_groups", "longnet"])
def test_no_buffer_leaks_and_every_buffer_is_reused(mode: Any, steps: int) -> None:
    attention = DilatedAttention([4, 9], [1, 2], mode=mode, dropout=0.1)
    tensors = qkv(1, 9, 2, 4, dtype=torch.float32)
    for _ in range(2):
        step(attention, tensors)
    before, bytes_before = attention.get_buffer_stats(), tensor_bytes()
    for _ in range(steps):
        step(attention, tensors)
    after = attention.get_buffer_stats()
    assert tensor_bytes() == bytes_before
    for name in ("bytes_in_use", "bytes_cached", "bytes_reserved", "bytes_peak", "cache_misses", "quarantined"):
        assert after[name] == before[name], name
    assert after["bytes_in_use"] == after["quarantined"] == 0
    assert after["cache_hits"] - before["cache_hits"] >= 2 * steps
    attention.cleanup_buffers()
    assert attention.get_buffer_stats()["bytes_cached"] == 0


def test_a_forward_without_a_backward_leaks_no_buffer() -> None:
    attention = DilatedAttention([4, 9], [1, 2], mode="longnet")
    tensors = qkv(1, 9, 2, 4, dtype=torch.float32)
    for _ in range(3):
        attention(*tensors)
        with torch.no_grad():
            attention(*tensors)
    assert attention.get_buffer_stats()["bytes_in_use"] == 0


@pytest.mark.parametrize("mode", ["head_groups", "longnet"])
def test_the_returned_tensors_are_not_buffers_of_the_manager(mode: Any) -> None:
    manager = AttentionBufferManager()
    attention = DilatedAttention([16, 50], [1, 3], mode=mode, manager=manager)
    returned = step(attention, qkv(2, 50, 4, 8, dtype=torch.float32))
    held = [(slot.ptr, slot.ptr + slot.storage_bytes) for pool in manager._cache.pools.values() for slot in pool.free]
    assert held
    for x in returned:
        assert not any(first <= x.data_ptr() < last for first, last in held)


@pytest.mark.parametrize("mode", ["head_groups", "longnet"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_scale_multiplies_the_scores(mode: Any, dropout: float) -> None:
    q, k, v = qkv(2, 50, 4, 16, dtype=torch.float32)
    scaled = DilatedAttention([16, 50], [1, 3], dropout, mode, scale=0.5)
    plain = DilatedAttention([16, 50], [1, 3], dropout, mode)
    results = []
    for attention, query in ((scaled, q), (plain, 2 * q)):  # 1/√16 = 0.25
        torch.manual_seed(0)
        results.append(step(attention, [query.detach().requires_grad_(), k, v]))
    (y, dq, *rest), (want, dq_plain, *rest_plain) = results
    for got, expected in zip((y, dq, *rest), (want, 2 * dq_plain, *rest_plain), strict=True):
        torch.testing.assert_close(got, expected)
    assert not torch.allclose(y, step(plain, [q, k, v])[0])
    compiled = torch.compile(scaled.eval(), backend="eager")
    torch.testing.assert_close(compiled(q, k, v), scaled(q, k, v))
    assert "scale=0.5" in repr(scaled) and scaled.buffer_manager is scaled.manager is not None


def test_the_manager_does_not_change_bits_also_while_a_graph_is_kept() -> None:
    for mode in ("head_groups", "longnet"):
        options: dict[str, Any] = {"mode": mode}
        managed = DilatedAttention([16, 50], [1, 3], **options)
        bare = DilatedAttention([16, 50], [1, 3], enable_buffer_manager=False, **options)
        tensors = qkv(2, 50, 4, 8, dtype=torch.float32)
        y = managed(*tensors)
        first = torch.autograd.grad(y.square().sum(), tensors, retain_graph=True)
        again = torch.autograd.grad(y.square().sum(), tensors)
        assert all(map(torch.equal, first, again))
        assert all(map(torch.equal, (y, *first), step(bare, tensors)))
        bare.cleanup_buffers()
        assert bare.get_buffer_stats() == {}


def test_a_backward_runs_after_its_module_was_deleted() -> None:
    attention = DilatedAttention([4], [1])
    tensors = qkv(1, 9, 2, 4)
    want = step(attention, tensors)
    y = attention(*tensors)
    del attention
    gc.collect()
    assert all(map(torch.equal, want[1:], torch.autograd.grad(y.square().sum(), tensors)))


@pytest.mark.filterwarnings("ignore:COMM buffers are not pinned")
def test_a_module_requests_buffers_by_type_and_passes_options_to_its_manager() -> None:
    tensors = qkv(1, 64, 4, 8, dtype=torch.float32)
    shared = AttentionBufferManager()
    for mode in ("head_groups", "longnet"):
        step(DilatedAttention([16, 64], [1, 4], mode=mode, manager=shared), tensors)
    used = {name for name, stats in shared.get_stats()["per_type"].items() if stats["cache_misses"]}
    assert used == {"temp", "output"}
    forgetful = DilatedAttention([16, 64], [1, 4], enable_buffer_reuse=False)
    step(forgetful, tensors)
    assert forgetful.get_buffer_stats()["bytes_cached"] == forgetful.get_buffer_stats()["cache_hits"] == 0
    ready = DilatedAttention([16, 64], [1, 4], enable_preallocation=True)
    assert ready.get_buffer_stats()["bytes_cached"] > 0


def test_a_module_can_be_copied_and_pickled() -> None:
    attention = DilatedAttention([4, 9], [1, 2], mode="longnet")
    tensors = qkv(1, 9, 2, 4)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert other.manager is not None and other.manager is not attention.manager
        assert torch.equal(other(*tensors), attention(*tensors))
    bare = DilatedAttention([4, 9], [1, 2], enable_buffer_manager=False)
    assert copy.deepcopy(bare).manager is None
    assert copy.deepcopy(Attention(8, 2, manager=AttentionBufferManager())).manager is None


def test_dropout_is_active_only_in_training() -> None:
    attention = DilatedAttention([4, 9], [1, 2], dropout=0.5)
    tensors = qkv(1, 9, 2, 4)
    assert not torch.equal(attention(*tensors), attention(*tensors))
    attention.eval()
    assert torch.equal(attention(*tensors), DilatedAttention([4, 9], [1, 2])(*tensors))


@pytest.mark.parametrize("batch_first", [False, True])
def test_with_one_segment_the_multihead_module_equals_multihead_attention(batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(24, 4, batch_first=batch_first, dtype=torch.float64)
    ours = MultiheadDilatedAttention(24, 4, [100], [1], batch_first=batch_first, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, key, value = qkv(3, 10, 24)
    for given in ((x, x, x), (x, key, value), (x[0], key[0], value[0])):
        y, weights = ours(*given)
        torch.testing.assert_close(y, theirs(*given)[0])
        assert weights is None
    causal = nn.Transformer.generate_square_subsequent_mask(10 if batch_first else 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x, is_causal=True)[0], theirs(x, x, x, attn_mask=causal)[0])


def test_the_multihead_module_is_projections_around_dilated_attention() -> None:
    attention = MultiheadDilatedAttention(24, 4, [4, 10], [1, 3], batch_first=True, mode="longnet", dtype=torch.float64)
    x = qkv(2, 10, 24)[0]
    q, k, v = attention._project(x, x, x)
    o = tilegrad.dilated_attention(q, k, v, (4, 10), (1, 3), mode="longnet", causal=True)
    want = attention.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, is_causal=True)[0], want)
    assert attention.get_buffer_stats()["cache_misses"] > 0
    attention.cleanup_buffers()
    assert attention.get_buffer_stats()["bytes_cached"] == 0
    assert set(dict(attention.named_parameters())) == set(dict(nn.MultiheadAttention(24, 4).named_parameters()))


X, MASK = torch.randn(1, 4, 8), torch.zeros(4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DilatedAttention([4], [1, 2]), "dilation_rates: got 2 for 1 segment_lengths"),
        (lambda: DilatedAttention([4], [0]), r"dilation_rates: got \[0\]"),
        (lambda: DilatedAttention([4], [1], dropout=1.0), "dropout: got 1.0; accepted: a number p"),
        (
            lambda: DilatedAttention([4], [1], enable_buffer_manager=False, manager=AttentionBufferManager()),
            "manager: got a manager with enable_buffer_manager=False",
        ),
        (lambda: DilatedAttention([4], [1])(*[X.view(1, 4, 2, 4)] * 3, attention_mask=MASK), "attn_mask: got a tensor"),
        (lambda: MultiheadDilatedAttention(8, 2, [4, 4, 4], [1, 1, 1]), "num_heads: got 2 for 3 branches"),
        (lambda: MultiheadDilatedAttention(8, 2, [4], [1])(X, attn_mask=MASK), "attn_mask: got a mask"),
        (lambda: MultiheadDilatedAttention(8, 2, [4], [1])(X, key_padding_mask=MASK), "key_padding_mask: got a mask"),
        (lambda: MultiheadDilatedAttention(8, 2, [4], [1])(X, need_weights=True), "need_weights: got True"),
    ],
)
def test_a_bad_argument_of_a_module_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("masked", [False, True])
def test_plain_attention_has_the_same_bits_in_buffers_of_a_manager(masked: bool) -> None:
    manager = create_attention_buffer_manager()
    managed = Attention(24, 4, batch_first=True, num_kv_heads=2, manager=manager, dtype=torch.float64)
    bare = Attention(24, 4, batch_first=True, num_kv_heads=2, dtype=torch.float64)
    bare.load_state_dict(managed.state_dict())
    x = qkv(3, 10, 24)[0]
    mask = torch.randn(10, 10, dtype=torch.float64, requires_grad=True) if masked else None
    results = []
    for attention in (bare, managed, managed, managed):
        y = attention(x, attn_mask=mask, is_causal=not masked)[0]
        leaves = [x, *attention.parameters(), *([] if mask is None else [mask])]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    stats = manager.get_stats()
    assert (stats["cache_misses"], stats["cache_hits"], stats["bytes_in_use"]) == (1, 5, 0)


def test_plain_attention_in_buffers_of_a_manager_has_dropout_and_autocast() -> None:
    attention = Attention(24, 4, dropout=0.5, batch_first=True, manager=create_attention_buffer_manager())
    x = qkv(3, 10, 24, dtype=torch.float32)[0]
    assert not torch.equal(attention(x)[0], attention(x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(x)[0].dtype == torch.bfloat16
    attention(x)[0].sum().backward()
