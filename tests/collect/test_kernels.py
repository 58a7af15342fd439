"""Both kernels on real tensors of every shape, dtype and layout, against float64; and the row buffer of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sentinel.collect.kernels import NativeKernel, TorchKernel, choose_kernel
from sentinel.collect.kernels import native as native_kernel
from sentinel.collect.kernels.tensor_memory import CONVERTED
from sentinel.collect.rows.buffer import StepRows
from sentinel.errors import SentinelError
from sentinel.moments import Moments
from sentinel.native import fallback, implementation
from sentinel.record import NONE_ID, ROW_DTYPE, STATISTICS, Flag, Kind

KERNELS = {"native": NativeKernel(), "torch": TorchKernel(), "torch, unlooking": TorchKernel(may_look=False)}
"""The last one measures CPU tensors as it does those of a device whose values it must not wait for."""

kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())

pytestmark = pytest.mark.usefixtures("one_thread")


def measure(kernel, *tensors: torch.Tensor, **options) -> Moments:
    """Return the statistics of the tensors, measured in one call."""
    rows = StepRows(max(len(tensors), 1))
    for tensor in range(len(tensors)):
        rows.add(tensor, Kind.PARAM, 0, -1, tensor, tensor)
    kernel.measure(tensors, rows, 0, **options)
    rows.finish()
    return Moments.from_rows(rows.array[: rows.num_rows])


def assert_measures(kernel, *tensors: torch.Tensor, rel: float = 2e-5, zero_eps: float = 0.0) -> None:
    """Every statistic of every tensor is that of its elements in float64."""
    found = measure(kernel, *tensors, zero_eps=zero_eps)
    for row, tensor in enumerate(tensors):
        expected = Moments.of(tensor.detach().double().numpy(), zero_eps)
        std = float(np.nan_to_num(expected.std()[0]))
        for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero"):
            assert found.stats[name][row] == expected.stats[name][0], name
        for name in STATISTICS:
            # The sizes of a mean and a skew are those of their parts.
            slack = {"mean": 1e-6 * std, "skew": 1e-4}.get(name, 0.0)
            value = found.statistic(name)[row]
            assert value == pytest.approx(expected.statistic(name)[0], rel=rel, abs=slack, nan_ok=True), name


def checksum_of(tensor: torch.Tensor) -> int:
    """Sum of the bit patterns, one element after the other."""
    width = tensor.element_size()
    patterns = tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[width]).flatten().tolist()
    return sum(p % 2 ** (8 * width) for p in patterns) % 2**64


def strided_tensors() -> dict[str, torch.Tensor]:
    x = torch.randn(30, 40, 50, generator=torch.Generator().manual_seed(0)) + 1
    return {
        "contiguous": x,
        "transposed": x.transpose(0, 2),
        "permuted": x.permute(2, 0, 1),
        "channels last": x[None].contiguous(memory_format=torch.channels_last),
        "every other": x[:, ::2],
        "inner slice": x[..., 3:17],
        "a column": x[:, 0, 0],
        "broadcast": x[0, 0].expand(70, 50),
        "scalar broadcast": torch.tensor(2.5).expand(300, 7),
        "overlapping": x.view(-1).as_strided((100, 10), (3, 1)),
        "zero-dim": torch.tensor(3.0),
        "size-one dims": x[:1, :, :1],
        "empty": x[:0],
        "empty strided": x[:, ::2, :0],
        "offset": x.view(-1)[7:5001],
    }


@kernels
@pytest.mark.parametrize("tensor", strided_tensors().values(), ids=strided_tensors().keys())
def test_any_layout_is_read(kernel, tensor):
    assert_measures(kernel, tensor)

    assert measure(kernel, tensor, checksum=True).stats["checksum"][0] == checksum_of(tensor)


@kernels
def test_many_tensors_of_any_kind_in_one_call(kernel):
    tensors = [
        *strided_tensors().values(), torch.arange(-5, 100), torch.tensor([True, False, True]),
        torch.randn(100).bfloat16(), torch.randn(5000).half(), torch.randn(5000, dtype=torch.float64),
    ]  # fmt: skip

    assert_measures(kernel, *tensors)


ALL_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@kernels
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtypes_are_measured(kernel, dtype):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 3
    tensor = (values > 0) if dtype is torch.bool else values.abs().to(dtype)

    assert_measures(kernel, tensor)
    assert_measures(kernel, tensor.view(30, 100).t()[::2])


@kernels
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32), size=st.one_of(st.integers(0, 50), st.integers(0, 9000)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), scale=st.integers(-30, 30),
    mean_over_std=st.sampled_from([0.0, 10.0, 1e4]), num_bad=st.integers(0, 8), zeros=st.booleans(),
)  # fmt: skip
def test_random_tensors_are_measured(kernel, seed, size, dtype, scale, mean_over_std, num_bad, zeros):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(size, generator=generator, dtype=torch.float64) + mean_over_std) * 10.0**scale
    if zeros:
        x *= torch.rand(size, generator=generator) < 0.5
    x = x.to(dtype)
    if size:
        spots = torch.randint(0, size, (num_bad,), generator=generator)
        x[spots] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)[spots % 3]

    assert_measures(kernel, x)
    assert measure(kernel, x, checksum=True).stats["checksum"][0] == checksum_of(x)


@st.composite
def views(draw) -> torch.Tensor:
    """A tensor of any dtype, sliced, permuted and expanded."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)) + draw(st.sampled_from([[], [60], [900]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 20.0]))
    x += draw(st.sampled_from([0.0, 5.0, -50.0]))
    dtype = draw(st.sampled_from(ALL_DTYPES))
    if dtype is torch.bool:
        x = x > 0
    elif not dtype.is_signed:
        x = x.abs()
    x = x.clamp(-120, 120).to(dtype)
    x = x[(..., *(slice(None, None, draw(st.sampled_from([1, 1, 2, 3]))) for _ in shape))]
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = x.unsqueeze(-1).expand(*x.shape, draw(st.integers(1, 4)))
        x = x.permute(draw(st.permutations(range(x.dim()))))
    return x[..., :0] if x.dim() and draw(st.integers(0, 9)) == 0 else x


