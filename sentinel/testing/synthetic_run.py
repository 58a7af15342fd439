"""A run that is written without being trained: its ranks start, report, fall silent and die as a test asks."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.messages import Ack, Bye, Descriptor, EndStep, Health, Heartbeat
from sentinel.native import fold_rows
from sentinel.place import Place
from sentinel.record import Flag, Kind
from sentinel.testing.clock import FakeClock
from sentinel.testing.faults import Fault, LossJump
from sentinel.testing.model import RankTables, SyntheticModel, Table
from sentinel.testing.values import SyntheticValues
from sentinel.wire.frame import (
    FRAME_TYPES,
    MAGIC,
    NO_ATTEMPT,
    Frame,
    FrameType,
    Header,
    encode_frame,
    encode_message,
    run_id_of,
    scan,
)
from sentinel.wire.spool import FILE_BYTES, ClosedFiles, SpoolWriter, incarnation_folder
from sentinel.wire.spool_files import file_name


class _Rank:
    def __init__(self, tables: RankTables, number: int) -> None:
        self._tables, self._number = tables, number
        self.spool: SpoolWriter | None = None
        self.incarnation = b""
        self.is_dead = False
        self.held: list[tuple[int, bytes, int, int]] | None = None
        self.num_last = 0
        """Frames of the step written last."""

    @property
    def table(self) -> Table:
        """What it observes."""
        return self._tables[self._number]


class SyntheticRun:
    """Writes the spools of a run of pp x dp x tp ranks that trains a small transformer, without training anything.

    Ranks are numbered tp fastest, then dp, then pp. Weights are sharded over tp where a transformer's are, copied over
    dp; activations are sharded over dp. The same seed writes the same values.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pp: int = 1,
        dp: int = 1,
        tp: int = 1,
        layers: int = 4,
        d_model: int = 64,
        micro_steps: int = 2,
        kinds: Collection[str] = ("param", "wgrad", "activation", "dgrad"),
        per_micro_step: bool = False,
        black_box: bool = True,
        attempt: int | None = 0,
        first_step: int = 0,
        step_time_s: float = 0.1,
        elements: int = 64,
        seed: int = 0,
        clock: FakeClock | None = None,
        ranks: Iterable[int] | None = None,
        cap: Callable[[Path, int], ClosedFiles] | None = None,
        file_bytes: int = FILE_BYTES,
        schedule: str = "",
        vpp: int = 1,
        shuffle: bool = False,
        ranks_per_host: int = 8,
    ) -> None:
        """directory: `<runs>/<run>`; its last part is the run's name. layers: of the whole model, at least one a stage.

        elements: how many values are drawn for each row (its count is the tensor's). ranks: those that start; None: all.
        black_box: borders are observed whatever `kinds` says.
        schedule: gpipe, 1f1b, loopedbfs, interleaved1f1b, zbv, dualpipev, ...: in what order ranks do their work, and, with
        vpp chunks on each, how deep in the model a chunk lies. Empty: a plain pipeline, one micro-step after the other.
        cap: makes what keeps the spool of a rank below a cap, of its folder and the rank, as `SpoolCap` of the collector
        does; None: spools grow without end.
        shuffle: number the tensors otherwise on each rank, and write the rows of a step in no order.
        ranks_per_host: ranks that say they run on one machine, `node0`, the next so many on `node1`.
        """
        self.directory = Path(directory)
        self.run = self.directory.absolute().name
        self.pp, self.dp, self.tp = pp, dp, tp
        self.micro_steps = micro_steps
        self.attempt = attempt
        self.step = first_step
        """The step that the next `write` writes."""
        self.step_time_s = step_time_s
        self.clock = clock or FakeClock()
        self._per_micro_step = per_micro_step
        self._seed = seed
        self._shuffle = shuffle
        self._cap, self._file_bytes = cap, file_bytes
        self._num_incarnations = 0
        self._model = SyntheticModel(
            pp=pp, dp=dp, tp=tp, layers=layers, d_model=d_model, micro_steps=micro_steps, kinds=kinds,
            black_box=black_box, first_step=first_step, seed=seed, schedule=schedule, vpp=vpp, shuffle=shuffle,
            ranks_per_host=ranks_per_host,
        )  # fmt: skip
        tables = RankTables(self._model)
        self._values = SyntheticValues(self._model, tables, elements=elements, seed=seed)
        self._ranks = [_Rank(tables, number) for number in range(self.num_ranks)]
        for rank in range(self.num_ranks) if ranks is None else ranks:
            self.start(rank)

    # -- the run ----------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """pp x dp x tp."""
        return self._model.num_ranks

    @property
    def faults(self) -> list[Fault]:
        """Planted so far; `plant` adds to them."""
        return self._values.faults

    @property
    def rows_per_step(self) -> int:
        """Rows that all ranks together write for a step."""
        return sum(self.num_rows(rank) for rank in range(self.num_ranks))

    def num_rows(self, rank: int) -> int:
        """Return the rows that a rank writes for a step."""
        rows = self._ranks[rank].table.rows
        return len(rows) if self._per_micro_step else len(np.unique(rows["tensor"]))

    def modules(self) -> list[str]:
        """Return the canonical names of the modules, in forward order."""
        return self._model.modules()

    def modules_of(self, rank: int) -> set[str]:
        """Return the canonical names of the modules that a rank holds, whole chunks among them."""
        return set(self._ranks[rank].table.module)

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        return self._ranks[rank].table.descriptor.place

    def descriptor(self, rank: int) -> Descriptor:
        """Return what a rank says of itself."""
        return self._ranks[rank].table.descriptor

    def incarnation(self, rank: int) -> bytes:
        """Return the newest incarnation of a rank."""
        return self._ranks[rank].incarnation

    def folder(self, rank: int) -> Path:
        """Return the spool folder of a rank's newest incarnation."""
        return incarnation_folder(self.directory, rank, self._ranks[rank].incarnation)

    def plant(self, *faults: Fault) -> SyntheticRun:
        """Have faults happen at their steps; returns the run."""
        for fault in faults:
            if not isinstance(fault, LossJump) and fault.module not in self.modules():
                raise ValueError(f"no module {fault.module!r}; there are {', '.join(self.modules())}")
        self.faults.extend(faults)
        return self

    def write(self, num_steps: int = 1, *, ranks: Sequence[int] | None = None, skip: Collection[int] = ()) -> None:
        """Write the next steps. ranks: those that write, in this order (None: all, rising); skip: ranks that do not.

        The clock advances by step_time_s a step, before its end.
        """
        for _ in range(num_steps):
            self.clock.advance(self.step_time_s)
            for rank in range(self.num_ranks) if ranks is None else ranks:
                if rank not in skip:
                    self.write_rank(rank, self.step)
            self._values.settle(self.step)
            self.step += 1

    def write_rank(self, rank: int, step: int, *, end: bool = True) -> None:
        """Write one step of one rank: its rows, and unless end=False its end_step. Dead and unstarted ranks say nothing."""
        one = self._ranks[rank]
        if one.spool is None or one.is_dead:
            return
        rows, end_step = self.observe(rank, step)
        one.num_last = 0
        self._write_message(one, FrameType.ROWS, rows.tobytes(), step, len(rows))
        if end:
            self._write_message(one, FrameType.END_STEP, encode_message(end_step), step, 0)

    def observe(self, rank: int, step: int) -> tuple[npt.NDArray[np.void], EndStep]:
        """Return what a rank would say of a step: [num_rows] ROW_DTYPE and the end_step, planted faults included."""
        one = self._ranks[rank]
        rows = self._values.rows(one.table, step)
        num_calls = len(rows)
        if not self._per_micro_step:
            rows = rows[: fold_rows(rows, len(rows))]
        if self._shuffle:
            rows = rows[np.random.default_rng((self._seed, rank, step)).permutation(len(rows))]
        is_skipped = self._values.is_skipped(step)
        if is_skipped:
            rows["flags"] |= np.uint16(Flag.SKIPPED)
        kinds, counts = np.unique(rows["kind"], return_counts=True)
        end_step = EndStep(
            step=step,
            num_rows=len(rows),
            num_calls=num_calls,
            num_micro_steps=self.micro_steps,
            scalars=self._values.scalars(one.table.descriptor.place, step),
            is_skipped=is_skipped,
            step_time_s=self.step_time_s,
            due={Kind(int(kind)).label: int(count) for kind, count in zip(kinds, counts, strict=True)},
        )
        return rows, end_step

    def end(
        self, rank: int | None = None, reason: str = "exit", signal: str = "", error: str = "", message: str = ""
    ) -> None:
        """Say bye: a rank, or all that live.

        signal: name of the one that ended it, where its handler said so. error, message: of the exception that did.
        """
        said = Bye(reason=reason, step=self.step - 1, signal=signal, error=error, message=message)
        for one in self._ranks if rank is None else [self._ranks[rank]]:
            if one.spool is not None and not one.is_dead:
                self._write_message(one, FrameType.BYE, encode_message(said), self.step - 1, 0)
                if one.held is None:
                    one.spool.close()
                    one.is_dead = True

    # -- what may happen to a rank ----------------------------------------------------------------------------------

    def start(self, rank: int) -> bytes:
        """Begin a new incarnation of a rank: at the start, or in place of one that was killed; returns the incarnation."""
        one = self._ranks[rank]
        if one.spool is not None:
            one.spool.close()
        self._num_incarnations += 1
        self.clock.advance(0.001)
        text = f"{self._seed}/{self.run}/{rank}/{self._num_incarnations}"
        one.incarnation = hashlib.blake2b(text.encode(), digest_size=16).digest()
        folder = incarnation_folder(self.directory, rank, one.incarnation)
        one.spool = SpoolWriter(
            folder, one.incarnation, rank, run_id_of(self.run), NO_ATTEMPT if self.attempt is None else self.attempt,
            file_bytes=self._file_bytes, closed_files=self._cap and self._cap(folder, rank), clock=self.clock,
        )  # fmt: skip
        one.is_dead, one.held = False, None
        one.spool.append(FrameType.DESCRIPTOR, encode_message(one.table.descriptor))
        return one.incarnation

    def restart(self, step: int, *, attempt: int | None, is_resumed: bool = True) -> None:
        """Begin new incarnations of all ranks at a step, as after a crash: what was not said bye to is dead.

        is_resumed: they loaded the state of our monitor from a checkpoint; else the same name trains anew.
        """
        self.attempt, self.step = attempt, step
        for one in self._ranks:
            resumed_step = step if is_resumed else -1
            one.table.descriptor = msgspec.structs.replace(one.table.descriptor, resumed_step=resumed_step)
        for rank in range(self.num_ranks):
            self.start(rank)

    def kill(self, rank: int, *, in_frame: bool = True) -> None:
        """End a rank's incarnation at once, by default in the middle of a frame of the next step."""
        one = self._ranks[rank]
        if one.spool is not None and in_frame:
            rows, _ = self.observe(rank, self.step)
            header = Header(
                type=FrameType.ROWS,
                incarnation=one.incarnation,
                run_id=run_id_of(self.run),
                rank=rank,
                seq=2**40,
                step=self.step,
                row_count=len(rows),
                wall_ns=self.clock.wall_ns(),
                mono_ns=self.clock.mono_ns(),
            )
            head, body = encode_frame(header, rows.tobytes())
            self._append_raw(one, head + bytes(body)[: len(body) // 2])
        if one.spool is not None:
            one.spool.close()
        one.is_dead = True

    def hold(self, rank: int) -> None:
        """Keep back what a rank says until `release`: it is late."""
        self._ranks[rank].held = []

    def release(self, rank: int) -> None:
        """Let out what was kept back."""
        one = self._ranks[rank]
        held, one.held = one.held or [], None
        for frame in held:
            self._write_message(one, *frame)

    def repeat_last(self, rank: int) -> None:
        """Write the frames of a rank's last step a second time, under the same numbers."""
        one = self._ranks[rank]
        frames = self._last_frames(one)
        self._append_raw(one, b"".join(frames))

    def reverse_last(self, rank: int) -> None:
        """Turn the frames of a rank's last step round on disk: its end_step comes before its rows."""
        one = self._ranks[rank]
        frames = self._last_frames(one)
        path = self._path(one)
        size = path.stat().st_size
        os.truncate(path, size - sum(map(len, frames)))
        with path.open("ab") as file:
            file.write(b"".join(reversed(frames)))

    def flip_bit(self, rank: int, from_end: int = 200) -> None:
        """Flip one bit in what a rank wrote, `from_end` bytes before the end of its newest file."""
        path = self._path(self._ranks[rank])
        data = bytearray(path.read_bytes())
        data[-from_end] ^= 0x10
        path.write_bytes(data)

    def report(self, rank: int, message: Health | Heartbeat | Ack, step: int | None = None) -> None:
        """Have a rank send a record of health, a heartbeat or an answer."""
        number = FRAME_TYPES[type(message)]
        self._write_message(self._ranks[rank], number, encode_message(message), self.step if step is None else step, 0)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def _write_message(self, one: _Rank, frame_type: int, payload: bytes, step: int, row_count: int) -> None:
        if one.spool is None or one.is_dead:
            return
        if one.held is not None:
            one.held.append((frame_type, payload, step, row_count))
            return
        one.spool.append(frame_type, payload, step=step, row_count=row_count)
        one.num_last += 1

    def _path(self, one: _Rank) -> Path:
        assert one.spool is not None
        return one.spool.directory / file_name(one.spool.position[0])

    def _append_raw(self, one: _Rank, data: bytes) -> None:
        with self._path(one).open("ab") as file:
            file.write(data)

    def _last_frames(self, one: _Rank) -> list[bytes]:
        data = self._path(one).read_bytes()
        assert data.startswith(MAGIC)
        ends = [0]
        while ends[-1] < len(data):
            found = scan(data, ends[-1])
            if not isinstance(found, Frame):
                break
            ends.append(found.offset_after)
        frames = [data[a:b] for a, b in itertools.pairwise(ends)]
        return frames[-one.num_last :] if one.num_last else []
