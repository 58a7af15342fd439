"""The transformer that a synthetic run pretends to train: its modules, and what each rank observes of them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from sentinel.messages import ChunkInfo, Descriptor, TensorInfo
from sentinel.place import Place, canonical, layer_offsets
from sentinel.record import NONE_ID, ROW_DTYPE, Flag, Kind
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
    """A small transformer cut over pp x dp x tp ranks, numbered tp fastest, then dp, then pp."""

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
    ) -> None:
        """As those of `SyntheticRun`."""
        if layers < pp:
            raise ValueError(f"expected at least one layer a stage, got {layers} layers for {pp} stages")
        self.pp, self.dp, self.tp = pp, dp, tp
        self.micro_steps = micro_steps
        self._layers, self._d_model = layers, d_model
        self._kinds = frozenset(kinds)
        self._black_box = black_box
        self._first_step = first_step
        self._seed = seed
        self._offsets = layer_offsets({stage: self._blocks(stage) for stage in range(pp)})

    @property
    def num_ranks(self) -> int:
        """pp x dp x tp."""
        return self.pp * self.dp * self.tp

    def modules(self) -> list[str]:
        """Return the canonical names of the modules with an output, in forward order."""
        return [
            self._canonical(name, stage)
            for stage in range(self.pp)
            for name, is_input in self._local_sites(stage)
            if not is_input
        ]

    def position(self, module: str) -> int:
        """Return the place of a module's output in the forward order of all sites; ValueError: no such module."""
        at = 0
        for stage in range(self.pp):
            for name, is_input in self._local_sites(stage):
                if not is_input and self._canonical(name, stage) == module:
                    return at
                at += 1
        raise ValueError(f"no module {module!r}")

    def places(self) -> list[Place]:
        """Return where each rank is."""
        places = []
        for rank in range(self.num_ranks):
            tp_rank, dp_rank, pp_rank = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
            places.append(
                Place(
                    rank=rank, world_size=self.num_ranks, dp_rank=dp_rank, dp_size=self.dp, pp_rank=pp_rank,
                    pp_size=self.pp, tp_rank=tp_rank, tp_size=self.tp, schedule="1f1b" if self.pp > 1 else "",
                )
            )  # fmt: skip
        return places

    def _blocks(self, stage: int) -> list[str]:
        """Local names of a stage's layers: each stage counts its own from 0, as Megatron's do."""
        first = stage * self._layers // self.pp
        return [f"layers.{i}" for i in range((stage + 1) * self._layers // self.pp - first)]

    def _local_sites(self, stage: int) -> list[tuple[str, bool]]:
        """(local module, whether it is its input that is observed) in forward order; a module's output otherwise."""
        sites = [("embed", False)] if stage == 0 else [("", True)]
        for block in self._blocks(stage):
            sites += [(f"{block}.norm", False), (f"{block}.attn", False), (f"{block}.mlp", False), (block, False)]
        if stage == self.pp - 1:
            sites += [("norm", False), ("head", False)]
        return sites

    def _canonical(self, name: str, stage: int) -> str:
        return canonical(name, self._offsets[stage], f"stage{stage}" if self.pp > 1 else "model")

    def table(self, place: Place) -> Table:
        """Return what the rank at a place observes in a step."""
        stage = place.pp_rank
        sites = self._local_sites(stage)
        blocks = self._blocks(stage)
        has_tp = place.tp_size > 1
        data_place = {"dp": "shard", **({"tp": "replicate"} if has_tp else {})}
        tensors: list[TensorInfo] = []
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
        order: list[tuple[int, int]] = []
        """(tensor id, micro_step) in the order of observation."""
        local_at: list[int] = []
        params: list[int] = []
        wgrads: list[int] = []
        forwards: list[int] = []
        backwards: list[int] = []

        def add(name: str, kind: str, at: int, **more: Any) -> int:
            tensors.append(TensorInfo(id=len(tensors), name=name, kind=kind, dtype="float32", site_pos=at, **more))
            local_at.append(at)
            return len(tensors) - 1

        for at, (name, _) in enumerate(sites):
            if name in weights:
                shape, placed = weights[name]
                for kind, into in (("param", params), ("wgrad", wgrads)):
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
        order += [(tensor, -1) for tensor in params]
        for micro_step in range(self.micro_steps):
            order += [(tensor, micro_step) for tensor in forwards]
            order += [(tensor, micro_step) for tensor in reversed(backwards)]
        order += [(tensor, -1) for tensor in wgrads]
        descriptor = Descriptor(
            version=VERSION,
            place=place,
            chunks=(
                ChunkInfo(
                    vpp_stage=0, depth=stage, segments=("stem", *blocks, "head"), blocks=tuple(blocks),
                    modules=tuple(dict.fromkeys(["", *(name for name, _ in sites if name)])),
                ),
            ),
            tensors=tuple(tensors),
            row_fields=row_fields(ROW_DTYPE),
            row_bytes=ROW_DTYPE.itemsize,
            environment={"host": f"node{place.rank // 8}", "kernel": "synthetic"},
            first_step=self._first_step,
        )  # fmt: skip
        return self._columns(place, descriptor, order, local_at)

    def _columns(self, place: Place, descriptor: Descriptor, order: list[tuple[int, int]], local_at: list[int]) -> Table:
        stage = place.pp_rank
        before = sum(len(self._local_sites(earlier)) for earlier in range(stage))
        rows = np.zeros(len(order), ROW_DTYPE)
        tensors = [descriptor.tensors[tensor] for tensor, _ in order]
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
        for tensor, (_, micro_step) in zip(tensors, order, strict=True):
            module = tensor.name.removesuffix(".weight") if tensor.kind in ("param", "wgrad") else tensor.name
            modules.append(self._canonical(module, stage))
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
            position=np.array([before + local_at[tensor] for tensor, _ in order], np.int64),
            module=modules,
        )
