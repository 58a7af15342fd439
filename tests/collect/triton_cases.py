"""The GPU's kernel against float64: under Triton's interpreter, and on a GPU.

test_triton_kernel.py runs them with TRITON_INTERPRET=1, in its short form those that are not marked long;
benchmarks/gpu/correctness.py runs all on the device that TRITON_CASES_DEVICE names, where every case is measured twice and
must give the same bits. Tensors are small: the interpreter takes milliseconds for what a GPU does in one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sentinel.collect.kernels import NativeKernel, TorchKernel
from sentinel.collect.kernels import triton_moments as device_code
from sentinel.collect.kernels.triton_kernel import CaptureSwitch, Tables, TritonKernel, tiles_of
from sentinel.collect.rows.buffer import StepRows
from sentinel.errors import SentinelError
from sentinel.moments import Moments
from sentinel.record import STATISTICS, Flag, Kind
from tests.collect.accelerator import device_rows
from tests.collect.test_kernels import checksum_of, strided_tensors


def patched_once() -> None:
    """Have the interpreter replace the functions of triton.language once a launch, as it needs, and reduce by halves.

    It replaces them again at every call of a function within a kernel, and calls the function of a reduction for each pair
    of elements by itself: most of the time that the cases take. A GPU reduces by halves too.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_what_is_not(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is core or value is interpreter.tl]
        is_patched = not any(core.is_builtin(module.load) for module in modules)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    def reduced_by_halves(self: Any, tensors: tuple[Any, ...]) -> list[Any]:
        assert self.axis == 0 and not self.keep_dims, "no kernel of ours reduces in another way"
        types = [tensor.dtype for tensor in tensors]
        arrays = [tensor.handle.data for tensor in tensors]
        while len(arrays[0]) > 1:
            half = len(arrays[0]) // 2
            pairs = [self.to_tensor(part, dtype) for side in (slice(half), slice(half, None))
                     for part, dtype in zip([array[side] for array in arrays], types, strict=True)]  # fmt: skip
            arrays = [tensor.handle.data for tensor in self.combine_fn.fn(*pairs)]
        return [self.to_tensor(array[0], dtype) for array, dtype in zip(arrays, types, strict=True)]

    interpreter._patch_lang = patch_what_is_not
    interpreter.ReduceOps.generic_reduce = reduced_by_halves


DEVICE = os.environ.get("TRITON_CASES_DEVICE", "cpu")
HERE = torch.device(DEVICE) if DEVICE == "cpu" else torch.device(DEVICE, 0)
assert DEVICE != "cpu" or os.environ.get("TRITON_INTERPRET") == "1", "run through test_triton_kernel.py"

# The interpreter computes with numpy, which tells of every NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if DEVICE == "cpu":
    patched_once()

EVERY_FLOAT = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Beside a short case that takes the same branches.
LONG = pytest.mark.long
IS_ALL = os.environ.get("TRITON_CASES") == "all"
FLOATS = EVERY_FLOAT if IS_ALL else [torch.float32]
COUNTS = ("count", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "min", "max")


interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="looks into the interpreter, or at the host alone")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor where kernels run: itself, or a copy of the same layout."""
    return tensor if tensor.device.type == DEVICE else copied(tensor, DEVICE)


def copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a copy that shares nothing with `tensor` and lies in its storage as that does in its own."""
    storage = tensor.detach().untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage).clone().to(device)
    view = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    view = torch._neg_view(view) if tensor.is_neg() else view
    return torch.nn.Parameter(view) if isinstance(tensor, torch.nn.Parameter) else view


def ones(number: int) -> torch.Tensor:
    return torch.ones(number, device=DEVICE)


def kernel_of(**options) -> TritonKernel:
    return TritonKernel(**options)


def measure(*tensors: torch.Tensor, kernel: TritonKernel | None = None, **options) -> Moments:
    kernel = kernel or kernel_of()
    here = [on_device(tensor) for tensor in tensors]
    found = [measured_once(here, kernel, options) for _ in range(1 if DEVICE == "cpu" else 2)]
    assert len({stats.stats.tobytes() for stats in found}) == 1, "the same memory gave other bits"
    return found[0]


