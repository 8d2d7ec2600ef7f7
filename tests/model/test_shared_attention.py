"""Layers that share backward buffers: exact gradients, lifetimes, pending, memory, files."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilegrad
from tilegrad.memory.types import BufferStateError
from tilegrad.specification.shared_attention import SHARED, WEIGHTS, SharedAttention


def layer(predecessor: SharedAttention | None = None, **more: Any) -> SharedAttention:
    settings: dict[str, Any] = {"n_head": 2, "dtype": torch.float64} | more
    return tilegrad.init_attention(5, 6, 2, is_causal=True, predecessor=predecessor, **settings)


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, y


def autograd(x: Tensor, *weights: Tensor, causal: bool, heads: int) -> Tensor:
    """The layer in torch ops."""
    b, t, c = x.shape
    q, k, v = (torch.nn.functional.linear(x, w).view(b, t, heads, -1).transpose(1, 2) for w in weights[:3])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return torch.nn.functional.linear(o.transpose(1, 2).reshape(b, t, c), weights[3])


@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_those_of_autograd(causal: bool, materialize: bool) -> None:
    made = tilegrad.init_attention(7, 12, 3, causal, n_head=3, dtype=torch.float64, materialize=materialize)
    x, y = torch.randn(2, 3, 7, 12, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), *(getattr(made, w).clone().requires_grad_() for w in WEIGHTS)]
    loss = (autograd(*leaves, causal=causal, heads=3) - y).square().mean()
    expected = torch.autograd.grad(loss, leaves)
    made.forward(x)
    assert made.loss(y) == pytest.approx(loss.item(), rel=1e-12)
    grad_x = torch.empty_like(x)
    made.backward(x, grad_x)
    torch.testing.assert_close(grad_x, expected[0], rtol=1e-11, atol=1e-13)
    for name, gradient in zip(WEIGHTS, expected[1:], strict=True):
        torch.testing.assert_close(getattr(made, f"grad_{name}"), gradient, rtol=1e-11, atol=1e-13)


def test_gradients_equal_central_differences_of_the_loss() -> None:
    made, (x, y) = layer(), data()
    made.forward(x)
    made.loss(y)
    made.backward(x)
    w, index = made.W_k, (1, 2)
    slope = 0.0
    for sign in (1, -1):
        w[index] += sign * 1e-6
        made.forward(x)
        slope += sign * made.loss(y) / 2e-6
        w[index] -= sign * 1e-6
        made.backward(x, grad_output=torch.zeros_like(y))
    assert made.grad_W_k[index].item() == pytest.approx(slope, rel=1e-7)


def step(first: SharedAttention, second: SharedAttention, x: Tensor, y: Tensor) -> None:
    second.forward(first.forward(x))
    second.loss(y)
    second.backward(first.output, grad_x=first.grad_output)
    first.backward(x, grad_output=first.grad_output)


def test_sharing_buffers_does_not_change_the_bits_of_gradients() -> None:
    x, y = data()
    gradients = []
    for sharing in (True, False):
        first = layer()
        second = layer(first if sharing else None, seed=1)
        assert second.owns_grad_buffers is not sharing
        step(first, second, x, y)
        gradients.append([getattr(one, f"grad_{w}").clone() for one in (first, second) for w in WEIGHTS])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_weight_gradients_accumulate_and_are_zeroed_by_another_call() -> None:
    made, (x, y) = layer(), data()
    for times in (1, 2):
        made.forward(x)
        made.loss(y)
        made.backward(x)
        if times == 1:
            once = made.grad_W_q.clone()
    assert torch.equal(made.grad_W_q, 2 * once)
    made.zero_gradients()
    assert not made.grad_W_q.any()


def test_the_update_is_a_step_of_adamw_with_the_accumulated_gradients() -> None:
    made, (x, y) = layer(), data()
    weight = torch.nn.Parameter(made.W_v.clone())
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for rate in (1e-2, 3e-3):
        made.forward(x)
        made.loss(y)
        made.backward(x)
        before = made.grad_W_v.clone()
        made.update_weights(rate)
        assert torch.equal(made.grad_W_v, before)
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = before
        optimizer.step()
        torch.testing.assert_close(made.W_v, weight.detach())


def test_the_layer_learns() -> None:
    made, (x, y) = layer(), data()
    losses = []
    for _ in range(60):
        made.forward(x)
        losses.append(made.loss(y))
        made.zero_gradients()
        made.backward(x)
        made.update_weights(3e-2)
    assert losses[-1] < 0.6 * losses[0]


def test_the_seven_shared_buffers_have_the_specified_shapes() -> None:
    tiled, whole = layer(), layer(materialize=True)
    for name in SHARED:
        shape = getattr(whole, name).shape
        assert shape == ((2, 2, 5, 5) if name in ("grad_weights", "grad_scores") else (2, 5, 6)), name
        if name not in ("grad_weights", "grad_scores"):
            assert getattr(tiled, name).shape == shape
    x = torch.zeros(1, 1, 4, 4)
    has_tile = tilegrad.explain(x, x, x).kernel == "tiled"  # the native kernel does not expose its tiles
    assert tiled.grad_weights.numel() == tiled.grad_scores.numel() and (tiled.grad_scores.numel() > 0) == has_tile


def test_forward_buffers_stay_separate() -> None:
    """The forward of a later layer does not write the buffers of an earlier one, whose backward is still right."""
    first = layer(seed=1)
    second, (x, y) = layer(predecessor=first, seed=2), data()
    first.forward(x)
    names = ("Q", "K", "V", "attn_output", "output", "lse")
    before = {name: getattr(first, name).clone() for name in names}
    second.forward(first.output)
    assert all(torch.equal(getattr(first, name), before[name]) for name in names)
    own = {getattr(made, name).untyped_storage().data_ptr() for made in (first, second) for name in names}
    shared = {first._live()[name].untyped_storage().data_ptr() for name in first._needs()}
    assert len(own) == 2 * len(names) and not own & shared
    second.loss(y)
    second.backward(first.output, first.grad_output)
    first.backward(x, grad_output=first.grad_output)
    leaves = [getattr(made, name).clone().requires_grad_() for made in (first, second) for name in WEIGHTS]
    out = autograd(autograd(x, *leaves[:4], causal=True, heads=2), *leaves[4:], causal=True, heads=2)
    want = torch.autograd.grad((out - y).square().mean(), leaves)
    got = [getattr(made, f"grad_{name}") for made in (first, second) for name in WEIGHTS]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_gradients_are_close_to_float64_autograd(causal: bool) -> None:
    made = tilegrad.init_attention(70, 64, 3, causal, n_head=4, device="cuda", dtype=torch.float32)
    x, y = torch.randn(2, 3, 70, 64, generator=torch.Generator().manual_seed(0)).cuda()
    made.forward(x)
    loss = made.loss(y)
    made.backward(x)
    leaves = [getattr(made, name).double().requires_grad_() for name in WEIGHTS]
    want = (autograd(x.double(), *leaves, causal=causal, heads=4) - y).square().mean()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    for name, g in zip(WEIGHTS, torch.autograd.grad(want, leaves), strict=True):
        error = (getattr(made, f"grad_{name}") - g).abs().max() / g.abs().max()
        assert error <= 1e-4, name


def test_materialised_matrices_are_the_gradients_of_weights_and_scores() -> None:
    made, (x, y) = layer(materialize=True, n_head=1), data()
    made.forward(x)
    made.loss(y)
    made.backward(x)
    q, k, v = made.Q[:, None], made.K[:, None], made.V[:, None]
    scores = (q @ k.mT / 6**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    scores.requires_grad_()
    weights = scores.softmax(-1)
    weights.retain_grad()
    (weights @ v).backward(made.grad_attn_output[:, None])
    torch.testing.assert_close(made.grad_weights, weights.grad)
    torch.testing.assert_close(made.grad_scores, scores.grad)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_layers_may_be_freed_in_any_order(order: tuple[int, ...]) -> None:
    first = layer()
    second = layer(first)
    third = layer(second)
    layers, (x, y) = [first, second, third], data()
    assert [one.owns_grad_buffers for one in layers] == [True, False, False]
    workspace = first._live().workspace
    for at in order:
        for one in layers:
            if one._lease is not None:
                one.forward(x)
                one.loss(y)
                one.backward(x)
        assert workspace.nbytes > 0
        tilegrad.free_attention(layers[at])
        tilegrad.free_attention(layers[at])
    assert workspace.nbytes == 0


def test_a_layer_used_after_free_raises_an_error() -> None:
    made, (x, y) = layer(), data()
    made.forward(x)
    tilegrad.free_attention(made)
    uses = (
        lambda: made.forward(x), lambda: made.loss(y), lambda: made.backward(x), lambda: made.grad_Q,
        lambda: made.update_weights(0.1), made.zero_gradients, lambda: made.save("x"), lambda: layer(made),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(BufferStateError, match="was freed"):
            use()


def test_the_error_for_a_different_shape_dtype_or_mode_names_both() -> None:
    first = layer()
    with pytest.raises(ValueError, match=r"\(2, 9, 6\).*\(2, 5, 6\)"):
        tilegrad.init_attention(9, 6, 2, is_causal=True, predecessor=first, n_head=2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"float32.*float64"):
        layer(first, dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot share"):
        layer(first, materialize=True)


def test_there_is_one_pending_layer_at_a_time() -> None:
    first, (x, y) = layer(), data()
    second = layer(first, seed=1)
    first.forward(x)
    second.forward(x)
    first.loss(y)
    pending = first.grad_output.clone()
    for use in (lambda: second.loss(y), lambda: second.backward(x, grad_output=y)):
        with pytest.raises(BufferStateError, match=f"{second.name}.*{first.name}"):
            use()
    assert torch.equal(first.grad_output, pending)
    first.backward(x)
    second.loss(y)


def test_another_thread_is_refused_while_pending() -> None:
    made, (x, y) = layer(), data()
    made.forward(x)
    made.loss(y)
    seen: list[BaseException] = []

    def run() -> None:
        try:
            made.backward(x)
        except BufferStateError as error:
            seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(seen) == 1
    made.backward(x)


def test_calls_out_of_order_raise_an_error() -> None:
    made, (x, y) = layer(), data()
    with pytest.raises(BufferStateError, match="forward"):
        made.loss(y)
    made.forward(x)
    with pytest.raises(BufferStateError, match=r"loss\(y\) first or pass grad_output"):
        made.backward(x)


def test_a_bad_argument_of_a_layer_is_named() -> None:
    with pytest.raises(ValueError, match="seq_len: got 0"):
        tilegrad.init_attention(0, 6, 2, is_causal=True)
    with pytest.raises(ValueError, match="n_head: got 4 for d_model 6"):
        tilegrad.init_attention(5, 6, 2, is_causal=True, n_head=4)
    with pytest.raises(ValueError, match="n_head: got 1 for d_model 520"):
        tilegrad.init_attention(5, 520, 2, is_causal=True)
    with pytest.raises(TypeError, match=r"dtype: got torch\.int32"):
        tilegrad.init_attention(5, 6, 2, is_causal=True, dtype=torch.int32)
    with pytest.raises(TypeError, match="predecessor: got int"):
        tilegrad.init_attention(5, 6, 2, is_causal=True, predecessor=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x: got torch\.float64 \(2, 5\)"):
        layer().forward(torch.zeros(2, 5, dtype=torch.float64))


def test_a_saved_layer_is_equal_after_loading(tmp_path: Path) -> None:
    made, (x, y) = layer(), data()
    path = tmp_path / "layer.safetensors"
    for _ in range(2):
        made.forward(x)
        made.loss(y)
        made.backward(x)
        made.update_weights(1e-2)
    made.save(path)
    again = SharedAttention.load(path)
    for one in (made, again):
        one.forward(x)
        one.loss(y)
        one.backward(x)
        one.update_weights(1e-2)
    assert all(torch.equal(getattr(made, w), getattr(again, w)) for w in WEIGHTS)
    assert SharedAttention.load(path, batch_size=4).forward(x.repeat(2, 1, 1)).shape == (4, 5, 6)
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, other)
    with pytest.raises(ValueError, match="is not a saved layer"):
        SharedAttention.load(other)
    made.save(path)
    with pytest.raises(ValueError, match="got a file that tilegrad did not write"):
        made.save(other)


def test_twelve_layers_that_share_need_the_backward_memory_of_one() -> None:
    """It counts the bytes of the distinct storages of the backward buffers."""
    first = tilegrad.init_attention(64, 64, 2, is_causal=True, n_head=2)
    layers = [first]
    for _ in range(11):
        layers.append(tilegrad.init_attention(64, 64, 2, is_causal=True, predecessor=layers[-1], n_head=2))

    def backward_bytes(group: list[SharedAttention]) -> int:
        buffers = (one._live()[name] for one in group for name in one._needs())
        return sum({b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in buffers}.values())

    assert 0 < backward_bytes(layers) <= 1.01 * backward_bytes([first])
    apart = [tilegrad.init_attention(64, 64, 2, is_causal=True, n_head=2) for _ in range(12)]
    assert backward_bytes(apart) == 12 * backward_bytes([first])
