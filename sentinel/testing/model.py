"""The transformer that a synthetic run pretends to train: its modules, and what each rank observes of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import Place, canonical, depth, layer_offsets
from sentinel.record import NONE_ID, ROW_DTYPE, Flag, Kind
from sentinel.testing.schedules import MicroStepPass, program_order
from sentinel.version import VERSION
from sentinel.wire.frame import row_fields


@dataclasses.dataclass(slots=True)
class Table:
    """What one rank observes in a step, as columns; made once."""

    descriptor: Descriptor
    rows: npt.NDArray[np.void]
    """Template: one row per observation, statistics empty."""
    scale: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]
    """Seeds the values: equal on ranks that hold the same copy."""
    moves: npt.NDArray[np.bool_]
    """Whether the values are drawn anew each step; weights keep theirs."""
    position: npt.NDArray[np.int64]
    """Place of the site in the forward order of the whole model."""
    module: list[str]
    """Canonical name of the module."""


class SyntheticModel:
    """A small transformer cut over pp x dp x tp ranks, numbered tp fastest, then dp, then pp; vpp chunks on each."""

    def __init__(
        self,
        *,
        pp: int,
        dp: int,
        tp: int,
        layers: int,
        d_model: int,
        micro_steps: int,
        kinds: Collection[str],
        black_box: bool,
        first_step: int,
        seed: int,
        schedule: str = "",
        vpp: int = 1,
        shuffle: bool = False,
        ranks_per_host: int = 8,
    ) -> None:
        """As those of `SyntheticRun`."""
        self.num_depths = pp * vpp
        if layers < self.num_depths:
            raise ValueError(f"expected at least one layer a stage, got {layers} layers for {self.num_depths} stages")
        self.pp, self.dp, self.tp, self.vpp = pp, dp, tp, vpp
        self._schedule = schedule
        self._shuffle, self._ranks_per_host = shuffle, ranks_per_host
        self.micro_steps = micro_steps
        self._layers, self._d_model = layers, d_model
        self._kinds = frozenset(kinds)
        self._black_box = black_box
        self._first_step = first_step
        self._seed = seed
        self._offsets = layer_offsets({at: self._blocks(at) for at in range(self.num_depths)})
        order = program_order(schedule, pp, vpp, micro_steps) if schedule else []
        self._work: list[list[MicroStepPass]] = order
        """By pipeline rank; empty: one micro-step after the other, forward then backward."""

    @property
    def num_ranks(self) -> int:
        """pp x dp x tp."""
        return self.pp * self.dp * self.tp

    def modules(self) -> list[str]:
        """Return the canonical names of the modules with an output, in forward order."""
        return [
            self._canonical(name, at)
            for at in range(self.num_depths)
            for name, is_input in self._local_sites(at)
            if not is_input
        ]

    def depth_of(self, place: Place, chunk: int) -> int:
        """Return the place of a rank's chunk in the whole model."""
        return depth(self._schedule, place.pp_rank, chunk, self.pp)

    def has_loss(self, place: Place) -> bool:
        """Whether a rank holds the last chunk."""
        return any(self.depth_of(place, chunk) == self.num_depths - 1 for chunk in range(self.vpp))

    def exchanges(self, *, backward: bool) -> list[int]:
        """Return the positions of modules whose output (backward: input gradient) tensor-parallel ranks sum up."""
        words = ("attn", "mlp", "head" if backward else "embed")
        return [self.position(name) for name in self.modules() if name.rpartition(".")[2] in words]

    def position(self, module: str) -> int:
        """Return the place of a module's output in the forward order of all sites; ValueError: no such module."""
        found = self._positions.get(module)
        if found is None:
            raise ValueError(f"no module {module!r}")
        return found

    @cached_property
    def _positions(self) -> dict[str, int]:
        every = [(stage, *site) for stage in range(self.num_depths) for site in self._local_sites(stage)]
        found: dict[str, int] = {}
        for at, (stage, name, is_input) in enumerate(every):
            if not is_input:
                found.setdefault(self._canonical(name, stage), at)
        return found

    def places(self) -> list[Place]:
        """Return where each rank is."""
        places = []
        for rank in range(self.num_ranks):
            tp_rank, dp_rank, pp_rank = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
            places.append(
                Place(
                    rank=rank, world_size=self.num_ranks, dp_rank=dp_rank, dp_size=self.dp, pp_rank=pp_rank,
                    pp_size=self.pp, tp_rank=tp_rank, tp_size=self.tp, vpp_size=self.vpp,
                    schedule=self._schedule or ("1f1b" if self.pp > 1 else ""),
                )
            )  # fmt: skip
        return places

    def _blocks(self, stage: int) -> list[str]:
        """Local names of a stage's layers: each stage counts its own from 0, as Megatron's do."""
        first = stage * self._layers // self.num_depths
        return [f"layers.{i}" for i in range((stage + 1) * self._layers // self.num_depths - first)]

    def _local_sites(self, stage: int) -> list[tuple[str, bool]]:
        """(local module, whether it is its input that is observed) in forward order; a module's output otherwise."""
        sites = [("embed", False)] if stage == 0 else [("", True)]
        for block in self._blocks(stage):
            sites += [(f"{block}.norm", False), (f"{block}.attn", False), (f"{block}.mlp", False), (block, False)]
        if stage == self.num_depths - 1:
            sites += [("norm", False), ("head", False)]
        return sites

    def _canonical(self, name: str, stage: int) -> str:
        return canonical(name, self._offsets[stage], f"stage{stage}" if self.num_depths > 1 else "model")

    def table(self, place: Place) -> Table:
        """Return what the rank at a place observes in a step."""
        tensors: list[TensorInfo] = []
        origins: list[tuple[int, int]] = []
        chunks = []
        params: list[int] = []
        wgrads: list[int] = []
        passes: list[tuple[list[int], list[int]]] = []
        for chunk in range(self.vpp):
            made = self._chunk(place, chunk, tensors, origins)
            chunks.append(made[0])
            params += made[1]
            wgrads += made[2]
            passes.append(made[3:])
        order = [(tensor, -1) for tensor in params]
        work = self._work[place.pp_rank] if self._work else program_order("", 1, 1, self.micro_steps)[0]
        for is_forward, chunk, micro_step in work:
            forwards, backwards = passes[chunk]
            order += [(tensor, micro_step) for tensor in (forwards if is_forward else reversed(backwards))]
        order += [(tensor, -1) for tensor in wgrads]
        if self._shuffle:
            # What a tensor's number is says nothing: another on each rank.
            numbers = np.random.default_rng((self._seed, place.rank)).permutation(len(tensors)).tolist()
            tensors = [msgspec.structs.replace(one, id=number) for one, number in zip(tensors, numbers, strict=True)]
        descriptor = Descriptor(
            version=VERSION,
            place=place,
            chunks=tuple(chunks),
            tensors=tuple(sorted(tensors, key=lambda one: one.id)),
            row_fields=row_fields(ROW_DTYPE),
            row_bytes=ROW_DTYPE.itemsize,
            environment={"host": f"node{place.rank // self._ranks_per_host}", "kernel": "synthetic"},
            first_step=self._first_step,
        )
        return self._columns(place, descriptor, tensors, order, origins)

    def _chunk(
        self, place: Place, chunk: int, tensors: list[TensorInfo], origins: list[tuple[int, int]]
    ) -> tuple[ChunkInfo, list[int], list[int], list[int], list[int]]:
        """Add a chunk's tensors, and (depth, place in the model) of each; return its params, wgrads, and passes."""
        stage = self.depth_of(place, chunk)
        before = sum(len(self._local_sites(earlier)) for earlier in range(stage))
        sites = self._local_sites(stage)
        blocks = self._blocks(stage)
        has_tp = place.tp_size > 1
        data_place = {"dp": "shard", **({"tp": "replicate"} if has_tp else {})}
        d = self._d_model
        weights: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {}
        cut = max(1, d // place.tp_size)
        for name, is_input in sites:
            if is_input or name in blocks:
                continue
            leaf = name.rpartition(".")[2]
            shape = {"norm": (d,), "attn": (3 * cut, d), "mlp": (4 * cut, d)}.get(leaf, (16 * cut, d))
            placed = {"dp": "replicate"}
            if has_tp:
                placed["tp"] = "replicate" if leaf == "norm" else "shard"
            weights[name] = (shape, placed)
        params: list[int] = []
        wgrads: list[int] = []
        states: list[int] = []
        forwards: list[int] = []
        backwards: list[int] = []

        def add(name: str, kind: str, at: int, **more: Any) -> int:
            number = len(tensors)
            tensors.append(TensorInfo(id=number, name=name, kind=kind, dtype="float32", chunk=chunk, site_pos=at, **more))
            origins.append((stage, before + at))
            return number

        for at, (name, _) in enumerate(sites):
            if name in weights:
                shape, placed = weights[name]
                of_weight = (("param", params), ("wgrad", wgrads), ("exp_avg", states), ("update", states))
                for kind, into in of_weight:
                    if kind in self._kinds:
                        into.append(add(f"{name}.weight", kind, at, shape=shape, placements=placed))
        last = len(sites) - 1
        for at, (name, is_input) in enumerate(sites):
            border, index = "", -1
            if at == 0:
                border, index = ("chunk_input", 0) if is_input else ("block_input", 1)
            elif name in blocks:
                border, index = "block_output", 2 + blocks.index(name)
            elif at == last:
                border, index = "chunk_output", len(blocks) + 2
            following = sites[at + 1][0] if at < last else ""
            consumers: tuple[str, ...] = (following,) if following else ()
            if following.endswith(".norm"):
                consumers = (following.rpartition(".")[0], following)
            more: dict[str, Any] = {
                "shape": (2, 16, d), "placements": data_place, "consumers": consumers,
                "also": ("",) if at == last else (), "border": border,
            }  # fmt: skip
            for kind, grad in (("activation_in", "dgrad_in"),) if is_input else (("activation", "dgrad"),):
                if kind in self._kinds or (border and self._black_box):
                    forwards.append(add(name, kind, at, border_index=index, **more))
                if grad in self._kinds or (border and self._black_box):
                    # A tensor that is two borders: its gradient was made behind the later one.
                    if is_input:
                        more["border"], index = "block_input", 1
                    elif at == last:
                        more["border"], index = "chunk_output", len(blocks) + 2
                    backwards.append(add(name, grad, at, border_index=index, **more))
        info = ChunkInfo(
            vpp_stage=chunk, depth=stage, segments=("stem", *blocks, "head"), blocks=tuple(blocks),
            modules=tuple(dict.fromkeys(["", *(name for name, _ in sites if name)])),
        )  # fmt: skip
        return info, params, wgrads + states, forwards, backwards

    def _columns(
        self,
        place: Place,
        descriptor: Descriptor,
        table: list[TensorInfo],
        order: list[tuple[int, int]],
        origins: list[tuple[int, int]],
    ) -> Table:
        """order: (place in `table`, micro_step) in the order of observation."""
        rows = np.zeros(len(order), ROW_DTYPE)
        tensors = [table[at] for at, _ in order]
        rows["tensor"] = [tensor.id for tensor in tensors]
        rows["kind"] = [Kind.of(tensor.kind) for tensor in tensors]
        rows["flags"] = [Flag.BORDER if tensor.border else 0 for tensor in tensors]
        rows["micro_step"] = [micro_step for _, micro_step in order]
        rows["call_id"] = np.arange(len(order))
        rows["site_pos"] = [tensor.site_pos for tensor in tensors]
        rows["num_folded"] = 1
        rows["bad_call_id"], rows["bad_micro_step"] = NONE_ID, -1
        rows["max_call_id"], rows["max_micro_step"] = rows["call_id"], rows["micro_step"]
        scales = {"param": 0.05, "wgrad": 1e-3, "activation": 1.0, "activation_in": 1.0}
        keys = []
        modules = []
        for tensor, (at, micro_step) in zip(tensors, order, strict=True):
            module = tensor.name.removesuffix(".weight")
            modules.append(self._canonical(module, origins[at][0]))
            apart = [f"{axis}{place.coordinate(axis)}" for axis, word in tensor.placements.items() if word == "shard"]
            text = f"{self._seed}/{modules[-1]}/{tensor.kind}/{micro_step}/{'/'.join(apart)}"
            keys.append(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
        return Table(
            descriptor=descriptor,
            rows=rows,
            scale=np.array([scales.get(tensor.kind, 1e-2) for tensor in tensors]),
            count=np.array([math.prod(tensor.shape) for tensor in tensors], np.int64),
            key=np.array(keys, np.uint64),
            moves=np.array([tensor.kind != "param" for tensor in tensors]),
            position=np.array([origins[at][1] for at, _ in order], np.int64),
            module=modules,
        )


class RankTables:
    """What each rank observes, made when it is asked for: of a rank that others write nothing is."""

    def __init__(self, model: SyntheticModel) -> None:
        self._model, self._places = model, model.places()
        self._made: dict[int, Table] = {}

    def __getitem__(self, rank: int) -> Table:
        if rank not in self._made:
            self._made[rank] = self._model.table(self._places[rank])
        return self._made[rank]

    def __iter__(self) -> Iterator[Table]:
        return (self[rank] for rank in range(len(self._places)))