def measured_once(tensors: list[torch.Tensor], kernel: TritonKernel, options: dict[str, Any]) -> Moments:
    rows = begun(len(tensors))
    kernel.measure(tensors, rows, 0, **options)
    assert kernel.name == "triton", "it fell back"
    rows.begin_copy()
    assert rows.finish() == 0
    return Moments.from_rows(rows.array[: rows.num_rows])


def begun(number: int, capacity: int = 0) -> StepRows:
    most = max(number, capacity, 1)
    rows = device_rows(most) if DEVICE == "cpu" else StepRows(most)
    for at in range(number):
        rows.add(at, Kind.PARAM, 0, -1, at, at)
    return rows


def assert_measures(*tensors: torch.Tensor, rel: float = 1e-5, zero_eps: float = 0.0, checksum: bool = True) -> None:
    """Every statistic of every tensor is that of its elements in float64, two passes."""
    found = measure(*tensors, zero_eps=zero_eps, checksum=checksum)
    for row, tensor in enumerate(tensors):
        expected = Moments.of(tensor.detach().double().cpu().numpy(), zero_eps)
        std = float(np.nan_to_num(expected.std()[0]))
        for name in COUNTS:
            assert found.stats[name][row] == expected.stats[name][0], name
        for name in STATISTICS:
            slack = {"mean": 1e-6 * std, "skew": 1e-5}.get(name, 0.0)
            value = found.statistic(name)[row]
            assert value == pytest.approx(expected.statistic(name)[0], rel=rel, abs=slack, nan_ok=True), name
        if checksum and tensor.dtype in EVERY_FLOAT:
            assert found.stats["checksum"][row] == checksum_of(tensor.cpu())


def drawn(seed: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- accuracy --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64] if IS_ALL else [torch.float32])
@pytest.mark.parametrize("mean_over_std", [0.0, *(pytest.param(one, marks=LONG) for one in (10.0, 100.0, 1e3)), 1e4])
def test_kurtosis_within_1e_5_of_two_passes(mean_over_std, dtype):
    x = (drawn(1, 20_480) + mean_over_std).to(dtype)

    kurtosis = measure(x).kurtosis()

    assert kurtosis == pytest.approx(Moments.of(x.double().numpy()).kurtosis(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, *(pytest.param(one, marks=LONG) for one in (1e-25, 1e12)), 1e30])
def test_kurtosis_at_every_scale(scale):
    for mean_over_std in (0.0, 100.0):
        x = ((drawn(2, 8192) + mean_over_std) * scale).float()

        assert measure(x).kurtosis() == pytest.approx(Moments.of(x.double().numpy()).kurtosis(), rel=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_size(dtype):
    assert_measures(*(drawn(size, size, dtype) * 2 + 1 for size in (0, 1, 2, 7, 8, 9, 1023, 4096, 8193)))


@pytest.mark.long
@settings(max_examples=8 if IS_ALL else 1, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32), size=st.one_of(st.integers(0, 50), st.integers(0, 9_000)),
    dtype=st.sampled_from(FLOATS), scale=st.integers(-30, 30), mean_over_std=st.sampled_from([0.0, 10.0, 1e4]),
    num_bad=st.integers(0, 8), zeros=st.booleans(), offset=st.integers(0, 9), tail=st.integers(0, 9),
)  # fmt: skip
@example(seed=0, size=8192, dtype=torch.bfloat16, scale=0, mean_over_std=0.0, num_bad=0, zeros=True, offset=0, tail=0)
@example(seed=0, size=9000, dtype=torch.float32, scale=-30, mean_over_std=1e4, num_bad=3, zeros=True, offset=3, tail=1)
def test_random_tensors(seed, size, dtype, scale, mean_over_std, num_bad, zeros, offset, tail):
    x = (drawn(seed, size) + mean_over_std) * 10.0 ** (scale if dtype is not torch.float16 else scale // 15)
    generator = torch.Generator().manual_seed(seed)
    if zeros:
        x *= torch.rand(size, generator=generator) < 0.5
    x = x.to(dtype)
    if size:
        spots = torch.randint(0, size, (num_bad,), generator=generator)
        x[spots] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)[spots % 3]

    # The elements beside the view are no part of it, whatever they are.
    whole = torch.full((offset + size + tail,), torch.nan, dtype=dtype)
    whole[offset : offset + size] = x
    assert_measures(whole[offset : offset + size], rel=2e-5)


