"""Memory that devices write into: never given back to torch, handed out again when nobody uses it any more."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from sentinel.collect.rows.pinned import SLAB, SMALLEST, PinnedMemory
from sentinel.collect.rows.scalars import NOT_ARRIVED, has_arrived, resolver


class Host:
    """Hands out memory that is not pinned, and keeps what it handed out."""

    def __init__(self) -> None:
        self.slabs: list[torch.Tensor] = []

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.slabs.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.slabs[-1]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.float64), ((7,), torch.uint8), ((3, 5), torch.float32), ((4096, 16), torch.int64), ((1, 163), torch.int32)],
)
def test_a_block_is_a_dense_tensor_of_its_own(shape, dtype):
    host = Host()
    memory = PinnedMemory(host)
    tensors = [memory.empty(shape, dtype) for _ in range(5)]

    assert {(one.shape, one.dtype, one.is_contiguous(), one.data_ptr() % SMALLEST) for one in tensors} == {
        (torch.Size(shape), dtype, True, 0)
    }
    for at, one in enumerate(tensors):
        one.fill_(at)
    assert [set(one.reshape(-1).tolist()) for one in tensors] == [{at} for at in range(5)]


def test_an_empty_tensor_takes_nothing():
    host = Host()

    assert PinnedMemory(host).empty((0, 3), torch.float32).shape == (0, 3)
    assert not host.slabs


def test_what_was_dropped_is_handed_out_again():
    host = Host()
    memory = PinnedMemory(host)
    for _ in range(100):
        large, small = memory.empty((1 << 20,), torch.uint8), memory.empty((), torch.float64)
        assert large.data_ptr() != small.data_ptr()
        del large, small

    assert [len(slab) for slab in host.slabs] == [1 << 20, SLAB]


def test_what_is_in_use_is_not_handed_out():
    memory = PinnedMemory(Host())
    kept = [memory.empty((), torch.float64) for _ in range(3 * SLAB // SMALLEST)]

    assert len({one.data_ptr() for one in kept}) == len(kept)


def test_torch_never_gets_memory_back():
    host = Host()
    memory = PinnedMemory(host)
    memory.empty((8,), torch.int64)
    host.slabs.append(torch.empty(SLAB, dtype=torch.uint8))
    del memory

    assert sys.getrefcount(host.slabs[0]) == sys.getrefcount(host.slabs[1]) + 1, "a reference that nobody drops"


def test_threads_that_take_and_drop_share_no_block():
    memory = PinnedMemory(Host())
    mixed = []

    def work(number: int) -> None:
        for _ in range(2000):
            one = memory.empty((4,), torch.int64).fill_(number)
            if one.tolist() != [number] * 4:
                mixed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not mixed


def test_a_number_that_a_failed_device_never_copied_is_left_out():
    lost = torch.tensor(NOT_ARRIVED).view(torch.float64)
    nan = torch.tensor(float("nan"), dtype=torch.float64)

    told = resolver({"lost": lost, "nan": nan, "loss": torch.tensor(2.0, dtype=torch.float64), "lr": 0.5})()

    assert set(told) == {"nan", "loss", "lr"}
    assert (told["loss"], told["lr"]) == (2.0, 0.5)
    assert has_arrived(nan) and not has_arrived(lost)