@kernels
@settings(max_examples=60, deadline=None)
@given(x=views())
def test_views_of_every_dtype_are_measured_as_what_they_show(kernel, x):
    assert_measures(kernel, x)

    measured_as = CONVERTED.get(x.dtype, x.dtype)
    assert measure(kernel, x, checksum=True).stats["checksum"][0] == checksum_of(x.to(measured_as))


def uneven(kind: str, size: int) -> torch.Tensor:
    """Return data whose parts are nothing alike: what was learned from one, or from a sample, misleads about the next."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(size, generator=generator)
    return {
        "drift": lambda: x + torch.linspace(-1e3, 1e3, size),
        "late": lambda: torch.where(torch.arange(size) < size * 0.7, 0.0, x * 1e-12),
        "large sum": lambda: torch.where(x > 0, 3e38, 2e38),
        "two scales": lambda: torch.where(torch.arange(size) % 70_000 < 35_000, x * 1e9, x * 1e-9),
        "masked": lambda: x.masked_fill(x > 0.2, -torch.inf) + 40,
        "one nan": lambda: x.index_fill(0, torch.tensor([size // 2]), torch.nan),
        "all inf": lambda: torch.full((size,), torch.inf),
        "huge ties": lambda: torch.where(x > 1.5, 1e30, -1e30),
    }[kind]()


@kernels
@pytest.mark.parametrize("kind", ["drift", "late", "large sum", "two scales", "masked", "one nan", "all inf", "huge ties"])
def test_no_guess_misleads(kernel, kind):
    x = uneven(kind, 1_100_000)

    assert_measures(kernel, x, x[5:60_000], x[::5])


@kernels
@pytest.mark.parametrize("mean_over_std", [1e2, 1e4])
def test_kurtosis_within_1e_5_far_from_zero(kernel, mean_over_std):
    x = torch.randn(1_500_000, generator=torch.Generator().manual_seed(2)) + mean_over_std

    kurtosis = measure(kernel, x).kurtosis()

    assert kurtosis == pytest.approx(Moments.of(x.double().numpy()).kurtosis(), rel=1e-5)


@kernels
def test_denormals_are_measured(kernel):
    assert_measures(kernel, torch.randn(5000) * 1e-41)


@kernels
def test_largest_values_do_not_overflow(kernel):
    assert_measures(kernel, torch.full((9000,), 3e38), torch.tensor([3e38, -3e38] * 3000))


@kernels
@pytest.mark.parametrize("zero_eps", [0.0, 1e-3, 0.1])
def test_zero_eps(kernel, zero_eps):
    assert_measures(kernel, torch.linspace(-0.2, 0.2, 4001), torch.tensor([0.1, -0.1]).bfloat16(), zero_eps=zero_eps)


@kernels
def test_counts_exact_above_2_24(kernel):
    x = torch.zeros(2**24 + 5, dtype=torch.bfloat16)
    x[0], x[-1] = torch.nan, 1.0

    stats = measure(kernel, x).stats[0]

    assert (stats["count"], stats["num_nan"], stats["num_zero"]) == (2**24 + 4, 1, 2**24 + 3)


def test_kernels_and_fallback_agree():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(3)) * 2 + 5
    rows = np.zeros(1, ROW_DTYPE)
    fallback.measure(np.array([x.data_ptr()], np.uint64), np.array([x.numel()]), np.zeros(1, np.uint8), rows, 0.0, True)
    by_numpy = Moments.from_rows(rows)

    for kernel in KERNELS.values():
        found = measure(kernel, x, checksum=True)
        assert found.stats["checksum"] == by_numpy.stats["checksum"]
        for name in STATISTICS:
            assert found.statistic(name) == pytest.approx(by_numpy.statistic(name), rel=1e-5, abs=1e-6), name


def _hostile_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 50, generator=generator)
    pair = torch.randn(7, 2, generator=generator)
    return [
        x, x.t(), x[::3], nn.Parameter(x), torch.empty(0), torch.tensor(1.5), x.to(torch.bfloat16), x.to(torch.float64),
        torch.arange(300), x > 0, torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]), torch.full((3,), torch.nan),
        torch.view_as_complex(pair).conj().imag, nn.Parameter(torch.view_as_complex(pair).conj().imag.detach()),
        x[0].expand(9, 50), torch.randn(150_000, generator=generator), torch.randn(900_000, generator=generator),
    ]  # fmt: skip


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("zero_eps", [0.0, 0.1])
def test_tensors_read_in_c_and_one_by_one_make_the_same_rows(monkeypatch, zero_eps, checksum):
    tensors, kernel = _hostile_tensors(), NativeKernel()
    options = {"zero_eps": zero_eps, "checksum": checksum}
    monkeypatch.setattr(native_kernel, "_reader", None)
    expected = measure(kernel, *tensors, **options).stats
    monkeypatch.undo()

    together = measure(kernel, *tensors, **options).stats
    apart = [measure(kernel, tensor, **options).stats for tensor in tensors]

    assert together.tobytes() == expected.tobytes()
    assert np.concatenate(apart).tobytes() == expected.tobytes()


@pytest.mark.skipif(native_kernel._reader is None, reason="the library was built without Python's headers")
def test_what_is_no_plain_tensor_is_left_to_who_asked():
    class Odd(torch.Tensor):
        pass

    class Broken(torch.Tensor):
        def data_ptr(self):
            raise RuntimeError("there is no memory")

    words = np.full(12, -1, np.int64)
    reader, at = native_kernel._reader, words.ctypes.data
    odd = [
        torch.ones(2, 3).t(),
        torch.ones(2).as_subclass(Odd),
        torch.ones(2).as_subclass(Broken),
        torch.ones(2, device="meta"),
    ]
    odd += [torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse(), 3, None]

    assert not any(reader.measure_tensor(one, at, 0.0, False) for one in odd)
    assert set(words) == {-1}
    room = np.zeros((len(odd) + 1, 17), np.int64)
    assert reader.measure_tensors([*odd, torch.ones(2)], room.ctypes.data, 136, 0.0, False, 1) == list(range(len(odd)))
    assert room[-1, 0] == 2
    for wrong in ((), (torch.ones(2), "x", 0.0, False), (torch.ones(2), at, None, False)):
        with pytest.raises(TypeError):
            reader.measure_tensor(*wrong)


@kernels
def test_measuring_leaves_no_trace(kernel):
    weight = nn.Parameter(torch.randn(50, 60))
    inner = (weight * 2).t()[::3]
    rng_state, versions = torch.get_rng_state(), (weight._version, inner._version)

    measure(kernel, weight, inner, checksum=True)
    with torch.inference_mode():
        measure(kernel, weight, inner)

    assert torch.equal(torch.get_rng_state(), rng_state)
    assert (weight._version, inner._version) == versions
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    inner.sum().backward()
    assert weight.grad is not None and weight.grad.unique().tolist() == [0.0, 2.0]


@kernels
def test_autocast_and_default_dtype_do_not_matter(kernel):
    x = torch.randn(5000)
    expected = measure(kernel, x).stats

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = measure(kernel, x).stats
    finally:
        torch.set_default_dtype(torch.float32)

    assert found == expected


@kernels
@pytest.mark.parametrize("tensor", [
    torch.zeros(3, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.zeros(3, device="meta"),
    torch._empty_affine_quantized(3, scale=0.1, zero_point=0, dtype=torch.qint8),
], ids=["complex", "sparse", "meta", "quantized"])  # fmt: skip
def test_what_cannot_be_measured_says_so_and_harms_no_other(kernel, tensor):
    rows = StepRows(3)
    for index in range(3):
        rows.add(index, Kind.PARAM, 0, -1, index, 0)

    with pytest.raises(SentinelError, match=str(tensor.dtype)):
        kernel.measure([torch.ones(2), tensor, torch.ones(3)], rows, 0)
    with pytest.raises(SentinelError, match=str(tensor.dtype)):
        kernel.measure([tensor], rows, 1)

    assert list(rows.array["count"]) == [2, 0, 3]
    assert list(rows.array["max"]) == [1.0, -np.inf, 1.0]


@kernels
@pytest.mark.parametrize("offset", [0, 100])
def test_freed_memory_is_not_read(kernel, offset):
    flat = torch.randn(1000)
    view = flat[offset : offset + 50]
    flat.untyped_storage().resize_(0)

    with pytest.raises(SentinelError, match="freed"):
        measure(kernel, view)
    with pytest.raises(SentinelError, match="freed"):
        measure(kernel, torch.ones(3), view)


@kernels
def test_lazy_negation_is_seen(kernel):
    imaginary = torch.view_as_complex(torch.randn(1, 2)).conj().imag

    assert imaginary.is_neg()
    assert_measures(kernel, imaginary)


@kernels
def test_local_shard_of_a_dtensor_is_read_without_collective(kernel):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        local = torch.randn(3, 4)
        shards = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)

        found = measure(kernel, shards, torch.ones(2), nn.Parameter(shards))
    finally:
        dist.destroy_process_group()

    np.testing.assert_allclose(found.stats["count"], [12, 2, 12])
    np.testing.assert_allclose(found.norm()[[0, 2]], local.double().norm(), rtol=1e-6)


class LargestResult(TorchDispatchMode):
    """Notes the largest memory behind any result of an operation, that of its arguments left out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("may_look", "dtype"), [
    (True, torch.float32), (True, torch.float64), (True, torch.bfloat16), (True, torch.int64), (True, torch.float8_e5m2),
    (False, torch.float32), (False, torch.float64),
])  # fmt: skip
def test_torch_kernel_has_no_temporary_above_16_mib(may_look, dtype):
    whole = torch.zeros(1500, 3000, dtype=dtype)  # beyond 16 MiB in fp32
    whole[700:, ::2] = 1
    if dtype.is_floating_point:
        whole[1400, 7] = torch.nan
    kernel = TorchKernel(may_look=may_look)
    with LargestResult() as positive_control:
        torch.zeros_like(whole, dtype=torch.complex64)

    with LargestResult() as largest:
        dense = measure(kernel, whole, checksum=True)
        strided = measure(kernel, whole[:, :2998], zero_eps=0.5, checksum=True)

    assert positive_control.num_bytes == 8 * whole.numel()
    assert 2**20 < largest.num_bytes <= 16 * 2**20
    assert (dense.num_elements()[0], strided.num_elements()[0]) == (1500 * 3000, 1500 * 2998)


