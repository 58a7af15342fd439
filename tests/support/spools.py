"""What ranks wrote into their spools, read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sentinel.messages import Ack, Bye, Descriptor, EndStep, Health, LayoutChange, TensorInfo, Vector, Vectors
from sentinel.record import ROW_DTYPE
from sentinel.wire.frame import Frame, FrameType, Header, decode_message, scan
from sentinel.wire.spool_reader import SpoolReader

ALL_KINDS = ["param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in"]


def spool_folders(run_dir: Path, rank: int = 0) -> list[Path]:
    """Return the folders of a rank, one for each incarnation."""
    return sorted((run_dir / "spool").glob(f"r{rank:05d}-*"))


def whole_frames(folder: Path) -> Iterator[Frame]:
    """Yield every frame of an incarnation that is over; fails where something else lies between them."""
    for path in sorted(folder.glob("*.spool")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            frame = scan(data, offset)
            assert isinstance(frame, Frame), frame
            offset = frame.offset_after
            yield frame


def frames_so_far(folder: Path) -> Iterator[Frame]:
    """Yield the frames of an incarnation that may still write, or was killed in the middle of one."""
    reader = SpoolReader(folder)
    while frames := reader.poll(final=True):
        yield from frames


def decoded(frames: Iterable[Frame]) -> Iterator[tuple[Header, Any]]:
    """Yield the header of each frame of an incarnation, and what it says.

    Rows are an array [num_rows] of ROW_DTYPE, and a changed layout is the whole descriptor that the change makes.
    """
    layouts: dict[int, Descriptor] = {}
    for frame in frames:
        if frame.header.type == FrameType.ROWS:
            yield frame.header, np.frombuffer(frame.payload, ROW_DTYPE)
            continue
        message: Any = decode_message(frame)
        if isinstance(message, LayoutChange):
            message = message.applied_to(layouts[message.base])
        if isinstance(message, Descriptor):
            layouts[frame.header.layout_id] = message
        yield frame.header, message


def values_of(vector: Vector) -> np.ndarray:
    """Return the values of a vector in its shape."""
    return np.frombuffer(vector.values, vector.dtype).reshape(vector.shape)


class Said:
    """Everything that one rank said, in order, by name: for models of few tensors."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.descriptor: Descriptor | None = None
        """The newest."""
        self.ends: list[EndStep] = []
        self.health: list[Health] = []
        self.acks: list[Ack] = []
        self.byes: list[Bye] = []
        self.rows: dict[int, list[tuple[TensorInfo, Any]]] = {}
        """Step -> the rows, each with its tensor."""
        self.vectors: dict[int, dict[tuple[str, str], list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        """Step -> (name of the tensor, statistic) -> the values."""
        self.items: list[tuple[int, TensorInfo, Vector]] = []
        """The same vectors with their steps and tensors, as they were sent."""
        for folder in spool_folders(run, rank):
            self.read(folder)

    def read(self, folder: Path) -> None:
        """Take in what one incarnation said."""
        tensors: dict[int, TensorInfo] = {}
        kept: dict[type, list[Any]] = {EndStep: self.ends, Health: self.health, Ack: self.acks, Bye: self.byes}
        for header, message in decoded(whole_frames(folder)):
            if isinstance(message, np.ndarray):
                self.rows.setdefault(header.step, []).extend((tensors[int(row["tensor"])], row) for row in message)
            elif isinstance(message, Descriptor):
                self.descriptor = message
                tensors.update((tensor.id, tensor) for tensor in message.tensors)
            elif isinstance(message, Vectors):
                for item in message.items:
                    tensor = tensors[item.tensor]
                    self.items.append((header.step, tensor, item))
                    self.vectors[header.step][tensor.name, item.statistic].append(values_of(item))
            elif type(message) in kept:
                kept[type(message)].append(message)

    def of(self, step: int, kind: str, name: str | None = None) -> list[Any]:
        """Return the rows of one step and kind, in order of their call_ids."""
        found = [r for t, r in self.rows.get(step, []) if t.kind == kind and name in (None, t.name)]
        return sorted(found, key=lambda row: int(row["call_id"]))

    def row(self, step: int, kind: str, name: str) -> Any:
        """Return the only row of that name; fails where there is none, or another."""
        rows = self.of(step, kind, name)
        assert len(rows) == 1, (name, len(rows), sorted(set(self.names(step, kind))))
        return rows[0]

    def names(self, step: int, kind: str) -> list[str]:
        """Return the name of each row of one step and kind."""
        return [t.name for t, _ in self.rows.get(step, []) if t.kind == kind]

    def steps_of(self, kind: str) -> list[int]:
        """Return the steps that have rows of a kind."""
        return [step for step in sorted(self.rows) if self.of(step, kind)]

    def tensor(self, kind: str, name: str) -> TensorInfo:
        """Return a tensor of the newest layout."""
        assert self.descriptor is not None
        return next(t for t in self.descriptor.tensors if t.kind == kind and t.name == name)


class SaidSoFar:
    """What one rank said so far, rows as arrays: for real models, while they train or when they were killed."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.descriptor: Descriptor | None = None
        self.ends: dict[int, EndStep] = {}
        self.health: list[Health] = []
        self.acks: list[Ack] = []
        self.rows: dict[int, list[np.ndarray]] = defaultdict(list)
        for folder in spool_folders(run_dir, rank):
            for header, message in decoded(frames_so_far(folder)):
                if isinstance(message, np.ndarray):
                    self.rows[header.step].append(message)
                elif isinstance(message, Descriptor):
                    self.descriptor = message
                elif isinstance(message, EndStep):
                    self.ends[message.step] = message
                elif isinstance(message, Health):
                    self.health.append(message)
                elif isinstance(message, Ack):
                    self.acks.append(message)

    @property
    def num_rows(self) -> int:
        """Rows of all steps."""
        return sum(len(rows) for parts in self.rows.values() for rows in parts)

    def of(self, step: int, kind: str) -> dict[str, np.void]:
        """Return local name -> row of one step and kind."""
        assert self.descriptor is not None
        names = {tensor.id: tensor.name for tensor in self.descriptor.tensors if tensor.kind == kind}
        return {names[int(row["tensor"])]: row for part in self.rows[step] for row in part if int(row["tensor"]) in names}


def norm(row: Any) -> float:
    """The l2 norm that a row implies."""
    return float(np.sqrt(row["m2"] + row["count"] * row["mean"] ** 2))