def test_unequal_groups_merge_to_the_whole():
    groups = [drawn(3, 5000), drawn(4, 4096) * 1e-3 + 1000, torch.zeros(4096), drawn(5, 4096) * 30 - 50]

    for dtype in (torch.float32, torch.float64) if IS_ALL else (torch.float32,):
        assert_measures(torch.cat(groups).to(dtype))


@pytest.mark.long
def test_more_parts_than_the_threads_that_merge_them():
    # A thread merges parts 0 and 128, another 1 and 129: of other means and sizes, and one of nothing but NaN.
    tile = 4096
    x = drawn(15, 129 * tile + 100).float()
    x[:tile] += 1000
    x[tile : 2 * tile] = torch.nan
    x[128 * tile :] = x[128 * tile :] * 30 - 50

    assert_measures(x)


def test_a_bulk_far_from_the_vectors_that_make_the_centre():
    # Two of eight vectors of a thread make its centre: here all others lie elsewhere.
    x = drawn(6, 16_384).float() * 0.01 + 1000
    x.view(-1, 4096)[:, :512] = 0
    x.view(-1, 4096)[:, 2048:2560] = 0

    assert_measures(x)


# -- what is not a number, and the ends of the range --


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [torch.nan, *(pytest.param(one, marks=LONG) for one in (torch.inf, -torch.inf))])
def test_one_bad_value_anywhere(dtype, bad):
    tile = device_code.TILE_BYTES // dtype.itemsize
    x = drawn(7, tile + 1, dtype)
    for at in (0, tile - 1, tile) if bad != bad else (tile // 2,):
        one = x.clone()
        one[at] = bad
        assert_measures(one)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nothing_finite(bad):
    assert_measures(*(torch.full((1000,), bad, dtype=dtype) for dtype in FLOATS))


def test_nothing_finite_in_a_whole_part():
    x = drawn(8, 12_288).float() + 1e4
    x[:4096] = torch.nan
    x[5000:5003] = torch.tensor([torch.nan, torch.inf, -torch.inf])

    assert_measures(x)


@interpreted
def test_clean_tiles_are_not_counted(monkeypatch):
    """The branch that counts is taken for tiles that hold something else than numbers, or not all of the tensor."""
    calls = []
    counting = device_code._count_and_center
    monkeypatch.setattr(device_code, "_count_and_center", lambda *args: calls.append(1) or counting(*args))
    clean = drawn(9, 3 * 4096).float()
    assert_measures(clean)
    num_clean = len(calls)
    clean[100] = torch.nan
    assert_measures(clean)
    assert num_clean == 0
    assert len(calls) == 1
    assert_measures(clean[1:-1])  # neither the first nor the last tile is whole, and the first holds the NaN
    assert len(calls) == 3


def test_denormals_constants_and_extremes():
    for dtype in (torch.float32, torch.bfloat16):
        assert_measures(drawn(10, 5000, torch.float32).to(dtype) * 1e-41)
    assert_measures(torch.full((9000,), 3e38), torch.tensor([3e38, -3e38] * 3000), torch.full((9000,), -1e-40))
    for dtype in FLOATS:
        constant = measure(torch.full((9001,), 0.1, dtype=dtype))
        assert constant.stats["m2"] == constant.stats["m3"] == constant.stats["m4"] == 0
        assert constant.mean() == torch.tensor(0.1, dtype=dtype).item()
    assert_measures(torch.full((6000,), 1e4 + 1 / 3, dtype=torch.float64))
    one_step = torch.full((9000,), 1.0)
    one_step[5000] = 1 + 2**-23
    assert_measures(one_step)


def test_doubles_past_what_fourth_powers_hold():
    stats = measure(drawn(11, 3000) * 1e150).stats[0]

    assert stats["m4"] == np.inf
    assert stats["m2"] > 0 and np.isfinite(stats["mean"])


@pytest.mark.parametrize("zero_eps", [0.0, 0.1, float("inf")] if IS_ALL else [0.1])
def test_zero_eps(zero_eps):
    assert_measures(torch.linspace(-0.2, 0.2, 4001), torch.tensor([0.1, -0.1]).bfloat16(), zero_eps=zero_eps)
    assert_measures(torch.linspace(-0.2, 0.2, 4096), torch.linspace(-0.2, 0.2, 2048).double(), zero_eps=zero_eps)
    assert_measures(torch.linspace(-0.2, 0.2, 8192).bfloat16(), torch.linspace(-0.2, 0.2, 8192).half(), zero_eps=zero_eps)


# -- which tensors --


@pytest.mark.parametrize("tensor", strided_tensors().values(), ids=strided_tensors().keys())
def test_a_copy_lies_as_its_original_does(tensor):
    copy = copied(tensor, "cpu")

    assert torch.equal(copy, tensor)
    assert (copy.stride(), copy.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    imaginary = torch.view_as_complex(torch.randn(50, 2)).conj().imag
    assert copied(imaginary, "cpu").is_neg() and torch.equal(copied(imaginary, "cpu"), imaginary)


SHORT_LAYOUTS = {"empty", "zero-dim", "offset", "every other", "transposed", "broadcast", "inner slice"}


@pytest.mark.parametrize("tensor", [
    pytest.param(tensor, id=name, marks=() if name in SHORT_LAYOUTS else LONG) for name, tensor in strided_tensors().items()
])  # fmt: skip
def test_any_layout(tensor):
    tensor = tensor[:12, :16, :20] if tensor.dim() == 3 else tensor
    assert_measures(tensor)


@pytest.mark.parametrize("dtype", [
    torch.bool, torch.int64, torch.float8_e4m3fn, *(pytest.param(one, marks=LONG) for one in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e5m2,
    )),
])  # fmt: skip
def test_converted_types(dtype):
    values = drawn(12, 3000).abs() * 3
    tensor = (values > 1) if dtype is torch.bool else values.to(dtype)

    assert_measures(tensor)
    assert_measures(tensor.view(30, 100).t()[::2])


@pytest.mark.long
def test_what_is_read_in_chunks_is_one_row(monkeypatch):
    monkeypatch.setattr("sentinel.collect.kernels.triton_kernel.CHUNK_BYTES", 12_000)
    x = drawn(13, 14_400).float().view(120, 120) + 3

    assert_measures(x[:, ::2])
    assert_measures(x[::2, 1:70].expand(2, 60, 69))
    assert_measures((x[:50] * 100).int())


def test_lazy_negation_and_parameters():
    imaginary = torch.view_as_complex(torch.randn(50, 2)).conj().imag

    assert imaginary.is_neg()
    assert_measures(imaginary)
    assert_measures(torch.nn.Parameter(torch.randn(30, 40)))


@pytest.mark.parametrize("tensor", [
    torch.zeros(3, dtype=torch.complex64),
    *(pytest.param(one, marks=LONG) for one in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta"))),
], ids=["complex", "sparse", "meta"])  # fmt: skip
def test_what_cannot_be_measured_says_so_and_harms_no_other(tensor):
    rows = begun(3)
    kernel = kernel_of()
    tensor = tensor if tensor.is_meta else tensor.to(DEVICE)

    with pytest.raises(SentinelError, match=str(tensor.dtype)):
        kernel.measure([ones(2), tensor, ones(3)], rows, 0)
    with pytest.raises(SentinelError, match=str(tensor.dtype)):
        kernel.measure([tensor], rows, 1)
    rows.begin_copy()
    rows.finish()

    assert list(rows.array["count"]) == [2, 0, 3]


def test_freed_memory_is_not_read():
    flat = on_device(torch.randn(1000))
    view = flat[100:150]
    flat.untyped_storage().resize_(0)

    with pytest.raises(SentinelError, match="freed"):
        measure(view)
    with pytest.raises(SentinelError, match="freed"):
        measure(torch.ones(3), view)


def test_measuring_leaves_no_trace():
    weight = torch.nn.Parameter(on_device(torch.randn(50, 60)))
    inner = (weight * 2).t()[::3]
    rng_state, versions = torch.get_rng_state(), (weight._version, inner._version)

    measure(weight, inner, checksum=True)

    assert torch.equal(torch.get_rng_state(), rng_state)
    assert (weight._version, inner._version) == versions
    inner.sum().backward()


# -- launches --


def test_many_tensors_of_any_kind_in_one_call():
    tensors = [
        *(drawn(at, size, dtype) for at, (size, dtype) in enumerate(
            (size, dtype) for size in (0, 3, 4500) for dtype in FLOATS
        )),
        torch.arange(-5, 100), drawn(30, 600).float().view(20, 30).t(), drawn(31, 600).float()[::2],
    ]  # fmt: skip

    assert_measures(*tensors)


def test_one_and_many_agree_with_the_other_kernels():
    tensors = [drawn(at, 9000, dtype) * 3 + 2 for at, dtype in enumerate(FLOATS)]
    together = measure(*tensors, checksum=True).stats
    alone = np.concatenate([measure(x, checksum=True).stats for x in tensors])

    for other in (NativeKernel(), TorchKernel()):
        rows = StepRows(len(tensors))
        for at in range(len(tensors)):
            rows.add(at, Kind.PARAM, 0, -1, at, at)
        other.measure(tensors, rows, 0, checksum=True)
        expected = Moments.from_rows(rows.array).stats
        for found in (together, alone):
            for name in (*COUNTS, "checksum"):
                np.testing.assert_array_equal(found[name], expected[name], name)
            for name in ("mean", "m2", "m3", "m4"):
                np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, err_msg=name)


@interpreted
def test_the_order_in_which_parts_arrive_does_not_matter(monkeypatch):
    """Programs are free to run in any order; the words come out the same to the last bit."""
    from triton.runtime import interpreter

    x = drawn(14, 4 * 4096).float() * 3 + 1
    expected = measure(x, checksum=True).stats
    ran = []

    class Backwards(interpreter.InterpreterBuilder):
        def set_grid_idx(self, x, y, z):
            ran.append(self.grid_dim[0] - 1 - x)
            return super().set_grid_idx(ran[-1], y, z)

    monkeypatch.setattr(interpreter.interpreter_builder, "__class__", Backwards)
    found = measure(x, checksum=True).stats

    assert ran == list(range(5))[::-1]
    assert found.tobytes() == expected.tobytes()


@pytest.mark.long
def test_tables_are_sent_again_only_when_something_changed(monkeypatch):
    from sentinel.collect.kernels import triton_kernel

    sent = []
    real = triton_kernel._sent
    monkeypatch.setattr(triton_kernel, "_sent", lambda tensor, device: sent.append(tensor.numel()) or real(tensor, device))
    kernel = kernel_of()
    tensors = [on_device(torch.full((100,), float(at))) for at in range(3)]

    assert measure(*tensors, kernel=kernel).mean().tolist() == [0, 1, 2]
    first = len(sent)
    assert measure(*tensors, kernel=kernel).mean().tolist() == [0, 1, 2]
    assert len(sent) == first == 3
    moved = [x + 5 for x in tensors]
    assert measure(*moved, kernel=kernel).mean().tolist() == [5, 6, 7]
    assert len(sent) == first + 1  # the addresses alone
    assert measure(*moved[:2], torch.ones(7), kernel=kernel).mean().tolist() == [5, 6, 1]


@pytest.mark.long
def test_rows_on_both_sides_of_growth():
    rows = begun(2)
    kernel = kernel_of()
    kernel.measure([ones(3), ones(4)], rows, 0)
    rows.grow(6)
    for at in range(2):
        rows.add(at, Kind.PARAM, 0, -1, at, at)
    kernel.measure([ones(5), ones(6), ones(7)], rows, 1)
    assert rows.snapshot()["count"].tolist() == [3, 5, 6, 7]
    rows.begin_copy()

    assert rows.finish() == 0
    assert rows.array["count"][:4].tolist() == [3, 5, 6, 7]


@pytest.mark.long
def test_counters_are_zero_again():
    rows = begun(3)
    kernel = kernel_of()
    for _ in range(2):
        kernel.measure([ones(4200)], rows, 0)
        kernel.measure([ones(4200), ones(4200)], rows, 1)
    rows.begin_copy()

    assert rows.finish() == 0
    assert rows.array["count"].tolist() == [4200, 4200, 4200]
    assert not rows.on(HERE)._kept[1].any()


def test_a_gate_opens_and_closes_captured_launches():
    kernel = kernel_of()
    gate = CaptureSwitch(HERE)
    x = ones(9_000)
    first, second = begun(2), begun(3)

    kernel.capture(x, gate, 1)  # closed: as captured, nothing is measured
    assert first.finish() == 0
    for rows in (first, second):
        gate.open(rows.on(HERE), [1])
        x += 1
        kernel.capture(x, gate, 1)  # what a replay does
    gate.close()
    x += 1
    kernel.capture(x, gate, 1)
    for rows in (first, second):
        rows.begin_copy()

    assert [rows.finish() for rows in (first, second)] == [0, 0]
    assert [rows.array["mean"][1] for rows in (first, second)] == [2.0, 3.0]
    assert first.array["flags"][1] & Flag.DEGRADED == 0
    with pytest.raises(SentinelError, match="capture"):
        kernel.capture(x[::2], gate, 0)


def test_parts_cover_every_tensor():
    for code, width in (("fp32", 4), ("bf16", 2), ("fp64", 8)):
        tile = device_code.TILE_BYTES // width
        for numel in (0, 1, tile - 1, tile, tile + 1, 1000 * tile, 2**31 + 5, 10**10):
            for begin in range(16 // width):
                assert tiles_of(numel, code) * tile >= begin + numel
        assert tiles_of(tile * 100, code) <= 101


def test_what_is_sent_to_the_device_is_made_on_the_host_whatever_the_default_device():
    gate, rows, kernel = CaptureSwitch(HERE), begun(1), kernel_of()
    stats = rows.on(HERE)
    torch.set_default_device("meta")
    try:
        gate.open(stats, [0])
        tables = Tables((5000, 3), (0, 1), "fp32", HERE)
        limit = kernel._limit(0.1, "fp32")
        tables.addresses((5, 7))
    finally:
        torch.set_default_device(None)

    assert tables.shapes[:2].tolist() == [5000, 1]
    assert tables._addresses.tolist() == [5, 7]
    assert limit == kernel_of()._limit(0.1, "fp32")


@interpreted
def test_triton_that_cannot_compile_is_replaced(monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("ptxas is not here")

    monkeypatch.setattr("sentinel.collect.kernels.triton_kernel.Launcher.__call__", broken)
    kernel = kernel_of()
    rows = begun(1)

    kernel.measure([ones(5)], rows, 0)
    kernel.measure([ones(5)], rows, 0)

    assert rows.array["count"][0] == 5
    assert kernel.name == "torch (cuda), triton failed"
    assert [r.message for r in caplog.records if "ptxas" in r.message] != []
    assert len(caplog.records) == 1


def test_the_short_way_of_a_tensor_like_one_before(monkeypatch):
    kernel = kernel_of()
    slow = []
    real = TritonKernel._measure_slowly
    monkeypatch.setattr(TritonKernel, "_measure_slowly", lambda self, *args: slow.append(args[0]) or real(self, *args))
    base = drawn(40, 2 * 4200).float()
    flat = on_device(torch.randn(4300))
    tensors = {
        "first": base[:4200], "like it": base[4200:] * 2, "of another shape": (base[:4200] + 1).view(42, 100),
        "beginning elsewhere": base[3:4203], "strided": base[::2], "transposed": base[:4200].view(42, 100).t(),
        "negated": torch.view_as_complex(base.view(-1, 2)).conj().imag,
    }  # fmt: skip

    for tensor in tensors.values():
        found, expected = measure(tensor, kernel=kernel, checksum=True), Moments.of(tensor.double().cpu().numpy())
        assert found.std() == pytest.approx(expected.std(), rel=1e-5)
        assert found.mean() == pytest.approx(expected.mean(), abs=1e-5)
        assert found.stats["checksum"] == checksum_of(tensor.cpu())
    assert len({id(tensor) for tensor in slow}) == 4  # the first, and those that do not lie open
    view = flat[100:]
    flat.untyped_storage().resize_(0)
    with pytest.raises(SentinelError, match="freed"):
        measure(view, kernel=kernel)
    assert measure(base[:4200].clone(), kernel=kernel, zero_eps=0.5).zeros()[0] > 0.3


def test_a_capture_is_left_alone():
    rows = begun(1)
    kernel = kernel_of()
    kernel.is_capturing = lambda: True

    with pytest.raises(SentinelError, match="capture"):
        kernel.measure([ones(5)], rows, 0)

    assert rows.is_on_host
    kernel.is_capturing = lambda: False
    kernel.measure([ones(5)], rows, 0)
    assert not rows.is_on_host
    kernel.is_capturing = lambda: True
    with pytest.raises(SentinelError, match="capture"):
        kernel.measure([ones(5)], rows, 0)  # by the short way
