"""A run that another tool recorded, written as a spool: one incarnation for each rank and attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from sentinel.errors import StoreError
from sentinel.exports.msprobe_reading import Observation, stats_of
from sentinel.exports.msprobe_steps import Step
from sentinel.messages import Bye, ChunkInfo, Descriptor, EndStep, TensorInfo
from sentinel.place import Place, depth
from sentinel.record import NONE_ID, ROW_DTYPE, STATS_DTYPE, Flag, Kind
from sentinel.version import VERSION
from sentinel.wire.frame import FrameType, encode_message, row_fields, run_id_of
from sentinel.wire.spool import SpoolWriter, incarnation_folder

STEP_NS = 1_000_000
"""Nanoseconds between the times given to two steps: msProbe writes none, so only their order has a meaning."""
_FORWARD_FILES = ("actv", "attention_hook", "moe_router_logit_hook", "linear_hook")


class ImportedRank(msgspec.Struct, frozen=True, kw_only=True):
    """The rank and attempt that observations belong to."""

    run: str
    rank: int
    attempt: int
    place: Place
    began_ns: int
    """Wall clock of the attempt's begin."""
    origin: str
    """Name of the folder, or the log, that they come from."""
    tool: str = "msprobe"
    """What recorded them."""
    is_placed: bool = False
    """Whether `place` is known; false: nothing of this rank may be merged with another's."""