def test_choose_kernel():
    if implementation == "numpy":
        assert isinstance(choose_kernel("cpu"), TorchKernel)
    else:
        assert choose_kernel("cpu").name == f"native ({implementation})"
    assert choose_kernel(torch.device("cuda", 1)).name == "torch (cuda)"


def test_native_kernel_refuses_other_devices():
    with pytest.raises(SentinelError, match="meta"):
        NativeKernel().measure([torch.zeros(3, device="meta")], StepRows(1), 0)


# -- the row buffer --


def test_add_fills_the_row_and_leaves_empty_statistics():
    rows = StepRows(2)

    assert rows.add(5, Kind.DGRAD, Flag.BORDER, 3, 17, 9) == 0
    assert rows.add(6, Kind.WGRAD, 0, -1, 18, 2) == 1

    row = rows.array[0]
    assert tuple(row[n] for n in ("tensor", "kind", "flags", "micro_step", "call_id", "site_pos", "num_folded")) == (
        5, Kind.DGRAD, Flag.BORDER, 3, 17, 9, 1,
    )  # fmt: skip
    assert (row["bad_call_id"], row["max_call_id"], row["bad_micro_step"]) == (NONE_ID, NONE_ID, -1)
    assert (row["count"], row["min"], row["max"]) == (0, np.inf, -np.inf)
    with pytest.raises(IndexError, match="full"):
        rows.add(0, 0, 0, 0, 0, 0)


