"""Spectral and Frobenius norm of weight matrices, and their stable rank ||W||_F^2 / ||W||_2^2.

The spectral norm is found by block Krylov iteration: four vectors at once, which read the weights no more often than one
does, and the largest norm that any combination of all vectors on the way attains. Four vectors stay on the device from one
measurement to the next, and begin with a generator of their own: the training's is never drawn from. They begin alike for
all weights of one shape, so that the same weights have the same norm on every layout. What is reported is a lower bound that
a vector attains; docs/probes.md says how near it came in tests.

Source: Musco and Musco, Randomized block Krylov methods for stronger and faster approximate SVD, NeurIPS 2015.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from sentinel.collect.hooks.parameters import Parameter
from sentinel.collect.parallel.parameter_storage import HeldPiece
from sentinel.collect.parallel.placements import is_dtensor, is_shard
from sentinel.collect.probes.context import ProbeContext
from sentinel.collect.probes.piecewise_rows import ROOM
from sentinel.collect.probes.prepared_rows import moments_words
from sentinel.collect.probes.single_values import observe_words, value_words
from sentinel.collect.probes.stepped import per_rank
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.record import Kind

QUANTITIES = ("spectral_norm", "frobenius_norm", "stable_rank")
WIDTH = 4
"""Vectors at once."""
FIRST_ITERATIONS = 16
"""Iterations of the first measurement of a matrix: with 16 random matrices are within 0.1 %, which the tests require."""
ITERATIONS = 2
"""Iterations of every later measurement, which begins with the vectors of the one before."""
SEED = 20251121
"""Seed of the first vectors of every matrix, any number, the same for all: names and ranks may differ between layouts."""
_SQUARINGS, _FEW_SQUARINGS = 24, 6
_NAME = "weight_spectrum"


@dataclasses.dataclass
class _PowerIteration:
    """The vectors of a weight that one measurement leaves for the next."""

    vectors: torch.Tensor
    """[batch, shorter side, vectors] fp32, orthonormal, on the weights' device."""
    generator: torch.Generator
    num_measured: int = 0