class _StepClock:
    """A clock that stands at the step that is being written."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self.step = -1

    def wall_ns(self) -> int:
        return self._began_ns + self.mono_ns()

    def mono_ns(self) -> int:
        return (self.step + 1) * STEP_NS


class IncarnationWriter:
    """Writes the spool of one rank's attempt. The same steps give the same bytes."""

    def __init__(self, run_dir: Path, who: ImportedRank) -> None:
        self.who = who
        self.num_rows = 0
        text = f"{who.run}/{who.rank}/{who.attempt}/{who.origin}"
        self._incarnation = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._clock = _StepClock(who.began_ns)
        self._spool = SpoolWriter(
            incarnation_folder(run_dir, who.rank, self._incarnation),
            self._incarnation,
            who.rank,
            run_id_of(who.run),
            who.attempt,
            clock=self._clock,
        )
        self._placements = {"dp": "unknown"} if who.place.world_size > 1 and not who.is_placed else {}
        self._tensors: dict[tuple[int, str, str], TensorInfo] = {}
        self._modules: dict[int, dict[str, int]] = {}
        """Chunk -> module -> its place in forward."""
        self._is_described = False

    def write(self, step: Step) -> None:
        """Append a step. StoreError when the disk does not take it."""
        self._clock.step = step.step
        self._meet(step.lines)
        self._describe()
        rows = self._rows(step.lines)
        if self._spool.append_rows(rows, step=step.step) != len(rows):
            raise self._failed()
        kinds, counts = np.unique(rows["kind"], return_counts=True)
        end = EndStep(
            step=step.step,
            num_rows=len(rows),
            num_calls=len(rows),
            num_micro_steps=max((line.micro_step for line in step.lines), default=-1) + 1,
            due={Kind(int(kind)).label: int(count) for kind, count in zip(kinds, counts, strict=True)},
        )
        self._append(FrameType.END_STEP, encode_message(end), step.step)
        self.num_rows += len(rows)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append a step of which only logged values are known. StoreError when the disk does not take it."""
        self._clock.step = step
        self._describe()
        self._append(
            FrameType.END_STEP, encode_message(EndStep(step=step, num_rows=0, num_calls=0, scalars=dict(scalars))), step
        )

    def close(self, last_step: int) -> None:
        """Write the end of the incarnation, and close the spool. last_step: the newest step that was written."""
        self._append(FrameType.BYE, encode_message(Bye(reason="exit", step=last_step)))
        self._spool.close()

    def _describe(self) -> None:
        if not self._is_described:
            self._append(FrameType.DESCRIPTOR, encode_message(self._descriptor()))
            self._is_described = True

    def _append(self, frame_type: FrameType, payload: bytes, step: int = -1) -> None:
        if not self._spool.append(frame_type, payload, step=step):
            raise self._failed()

    def _failed(self) -> StoreError:
        return StoreError(f"{self._spool.directory}: cannot be written: {self._spool.last_error}")

    def _meet(self, lines: Sequence[Observation]) -> None:
        """Take the tensors of a step into the table; what is new, or has another shape, is described anew."""
        for chunk, module in _modules(lines):
            known = self._modules.setdefault(chunk, {})
            if module not in known:
                known[module] = len(known)
                self._is_described = False
        for line in lines:
            key = (line.vpp_stage, line.kind, line.name)
            found = self._tensors.get(key)
            if found is None or (found.shape, found.dtype) != (line.shape, line.dtype):
                self._is_described = False
                self._tensors[key] = TensorInfo(
                    id=len(self._tensors) if found is None else found.id,
                    name=line.name,
                    kind=line.kind,
                    shape=line.shape,
                    dtype=line.dtype,
                    chunk=line.vpp_stage,
                    site_pos=self._modules[line.vpp_stage][_module_of(line)],
                    placements=self._placements,
                )

    def _descriptor(self) -> Descriptor:
        place = self.who.place
        chunks = tuple(
            ChunkInfo(
                vpp_stage=chunk,
                depth=depth(place.schedule, place.pp_rank, chunk, place.pp_size),
                blocks=_blocks(modules),
                segments=("stem", *_blocks(modules), "head"),
                modules=tuple(modules),
            )
            for chunk, modules in sorted(self._modules.items())
        )
        vpp_size = max(self._modules, default=0) + 1
        return Descriptor(
            version=VERSION,
            place=msgspec.structs.replace(place, vpp_size=vpp_size),
            chunks=chunks,
            tensors=tuple(self._tensors.values()),
            row_fields=row_fields(ROW_DTYPE),
            row_bytes=ROW_DTYPE.itemsize,
            environment={"imported_from": self.who.tool, "folder": self.who.origin},
        )

    def _rows(self, lines: Sequence[Observation]) -> np.ndarray:
        rows = np.zeros(len(lines), ROW_DTYPE)
        infos = [self._tensors[line.vpp_stage, line.kind, line.name] for line in lines]
        rows["tensor"] = [info.id for info in infos]
        rows["kind"] = [Kind.of(line.kind) for line in lines]
        rows["micro_step"] = [line.micro_step for line in lines]
        rows["site_pos"] = [info.site_pos for info in infos]
        rows["call_id"] = np.arange(len(lines))
        rows["num_folded"] = 1
        rows["flags"] = Flag.PER_RANK if self._placements else 0
        by_ops: dict[tuple[str, ...], list[int]] = {}
        for at, line in enumerate(lines):
            by_ops.setdefault(line.ops, []).append(at)
        for index in by_ops.values():
            stats = stats_of([lines[at] for at in index])
            for name in STATS_DTYPE.names or ():
                rows[name][index] = stats[name]
        is_bad = (rows["num_nan"] + rows["num_pos_inf"] + rows["num_neg_inf"]) > 0
        rows["bad_call_id"] = np.where(is_bad, rows["call_id"], NONE_ID)
        rows["bad_micro_step"] = np.where(is_bad, rows["micro_step"], -1)
        rows["max_call_id"], rows["max_micro_step"] = rows["call_id"], rows["micro_step"]
        return rows


def _module_of(line: Observation) -> str:
    """Return the module that a tensor belongs to: of a parameter, or a spectrum of one, the module that holds it."""
    name = line.name.partition(":")[0]
    is_parameters = line.micro_step < 0 and line.kind not in ("attention", "router")
    return name.rpartition(".")[0] if is_parameters or line.kind == "wgrad_unreduced" else name


def _modules(lines: Iterable[Observation]) -> list[tuple[int, str]]:
    """Return (chunk, module) in the order of forward: by activations, else by weights, else by gradients, reversed."""
    found: dict[tuple[int, str], None] = {}
    lines = list(lines)
    forward = [line for line in lines if line.file in _FORWARD_FILES]
    backward = [line for line in lines if line.file in ("actv_grad", "grad_unreduced")]
    weights = [line for line in lines if line.file not in (*_FORWARD_FILES, "actv_grad", "grad_unreduced")]
    for line in (*forward, *weights, *reversed(backward)):
        found.setdefault((line.vpp_stage, _module_of(line)))
    return list(found)


def _blocks(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the outermost numbered modules: `encoder.layers.0`."""
    found: dict[str, dict[int, str]] = {}
    for module in modules:
        words = module.split(".")
        for at, word in enumerate(words):
            if word.isdigit():
                found.setdefault(".".join(words[:at]), {})[int(word)] = ".".join(words[: at + 1])
                break
    return tuple(block for numbered in found.values() for _, block in sorted(numbered.items()))
