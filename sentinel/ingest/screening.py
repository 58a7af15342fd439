"""Screening: accepts a frame, or holds it back until the next one confirms it, or replaces it by a record of why not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sentinel.errors import WireError
from sentinel.ingest.descriptor_lookup import look_back
from sentinel.ingest.incarnation import MAX_LAYOUTS, Incarnation, SpoolRecord
from sentinel.ingest.problem_log import Problems
from sentinel.ingest.trust import bears_out, leaps, why_contradicted, why_descriptor, why_header
from sentinel.messages import IMPOSSIBLE, Bye, Descriptor, EndStep, Health, Heartbeat, LayoutChange
from sentinel.wire.frame import DESCRIPTIONS, NO_ATTEMPT, Frame, FrameType, Message, decode_message
from sentinel.wire.spool import parse_incarnation_folder
from sentinel.wire.spool_files import file_name

_ROWS = int(FrameType.ROWS)


class Screening:
    """Knows the processes of a run by their frames. Each frame goes through once, whatever is read twice."""

    def __init__(self, spool_dir: Path, problems: Problems) -> None:
        """spool_dir: where descriptors are looked up that a change is made of."""
        self.incarnations: dict[bytes, Incarnation] = {}
        self._spool_dir, self._problems = spool_dir, problems
        self._newest: dict[str, bytes] = {}
        """Folder -> the process that wrote its newest frame."""

    def newest_of(self, folder: str) -> Incarnation | None:
        """Return the process that wrote the newest frame of a spool's folder."""
        return self.incarnations.get(self._newest.get(folder, b""))

    def add(self, incarnation: Incarnation) -> None:
        """Take in a process that was known before a restart."""
        self.incarnations[incarnation.id] = incarnation
        self._newest[incarnation.folder] = incarnation.id

    def take(self, folder: str, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        """Return what a frame of a spool brings: itself, one that was doubted before it, or a record that says why not.

        begin: (file index, byte offset) at which it begins.
        """
        header = frame.header
        rank, digits = parse_incarnation_folder(folder) or (0, "")
        why = why_header(header, rank)
        incarnation = self.incarnations.get(header.incarnation)
        if not why and incarnation is None and header.incarnation.hex()[: len(digits)] != digits:
            why = f"expected the process {digits}, got {header.incarnation.hex()}"
        if why:
            return self._refuse(folder, self.newest_of(folder), frame, begin, why)
        if incarnation is None:
            attempt = None if header.attempt == NO_ATTEMPT else header.attempt
            incarnation = Incarnation(header.incarnation, header.rank, folder, attempt, first_wall_ns=header.wall_ns)
            self.incarnations[header.incarnation] = incarnation
        self._newest[folder] = header.incarnation
        if header.seq <= incarnation.max_seq and header.type in DESCRIPTIONS and header.layout_id not in incarnation.layouts:
            # A thinned file is read from its beginning after a restart: its rows point into what it described before.
            self._describe_again(incarnation, frame, begin)
            return []
        records: list[SpoolRecord] = []
        if incarnation.leap is not None:
            is_borne_out = bears_out(incarnation.leap[0].header, header)
            if is_borne_out is not None:
                leap, incarnation.leap = incarnation.leap, None
                if is_borne_out:
                    records = self._accept(folder, incarnation, *leap)
                else:
                    why = leaps(leap[0].header, incarnation.max_seq, incarnation.last_step)
                    records = self._refuse(folder, incarnation, *leap, why)
        if incarnation.leap is None and leaps(header, incarnation.max_seq, incarnation.last_step):
            incarnation.leap = (frame, begin)
            return records
        return records + self._accept(folder, incarnation, frame, begin)

    def settle(self, folder: str) -> list[SpoolRecord]:
        """Return the frame that was held back of a spool that has ended: no further frame can refute it."""
        incarnation = self.newest_of(folder)
        if incarnation is None or incarnation.leap is None:
            return []
        leap, incarnation.leap = incarnation.leap, None
        return self._accept(folder, incarnation, *leap)

    def _accept(self, folder: str, incarnation: Incarnation, frame: Frame, begin: tuple[int, int]) -> list[SpoolRecord]:
        """Accept a frame whose header is possible."""
        header = frame.header
        if not incarnation.count(header.seq):
            return []
        incarnation.num_frames += 1
        message: Message | None = None
        why = incarnation.refused.get(header.layout_id, "") if header.type == _ROWS else ""
        if header.type != _ROWS:
            try:
                message = decode_message(frame)
            except WireError as error:
                why = str(error)
        if not isinstance(message, Heartbeat):  # as most are
            if isinstance(message, LayoutChange):
                message = self._changed(incarnation, frame, begin, message)
            if isinstance(message, Descriptor):
                why = why_descriptor(message, incarnation.rank)
            described = incarnation.layouts.get(header.layout_id, incarnation.descriptor)
            why = why or why_contradicted(frame, message, described)
        if why:
            return self._refuse(folder, incarnation, frame, begin, why, is_counted=True)
        if header.wall_ns > incarnation.last_wall_ns:
            incarnation.last_wall_ns = header.wall_ns
        if isinstance(message, Heartbeat):
            incarnation.heartbeat = message
        elif isinstance(message, EndStep):
            incarnation.last_step = header.step
        elif isinstance(message, Descriptor):
            incarnation.refused.pop(header.layout_id, None)
            incarnation.describe(header.layout_id, message, begin)
        elif isinstance(message, Bye):
            incarnation.bye = message
        descriptor = incarnation.layouts.get(header.layout_id)
        return [SpoolRecord(incarnation, frame, begin, message, descriptor, incarnation.last_wall_ns)]

    def _describe_again(self, incarnation: Incarnation, frame: Frame, begin: tuple[int, int]) -> None:
        try:
            message = decode_message(frame)
        except WireError:
            return
        if isinstance(message, LayoutChange):
            message = self._changed(incarnation, frame, begin, message)
        if isinstance(message, Descriptor) and not why_descriptor(message, incarnation.rank):
            incarnation.describe(frame.header.layout_id, message, begin)

    def _refuse(
        self,
        folder: str,
        incarnation: Incarnation | None,
        frame: Frame,
        begin: tuple[int, int],
        why: str,
        *,
        is_counted: bool = False,
    ) -> list[SpoolRecord]:
        """Refuse a frame whose content is impossible: report it, and return a health record in its place.

        is_counted: its number is believed: who begins again before it then reads it once more, and says the same.

        Where the frame described tensors, the rows that point into its table are left out too, until it comes right.
        """
        header, rank = frame.header, (parse_incarnation_folder(folder) or (0, ""))[0]
        text = (
            f"rank {rank}: spool/{folder}/{file_name(begin[0])} at byte {begin[1]}: {why[:500]}; the frame is left out. Its "
            "checksum is right, so this rank wrote it so: restart the rank, and where it happens again report it and check "
            "the machine's memory"
        )
        self._problems.report(f"{folder}/{IMPOSSIBLE}/{min(header.type, len(FrameType))}", text)
        if incarnation is None:
            return []
        incarnation.num_undecodable += 1
        if header.type in (FrameType.DESCRIPTOR, FrameType.CHANGE) and header.layout_id not in incarnation.layouts:
            incarnation.refused[header.layout_id] = f"its tensors were never described: {why[:200]}"
            if len(incarnation.refused) > MAX_LAYOUTS:
                del incarnation.refused[next(iter(incarnation.refused))]
        stand_in = msgspec.structs.replace(
            header,
            type=int(FrameType.HEALTH),
            incarnation=incarnation.id,
            rank=incarnation.rank,
            seq=header.seq if is_counted else incarnation.max_seq + 1,
            step=incarnation.last_step,
            row_count=0,
            wall_ns=incarnation.last_wall_ns,
        )
        reported = Health(code=IMPOSSIBLE, message=text, site=folder, step=incarnation.last_step)
        held = msgspec.structs.replace(frame, header=stand_in, payload=b"")
        return [SpoolRecord(incarnation, held, begin, reported, incarnation.descriptor, incarnation.last_wall_ns)]

    def _changed(
        self, incarnation: Incarnation, frame: Frame, begin: tuple[int, int], change: LayoutChange
    ) -> Descriptor | None:
        """Return the descriptor that results from a change; None where the descriptor that it changes is not known."""
        known = incarnation.layouts.get(frame.header.layout_id)
        if known is not None:
            return known
        base = incarnation.layouts.get(change.base)
        if base is None and change.base_offset < begin[1]:
            place = (frame.file_index, change.base_offset)
            found = look_back(self._spool_dir / incarnation.folder, incarnation.id, place, incarnation.layouts)
            # What the newest says of a tensor is right but for what was lost between.
            base = found[1] if found is not None and found[0] == change.base else incarnation.descriptor
        if base is None:
            incarnation.num_undecodable += 1
            return None
        return change.applied_to(base)
