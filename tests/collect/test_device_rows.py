"""The road of rows from a device to the host: finished rows survive whatever the device does afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from sentinel.collect.kernels import TorchKernel, choose_kernel
from sentinel.collect.rows.buffer import EPOCH, SEAL, SLOT_WORDS, WORDS, DeviceStats, StepRows, seals
from sentinel.record import Flag, Kind
from tests.collect.accelerator import Runtime, device_rows

CPU = torch.device("cpu")


def begin(rows: StepRows, number: int) -> None:
    for at in range(number):
        rows.add(at, Kind.ACTIVATION, 0, 0, rows.num_rows, at)


def sealed(stats: DeviceStats, count: int) -> np.ndarray:
    """The words that a kernel leaves in a slot."""
    words = np.zeros((1, SLOT_WORDS), np.uint64)
    words[0, 0], words[0, EPOCH] = count, stats.epoch
    words[0, 5:7] = np.array([-1.0, 1.0]).view(np.uint64)
    words[0, SEAL] = seals(words)[0]
    return words[0]


def write(address: int, words: np.ndarray) -> None:
    """What a device does: write words at an address, without asking anybody."""
    ctypes.memmove(address, np.ascontiguousarray(words).ctypes.data, words.nbytes)


def finished(rows: StepRows, row: int, count: int) -> None:
    stats = rows.on(CPU)
    write(stats.slot(row), sealed(stats, count))


def test_rows_finished_before_a_device_assert_are_left():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 3)
    finished(rows, 0, 10)
    finished(rows, 1, 11)
    rows.on(CPU).slot(2)  # launched, and never run
    runtime.is_dead = True
    num_calls = runtime.num_calls

    assert rows.finish(wait=False) == 1

    assert runtime.num_calls == num_calls
    assert list(rows.array["count"][:3]) == [10, 11, 0]
    assert list(rows.array["flags"][:3]) == [0, 0, Flag.DEGRADED]


def test_a_wait_that_raises_leaves_finished_rows():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    finished(rows, 0, 10)
    rows.on(CPU).slot(1)
    rows.begin_copy()
    runtime.is_dead = True

    assert rows.finish() == 1
    assert list(rows.array["count"][:2]) == [10, 0]


def test_rows_that_are_on_their_way_are_not_completed_early():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 1)
    address = rows.on(CPU).slot(0)
    words = sealed(rows.on(CPU), 10)
    runtime.current.enqueue(lambda: write(address, words))
    rows.begin_copy()

    assert not rows.finish_arrived(), "the work has not been done yet, and nobody waited for it"
    assert rows.array["count"][0] == 0
    runtime.current.run_to(len(runtime.current.work))
    assert rows.finish_arrived()

    assert rows.array["count"][0] == 10


def test_after_a_device_assert_what_arrived_is_completed_early():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    finished(rows, 0, 10)
    rows.on(CPU).slot(1)
    rows.begin_copy()
    runtime.is_dead = True

    assert rows.finish_arrived()
    assert list(rows.array["count"][:2]) == [10, 0]


def test_a_torn_row_is_not_taken():
    rows = device_rows(16)
    begin(rows, 15)
    stats = rows.on(CPU)
    for row in range(14):
        words = sealed(stats, 7)
        # Every other word of the row has not arrived; the last row's all have.
        words[row] ^= np.uint64(1 << (row * 4))
        write(stats.slot(row), words)
    write(stats.slot(14), sealed(stats, 7))

    assert rows.finish() == 14
    assert list(rows.array["count"][:15]) == [0] * 14 + [7]


def test_rows_of_a_former_step_are_not_taken_again():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    finished(rows, 0, 10)
    finished(rows, 1, 11)
    assert rows.finish() == 0
    num_calls = runtime.num_calls
    rows.reset()
    assert runtime.num_calls == num_calls
    begin(rows, 2)
    stats = rows.on(CPU)
    for row in range(2):
        stats.slot(row)
    finished(rows, 1, 12)

    assert rows.finish() == 1
    assert list(rows.array["count"][:2]) == [0, 12]


def test_rows_on_their_way_survive_growth():
    rows = device_rows(2)
    begin(rows, 2)
    stats = rows.on(CPU)
    early = [stats.slot(0), stats.slot(1)]
    rows.grow(8)
    begin(rows, 3)
    assert stats.slots(0, 3) == 0
    assert stats.slots(2, 3) != 0

    for row, address in enumerate(early):
        write(address, sealed(stats, 20 + row))
    for row in range(2, 5):
        finished(rows, row, 20 + row)
    finished(rows, 0, 30)  # measured again, after the growth

    assert rows.finish() == 0
    assert list(rows.array["count"][:5]) == [30, 21, 22, 23, 24]
    rows.reset()
    begin(rows, 1)
    finished(rows, 0, 40)
    assert rows.finish() == 0
    assert rows.array["count"][0] == 40


def test_truncated_rows_are_forgotten():
    rows = device_rows(4)
    begin(rows, 2)
    finished(rows, 0, 10)
    finished(rows, 1, 11)
    rows.truncate(1)
    rows.add(0, Kind.ACTIVATION, 0, 0, 1, 0)

    assert rows.finish() == 0
    assert list(rows.array["count"][:2]) == [10, 0]


def test_finish_waits_for_every_stream_that_filled_rows():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    stats = rows.on(CPU)
    for row, stream in enumerate(runtime.streams):
        runtime.current = stream
        address = stats.slot(row)
        stream.enqueue(lambda address=address, row=row: write(address, sealed(stats, 50 + row)))
    rows.begin_copy()
    begin(rows, 1)  # Work behind the end is not waited for.
    runtime.streams[1].enqueue(lambda: pytest.fail("waited for the next step"))

    assert rows.array["count"][:2].tolist() == [0, 0]
    assert not rows.is_on_host
    assert rows.finish() == 0
    assert rows.array["count"][:2].tolist() == [50, 51]


def test_a_stream_waits_until_counters_are_zero():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 1)
    rows.on(CPU)
    runtime.current = runtime.streams[1]

    rows.on(CPU).slot(0)

    assert len(runtime.streams[1].work) == 1  # the event behind the zeros, on the first stream


def test_rows_of_torch_operations_arrive_sealed():
    kernel = TorchKernel("cuda")
    tensors = [torch.randn(100) + at for at in range(5)]
    rows = device_rows(8)
    begin(rows, 5)
    stats = rows.on(CPU)
    for row in (0, 1, 3, 4):
        kernel._measure_one(tensors[row], stats.staged(row, 1)[0], 0.0, True)
    assert rows.snapshot()["count"].tolist() == [100, 100, 0, 100, 100]
    rows.send()
    stats.slot(2)

    assert rows.finish() == 1
    assert rows.array["count"][:5].tolist() == [100, 100, 0, 100, 100]
    means = [float(tensors[at].mean()) for at in (0, 1, 3, 4)]
    np.testing.assert_allclose(rows.array["mean"][[0, 1, 3, 4]], means, rtol=1e-5)


def test_rows_staged_on_another_stream_are_sent_behind_it():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    stats = rows.on(CPU)
    stats.staged(0, 1)[0, 0] = 60
    before = len(runtime.streams[0].work)
    runtime.current = runtime.streams[1]
    stats.staged(1, 1)[0, 0] = 61
    done = []
    runtime.streams[1].enqueue(lambda: done.append(1))  # the work that writes the second row
    runtime.current = runtime.streams[0]

    rows.begin_copy()

    assert len(runtime.streams[0].work) == before + 1
    runtime.streams[0].work[-1]()
    assert done == [1]
    assert rows.finish() == 0
    assert rows.array["count"][:2].tolist() == [60, 61]


def test_what_was_written_before_growth_can_be_read_after_it():
    rows = device_rows(2)
    begin(rows, 2)
    stats = rows.on(CPU)
    stats.staged(0, 2)[:] = torch.arange(2 * WORDS).view(2, WORDS)
    rows.grow(8)
    begin(rows, 1)

    assert stats.staged(0, 3)[:2].flatten().tolist() == list(range(2 * WORDS))
    assert rows.finish() == 1


def test_seals_of_both_sides_agree():
    words = torch.randint(-(2**62), 2**62, (50, SLOT_WORDS), generator=torch.Generator().manual_seed(0))
    rows = device_rows(50)
    begin(rows, 50)
    stats = rows.on(CPU)
    stats.staged(0, 50)[:] = words[:, :WORDS]
    rows.send()

    slots = stats._slots[0][1].numpy().view(np.uint64)
    np.testing.assert_array_equal(slots[:, SEAL], seals(slots))
    assert len(set(slots[:, SEAL].tolist())) == 50


AFTER_AN_ASSERT = """
    import sys
    import torch
    from sentinel.collect.rows.buffer import StepRows
    from sentinel.collect.kernels import TorchKernel, choose_kernel

    kernel = TorchKernel("cuda") if sys.argv[1] == "torch" else choose_kernel("cuda")
    rows = StepRows(64)
    x = torch.arange(1000.0, device="cuda")
    warm = rows.add(0, 0, 0, 0, 0, 0)
    kernel.measure((x,), rows, warm)
    rows.begin_copy()
    assert rows.finish() == 0
    rows.reset()
    first = [rows.add(at, 0, 0, 0, at, at) for at in range(3)]
    for row in first:
        kernel.measure((x + row,), rows, row)
    many = [rows.add(at, 0, 0, 0, at, at) for at in range(3, 6)]
    kernel.measure([x, x.bfloat16(), x.double()], rows, many[0])
    torch._assert_async(torch.zeros(1, dtype=torch.bool, device="cuda"))
    try:
        kernel.measure((x,), rows, rows.add(6, 0, 0, 0, 6, 6))
        torch.cuda.synchronize()
        sys.exit("the assert did not fire")
    except RuntimeError:
        pass
    missing = rows.finish(wait=False)
    print(missing, rows.array["count"][:7].tolist(), rows.array["mean"][:3].tolist())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_rows_before_a_real_device_assert_are_left(kernel):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AFTER_AN_ASSERT), kernel], capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "1 [1000, 1000, 1000, 1000, 1000, 1000, 0] [499.5, 500.5, 501.5]", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_kernel_of_a_gpu_is_tritons():
    pytest.importorskip("triton")

    assert choose_kernel("cuda").name == "triton"


def test_a_step_that_ends_behind_a_device_assert_hands_over_what_was_finished_before():
    runtime = Runtime()
    rows = device_rows(4, runtime)
    begin(rows, 2)
    finished(rows, 0, 10)
    rows.on(CPU).slot(1)
    runtime.is_dead = True

    rows.begin_copy()

    assert rows.finish_arrived()
    assert list(rows.array["count"][:2]) == [10, 0]
    assert list(rows.array["flags"][:2]) == [0, Flag.DEGRADED]
