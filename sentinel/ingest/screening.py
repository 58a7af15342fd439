"""Screening: takes a frame for what it says, or doubts it until the next one, or refuses it and says why."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.errors import WireError
from sentinel.ingest.descriptor_lookup import look_back
from sentinel.ingest.incarnation import MAX_LAYOUTS, Incarnation, SpoolRecord
from sentinel.ingest.problems import Problems
from sentinel.ingest.trust import bears_out, leaps, why_contradicted, why_descriptor, why_header
from sentinel.messages import IMPOSSIBLE, Bye, Descriptor, EndStep, Health, Heartbeat, LayoutChange
from sentinel.wire.frame import DESCRIPTIONS, NO_ATTEMPT, Frame, FrameType, Message, decode_message
from sentinel.wire.spool import parse_life_folder
from sentinel.wire.spool_files import file_name

_ROWS = int(FrameType.ROWS)


class Screening:
    """Knows the processes of a run by their frames. Each frame goes through once, whatever is read twice."""

    def __init__(self, spool_dir: Path, problems: Problems) -> None:
        """spool_dir: where descriptors are looked up that a change is made of."""
        self.lives: dict[bytes, Incarnation] = {}
        self._spool_dir, self._problems = spool_dir, problems
        self._newest: dict[str, bytes] = {}
        """Folder -> the process that wrote its newest frame."""

    def newest_of(self, folder: str) -> Incarnation | None:
        """Return the process that wrote the newest frame of a spool's folder."""
        return self.lives.get(self._newest.get(folder, b""))

    def know(self, life: Incarnation) -> None:
        """Take in a process that was known before a restart."""
        self.lives[life.id] = life
        self._newest[life.folder] = life.id

    def take(self, folder: str, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        """Return what a frame of a spool brings: itself, one that was doubted before it, or a record that says why not.

        begin: (file index, byte offset) at which it begins.
        """
        header = frame.header
        rank, digits = parse_life_folder(folder) or (0, "")
        why = why_header(header, rank)
        life = self.lives.get(header.life)
        if not why and life is None and header.life.hex()[: len(digits)] != digits:
            why = f"expected the process {digits}, got {header.life.hex()}"
        if why:
            return self._refuse(folder, self.newest_of(folder), frame, begin, why)
        if life is None:
            attempt = None if header.attempt == NO_ATTEMPT else header.attempt
            life = Incarnation(header.life, header.rank, folder, attempt, first_wall_ns=header.wall_ns)
            self.lives[header.life] = life
        self._newest[folder] = header.life
        if header.seq <= life.max_seq and header.type in DESCRIPTIONS and header.layout_id not in life.layouts:
            # A thinned file is read from its beginning after a restart: its rows point into what it described before.
            self._describe_again(life, frame, begin)
            return []
        records: list[SpoolRecord] = []
        if life.leap is not None:
            is_borne_out = bears_out(life.leap[0].header, header)
            if is_borne_out is not None:
                leap, life.leap = life.leap, None
                if is_borne_out:
                    records = self._accept(folder, life, *leap)
                else:
                    why = leaps(leap[0].header, life.max_seq, life.last_step)
                    records = self._refuse(folder, life, *leap, why)
        if life.leap is None and leaps(header, life.max_seq, life.last_step):
            life.leap = (frame, begin)
            return records
        return records + self._accept(folder, life, frame, begin)

    def settle(self, folder: str) -> list[SpoolRecord]:
        """Return what was doubted of a spool of which no more comes: there is nothing left to doubt it by."""
        life = self.newest_of(folder)
        if life is None or life.leap is None:
            return []
        leap, life.leap = life.leap, None
        return self._accept(folder, life, *leap)

    def _accept(self, folder: str, life: Incarnation, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        """Take a frame in whose header can be believed."""
        header = frame.header
        if not life.count(header.seq):
            return []
        life.num_frames += 1
        message: Message | None = None
        why = life.refused.get(header.layout_id, "") if header.type == _ROWS else ""
        if header.type != _ROWS:
            try:
                message = decode_message(frame)
            except WireError as error:
                why = str(error)
        if isinstance(message, LayoutChange):
            message = self._changed(life, frame, begin, message)
        if isinstance(message, Descriptor):
            why = why_descriptor(message, life.rank)
        why = why or why_contradicted(frame, message, life.layouts.get(header.layout_id, life.descriptor))
        if why:
            return self._refuse(folder, life, frame, begin, why)
        life.last_wall_ns = max(life.last_wall_ns, header.wall_ns)
        if isinstance(message, EndStep):
            life.last_step = header.step
        elif isinstance(message, Descriptor):
            life.refused.pop(header.layout_id, None)
            life.describe(header.layout_id, message, begin)
        elif isinstance(message, Heartbeat):
            life.heartbeat = message
        elif isinstance(message, Bye):
            life.bye = message
        return [SpoolRecord(life, frame, begin, message, life.layouts.get(header.layout_id), life.last_wall_ns)]

    def _describe_again(self, life: Incarnation, frame: Frame, begin: tuple[int, int]) -> None:
        try:
            message = decode_message(frame)
        except WireError:
            return
        if isinstance(message, LayoutChange):
            message = self._changed(life, frame, begin, message)
        if isinstance(message, Descriptor) and not why_descriptor(message, life.rank):
            life.describe(frame.header.layout_id, message, begin)

    def _refuse(
        self, folder: str, life: Incarnation | None, frame: Frame, begin: tuple[int, int], why: str
    ) -> list[SpoolRecord]:
        """Leave out a frame that says what is impossible: say so, and hand out a health record in its place.

        Where the frame described tensors, the rows that point into its table are left out too, until it comes right.
        """
        header, rank = frame.header, (parse_life_folder(folder) or (0, ""))[0]
        text = (
            f"rank {rank}: spool/{folder}/{file_name(begin[0])} at byte {begin[1]}: {why[:500]}; the frame is left out. Its "
            "checksum is right, so this rank wrote it so: restart the rank, and where it happens again report it and check "
            "the machine's memory"
        )
        self._problems.say(f"{folder}/{IMPOSSIBLE}/{min(header.type, len(FrameType))}", text)
        if life is None:
            return []
        life.num_undecodable += 1
        if header.type in (FrameType.DESCRIPTOR, FrameType.CHANGE) and header.layout_id not in life.layouts:
            life.refused[header.layout_id] = f"its tensors were never described: {why[:200]}"
            if len(life.refused) > MAX_LAYOUTS:
                del life.refused[next(iter(life.refused))]
        stand_in = msgspec.structs.replace(
            header, type=int(FrameType.HEALTH), life=life.id, rank=life.rank, seq=life.max_seq + 1, step=life.last_step,
            row_count=0, wall_ns=life.last_wall_ns,
        )  # fmt: skip
        told = Health(code=IMPOSSIBLE, message=text, site=folder, step=life.last_step)
        held = msgspec.structs.replace(frame, header=stand_in, payload=b"")
        return [SpoolRecord(life, held, begin, told, life.descriptor, life.last_wall_ns)]

    def _changed(self, life: Incarnation, frame: Frame, begin: tuple[int, int], change: LayoutChange) -> Descriptor | None:
        """Return the descriptor that a change makes; None where it is not known of what."""
        known = life.layouts.get(frame.header.layout_id)
        if known is not None:
            return known
        base = life.layouts.get(change.base)
        if base is None and change.base_offset < begin[1]:
            place = (frame.file_index, change.base_offset)
            found = look_back(self._spool_dir / life.folder, life.id, place, life.layouts)
            # What the newest says of a tensor is right but for what was lost between.
            base = found[1] if found is not None and found[0] == change.base else life.descriptor
        if base is None:
            life.num_undecodable += 1
            return None
        return change.applied_to(base)