class WeightSpectrum:
    """Three rows for each weight of two dimensions and more, measured when a step begins: the weights of its forward."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._kept: dict[int, _PowerIteration] = {}
        """id of a parameter's entry -> its vectors."""
        context.events.planned.subscribe(_NAME, self._plan)
        context.events.begun.subscribe(_NAME, self._measure)
        context.events.removed.subscribe(_NAME, self._kept.clear)

    def _plan(self) -> None:
        if not self._context.plan.wants(Kind.WEIGHT_SPECTRUM):
            self._kept.clear()

    @torch.no_grad()
    def _measure(self) -> None:
        """Measure every weight that is due. Does not wait."""
        context = self._context
        if not context.plan.takes(Kind.WEIGHT_SPECTRUM):
            return
        entries: dict[torch.device, list[TensorEntry]] = {}
        words: dict[torch.device, list[torch.Tensor]] = {}
        for one in context.parameters.all:
            due = [entry for entry in self._entries(one) if context.plan.measures(entry)]
            held = context.parameters.storage.param(one.param) if due else None
            if held is None or held.tensor.numel() == 0:
                continue
            matrices = self._matrices(one, held)
            if matrices is None:
                continue
            placements, part = _placed(one.param, held, matrices.shape[0])
            for entry in due:
                context.table.describe(entry, torch.empty(0), placements, part, (matrices.shape[0],))
            device = matrices.device
            with torch.autocast(device.type, enabled=False):  # The step has begun inside the trainer's own forward.
                found = self._spectrum(one.entry, matrices)
            for entry in due:
                values = found[QUANTITIES.index(entry.name.rpartition(":")[2])]
                entries.setdefault(device, []).append(entry)
                words.setdefault(device, []).append(value_words(values) if len(values) == 1 else moments_words(values))
        for device, mine in entries.items():
            observe_words(context.recording, mine, torch.cat(words[device]), {})
            context.count({Kind.WEIGHT_SPECTRUM.label: len(mine)})

    def _entries(self, one: Parameter) -> list[TensorEntry]:
        found = []
        if one.param.dim() >= 2 or getattr(one.param, "_fsdp_flattened", False):
            for quantity in QUANTITIES:
                entry = self._context.table.entry(one.entry.chunk, f"{one.entry.name}:{quantity}", Kind.WEIGHT_SPECTRUM)
                entry.site_pos = one.entry.site_pos
                found.append(entry)
        return found

    def _matrices(self, one: Parameter, held: HeldPiece) -> torch.Tensor | None:
        """Return the weights as [batch, rows, columns], a view; None, with a health record, where they are no matrices."""
        name, _, _ = one.entry.name.rpartition(".")
        module = next((c.structure.modules.get(name) for c in self._context.chunks if c.vpp_stage == one.entry.chunk), None)
        local = held.tensor.detach()
        found = None
        if local.dim() >= 2 and local.is_floating_point() and local.layout is torch.strided:
            found = as_matrices(local, is_kernel=isinstance(module, nn.modules.conv._ConvNd))
        if found is None and (held.shape is None or len(held.shape) >= 2):
            message = f"{one.entry.name}: its piece on this rank is no matrix, so it has no spectral norm here"
            self._context.recording.report("unsupported", message, f"{_NAME} {one.entry.name}")
        return found

    def _spectrum(self, entry: TensorEntry, matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [batch] each, float64: spectral norm, Frobenius norm, stable rank."""
        batch, rows, columns = matrices.shape
        if columns > rows:
            matrices = matrices.mT
        shorter = min(rows, columns)
        shape = (batch, shorter, WIDTH if shorter >= 2 * WIDTH else shorter)
        kept = self._kept.get(entry.id)
        if kept is None or kept.vectors.shape != shape or kept.vectors.device != matrices.device:
            generator = torch.Generator(matrices.device)
            generator.manual_seed(SEED)
            vectors = torch.zeros(shape, dtype=_arithmetic(matrices), device=matrices.device)
            kept = self._kept[entry.id] = _PowerIteration(vectors, generator)
        fresh = torch.randn(shape, generator=kept.generator, dtype=kept.vectors.dtype, device=matrices.device)
        vectors = orthonormal(torch.where(_are_good(kept.vectors), kept.vectors, fresh))
        iterations = ITERATIONS if kept.num_measured else FIRST_ITERATIONS
        spectral, kept.vectors = krylov(matrices, vectors, min(iterations, -(-shape[1] // shape[2]) - 1))
        kept.num_measured += 1
        frobenius = frobenius_norms(matrices)
        # A matrix of zeros has no meaningful rank.
        return spectral, frobenius, torch.where(frobenius == 0, 0.0, (frobenius / spectral).square())


def krylov(matrices: torch.Tensor, vectors: torch.Tensor, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([batch] float64 largest singular values, vectors that nearly attain them) of [batch, rows, columns].

    vectors: [batch, columns, few], orthonormal. Reads the weights 2 * iterations + 1 times; never waits. The block Lanczos
    recurrence of W^T W, each block made orthogonal to all before it: on their span it is the matrix of their products.
    """
    few = vectors.shape[-1]
    basis = vectors.double()
    products = basis.new_zeros((len(matrices), few * (iterations + 1), few * (iterations + 1)))
    image = applied(matrices, vectors)
    # One scale for all: products of squares neither overflow nor vanish.
    scale = image.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(image.dtype).tiny)
    for at in range(iterations):
        last = slice(few * at, few * (at + 1))
        following = applied_transposed(matrices, image / scale).double() / scale
        projected = basis.mT @ following
        products[:, : few * (at + 1), last] = projected
        following = following - basis @ projected
        following = following - basis @ (basis.mT @ following)
        vectors = orthonormal(following)
        # Where nothing new is left (a matrix of few ranks), rounding was made as large as the rest: it is taken for nothing.
        rest = vectors - basis @ (basis.mT @ vectors)
        vectors = orthonormal(torch.where(torch.linalg.vector_norm(rest, dim=-2, keepdim=True) > 0.5, rest, 0.0))
        products[:, few * (at + 1) : few * (at + 2), last] = vectors.mT @ following
        basis = torch.cat((basis, vectors), -1)
        image = applied(matrices, vectors.to(image.dtype))
    image = (image / scale).double()
    products[:, -few:, -few:] = image.mT @ image
    lower = products.tril()
    products = lower + lower.tril(-1).mT
    spectral = largest_eigenvalue(products).clamp(min=0.0).sqrt() * scale.double().view(-1)
    power = products
    for _ in range(_FEW_SQUARINGS):
        power = power / _trace(power).clamp(min=1e-300)[:, None, None]
        power = power @ power
    start = torch.eye(few, dtype=power.dtype, device=power.device).repeat(iterations + 1, 1)
    best = basis @ orthonormal(power @ start)
    return spectral, best.to(matrices.dtype if matrices.dtype is torch.float64 else torch.float32)