def test_grow_keeps_what_was_written():
    rows = StepRows(1)
    rows.add(5, Kind.DGRAD, 0, 3, 17, 9)
    KERNELS["native"].measure([torch.ones(4)], rows, 0)

    rows.grow(10)
    rows.add(6, Kind.DGRAD, 0, 3, 18, 9)
    for kernel in KERNELS.values():
        kernel.measure([torch.ones(7)], rows, 1)
        assert list(rows.array["count"][:3]) == [4, 7, 0]


def test_reset_and_truncate_leave_empty_rows():
    rows = StepRows(4)
    for index in range(4):
        rows.add(index, Kind.DGRAD, 0, 0, index, 0)
    KERNELS["native"].measure([torch.ones(4)] * 4, rows, 0)

    rows.truncate(2)
    assert rows.num_rows == 2
    assert list(rows.array["count"]) == [4, 4, 0, 0]

    rows.reset()
    assert rows.num_rows == 0
    assert not rows.array["count"].any() and (rows.array["max"] == -np.inf).all()


def test_finish_points_at_own_observation():
    rows = StepRows(3)
    for index in range(3):
        rows.add(index, Kind.DGRAD, 0, index, 10 + index, 0)
    KERNELS["native"].measure([torch.ones(2), torch.tensor([torch.nan, 1.0]), torch.ones(0)], rows, 0)

    rows.begin_copy()
    assert rows.is_on_host
    assert rows.finish() == 0

    assert list(rows.array["bad_call_id"]) == [NONE_ID, 11, NONE_ID]
    assert list(rows.array["bad_micro_step"]) == [-1, 1, -1]
    assert list(rows.array["max_call_id"]) == [10, 11, NONE_ID]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_rows_arrive_without_a_sync():
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(size, generator=generator, device="cuda").to(dtype) * 3 + 1
        for size in (0, 1, 5000, 5_000_000) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    ]  # fmt: skip
    tensors += [tensors[8].view(50, 100).t(), tensors[8][::3], torch.tensor([torch.nan, torch.inf, 1.0], device="cuda")]
    tensors += [torch.arange(100, device="cuda"), torch.randn(100)]
    rows = StepRows(len(tensors) - 2)
    kernel = choose_kernel("cuda")

    for step in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for index, tensor in enumerate(tensors):
                if rows.num_rows == rows.capacity:
                    rows.grow(len(tensors))
                kernel.measure([tensor], rows, rows.add(index, Kind.DGRAD, 0, 0, index, 0), checksum=True)
            rows.begin_copy()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not rows.is_on_host
        assert rows.finish() == 0
        on_gpu = rows.array.copy()
        expected = measure(NativeKernel(), *(t.cpu() for t in tensors), checksum=True)
        for name in ("count", "min", "max", "num_nan", "num_pos_inf", "num_neg_inf", "num_zero", "checksum"):
            np.testing.assert_array_equal(on_gpu[name], expected.stats[name], name)
        np.testing.assert_allclose(Moments.from_rows(on_gpu).kurtosis(), expected.kurtosis(), rtol=1e-5)
        rows.reset()
