"""The shared dropout mask: the published vectors of Philox4×32-10, and the mask's definition."""

import runpy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilegrad.kernels import philox as module
from tilegrad.kernels.philox import WORK_BUFFERS, drop_mask, philox, round_keys, threshold

# counter, key, output: the known answers that come with Random123
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_philox_gives_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    words = [torch.tensor([c]) for c in counter]
    philox(words, round_keys(key[0] | key[1] << 32), (torch.empty(1).long(), torch.empty(1).long()))
    assert tuple(int(w) for w in words) == output


def test_an_import_under_fake_tensor_mode_leaves_the_numbers_real() -> None:
    """torch.export and torch.compile may be the first to import the module."""
    counter, key, output = VECTORS[2]
    words = [torch.tensor([c]) for c in counter]
    with FakeTensorMode():
        imported = runpy.run_path(str(module.__file__))
    imported["philox"](words, round_keys(key[0] | key[1] << 32), (torch.empty(1).long(), torch.empty(1).long()))
    assert tuple(int(w) for w in words) == output


def test_seed_of_every_kind_gives_the_same_keys() -> None:
    seed = 0xFEDC_BA98_7654_3210
    keys = round_keys(seed)
    assert round_keys(seed - 2**64) == keys
    assert round_keys(torch.tensor(seed - 2**64)) == keys


def test_the_counter_has_the_column_row_head_and_sequence() -> None:
    shape, seed, p = (2, 3, 4, 5), 77, 0.4
    dropped = torch.empty(shape, dtype=torch.bool)
    index = [torch.arange(n) for n in shape]
    work = torch.empty(WORK_BUFFERS, *shape, dtype=torch.int64)
    drop_mask(round_keys(seed), p, *index, dropped=dropped, work=work)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 4), (1, 0, 2, 1)):
        words = [torch.tensor([c]) for c in (j, i, h, b)]
        philox(words, round_keys(seed), (torch.empty(1).long(), torch.empty(1).long()))
        assert bool(dropped[b, h, i, j]) == (int(words[0]) < threshold(p))


def test_the_share_of_dropped_words_is_p() -> None:
    shape = (1, 1, 300, 300)
    dropped = torch.empty(shape, dtype=torch.bool)
    work = torch.empty(WORK_BUFFERS, *shape, dtype=torch.int64)
    drop_mask(round_keys(1), 0.25, *(torch.arange(n) for n in shape), dropped=dropped, work=work)
    assert dropped.double().mean().item() == pytest.approx(0.25, abs=0.01)