def as_matrices(weights: torch.Tensor, *, is_kernel: bool) -> torch.Tensor | None:
    """Return weights of two dimensions and more as [batch, rows, columns], without a copy; None where that cannot be.

    Three dimensions are a batch of matrices, one for each expert. is_kernel: of a convolution: [out, all the rest].
    """
    if weights.dim() == 3 and not is_kernel:
        return weights
    if weights.dim() > 2:
        # The order of the columns changes no singular value: that of the memory needs no copy.
        rest = sorted(range(1, weights.dim()), key=lambda axis: (weights.stride(axis), weights.shape[axis]), reverse=True)
        weights = weights.permute(0, *rest)
        try:
            weights = weights.view(weights.shape[0], -1)
        except RuntimeError:
            return None
    return weights.unsqueeze(0)


def applied(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return W V: [batch, rows, vectors] in the vectors' type. Of weights in another type only pieces are converted."""
    if matrices.dtype is vectors.dtype:
        return matrices @ vectors
    batch, rows, _ = matrices.shape
    image = vectors.new_empty((batch, rows, vectors.shape[-1]))
    for at, first, piece in _converted(matrices, vectors.dtype):
        image[at : at + piece.shape[0], first : first + piece.shape[1]] = piece @ vectors[at : at + piece.shape[0]]
    return image


def applied_transposed(matrices: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return W^T U: [batch, columns, vectors] in the type of U."""
    if matrices.dtype is image.dtype:
        return matrices.mT @ image
    batch, _, columns = matrices.shape
    vectors = image.new_zeros((batch, columns, image.shape[-1]))
    for at, first, piece in _converted(matrices, image.dtype):
        mine = slice(at, at + piece.shape[0])
        vectors[mine] += piece.mT @ image[mine, first : first + piece.shape[1]]
    return vectors


def orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of what the columns of [batch, n, few] span, by Cholesky's factor, twice.

    Directions that are nothing but rounding come out shorter than 1. Never waits, as a QR by Householder may.
    """
    wide = vectors.double()
    wide = wide / wide.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-300)
    for _ in range(2):
        gram = wide.mT @ wide
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        jitter = (1e-15 * trace + 1e-200)[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor, _ = torch.linalg.cholesky_ex(gram + jitter)
        wide = torch.linalg.solve_triangular(factor, wide.mT, upper=False).mT
    return wide.to(vectors.dtype)


def largest_eigenvalue(gram: torch.Tensor) -> torch.Tensor:
    """Return the largest eigenvalue of each of [batch, few, few], symmetric, not negative, float64: by squaring.

    Eigenvalues nearer to each other than a millionth come out as their mean.
    """
    power = gram / _trace(gram).clamp(min=1e-300)[:, None, None]
    for _ in range(_SQUARINGS):
        power = power @ power
        power = power / _trace(power).clamp(min=1e-300)[:, None, None]
    return (gram * power).sum(dim=(-2, -1))


def frobenius_norms(matrices: torch.Tensor) -> torch.Tensor:
    """Return [batch] float64, from squares in float64: of weights of any size, piece by piece."""
    squares = torch.zeros(matrices.shape[0], dtype=torch.float64, device=matrices.device)
    for at, _, piece in _converted(matrices, torch.float64):
        squares[at : at + piece.shape[0]] += torch.linalg.vector_norm(piece, dim=(-2, -1)).square()
    return squares.sqrt()


def _converted(matrices: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first of the batch, first row, [some, some rows, columns] in `dtype`), each of at most 16 MiB."""
    batch, rows, columns = matrices.shape
    most = ROOM * 4 // dtype.itemsize
    if rows * columns <= most:
        num = max(1, most // max(1, rows * columns))
        for at in range(0, batch, num):
            yield at, 0, matrices[at : at + num].to(dtype)
        return
    num = max(1, most // columns)
    for at in range(batch):
        for first in range(0, rows, num):
            yield at, first, matrices[at : at + 1, first : first + num].to(dtype)


def _are_good(vectors: torch.Tensor) -> torch.Tensor:
    """Return [batch, 1, 1] bool: whether vectors can be gone on with. Weights of NaN or zeros leave none behind."""
    size: torch.Tensor = torch.linalg.vector_norm(vectors, dim=(-2, -1), keepdim=True)
    return (size > 0.5) & size.isfinite()


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    diagonal: torch.Tensor = matrices.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(-1)


def _arithmetic(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _placed(param: torch.Tensor, held: HeldPiece, batch: int) -> tuple[dict[str, str], str]:
    """Return (axis -> placement, part): norms of shards are merged only where whole matrices are cut off."""
    if batch > 1 or (is_dtensor(param) and param.dim() == 3):
        placements = getattr(param, "placements", ())
        if placements and all(one.dim == 0 for one in placements if is_shard(one)):
            return dict(held.placements), held.part
    return per_rank(held.placements), ""
