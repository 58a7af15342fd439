"""Files of recorded anomalies: which there are, and their bytes in pieces, however large or damaged they are."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import MALFORMED, ConfigError
from sentinel.explain.msprobe_records import MsprobeRecord

_CHUNK_BYTES = 1 << 20
_RANGE_BYTES = 16 << 20
"""Size of the pieces that processes share."""

_ENDINGS = (".jsonl", ".jsonl.gz")

_MSPROBE = msgspec.json.Decoder(dict[str, MsprobeRecord])


class FileRange(msgspec.Struct, frozen=True):
    """Bytes [start, end) of a file, cut at line feeds."""

    path: str
    start: int
    end: int
    is_last: bool


class Damage(msgspec.Struct):
    """What of the files could not be read."""

    torn: list[str] = []
    """Files whose last line, or last record, was half written."""
    malformed: list[str] = []
    """Where else: all such files, and the first eight such lines."""
    num_malformed: int = 0

    def note_line(self, where: str) -> None:
        """Count a line that could not be read."""
        self.num_malformed += 1
        if len(self.malformed) < 8:
            self.malformed.append(where)

    def note_file(self, where: str) -> None:
        """Count a file that could not be read at all."""
        self.num_malformed += 1
        self.malformed.append(where)

    def add(self, other: Damage) -> None:
        """Take in what another process could not read."""
        self.torn += other.torn
        self.malformed += other.malformed
        self.num_malformed += other.num_malformed


def anomaly_files(directory: Path) -> list[Path]:
    """Return the files of anomalies under a run, a directory of such files, or msProbe's output; sorted.

    A directory with one run in it is that run. ConfigError when there is no such directory, or when it holds several.
    """
    if directory.is_file():
        return [directory]
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected a directory of anomalies, found none; give a run with -d DIR")
    files = {path for ending in _ENDINGS for path in directory.glob(f"anomalies/*{ending}")}
    if not files and not (directory / "anomalies").is_dir():
        files.update(
            path
            for ending in _ENDINGS
            for path in directory.glob(f"*{ending}")
            if not path.name.startswith("incidents.jsonl")
        )
    for pattern in ("anomaly_detected/rank*/anomaly.json", "rank*/anomaly.json", "anomaly.json"):
        files.update(directory.glob(pattern))
    if not files and not (directory / "spool").is_dir() and not (directory / "anomalies").is_dir():
        runs = sorted(path.parent.name for path in directory.glob("*/anomalies") if path.is_dir())
        if len(runs) == 1:
            return anomaly_files(directory / runs[0])
        if runs:
            raise ConfigError(f"{directory}: expected one run, found {len(runs)}: {', '.join(runs[:8])}; name one")
    return sorted(files)


def ranges_of(path: Path) -> Iterator[FileRange]:
    """Yield a file in ranges of about 16 MiB that end at line feeds; msProbe's one object, and what is packed, whole."""
    size = path.stat().st_size
    if path.suffix in (".json", ".gz"):
        yield FileRange(str(path), 0, size, True)
        return
    start = 0
    with path.open("rb") as file:
        while start < size:
            end = min(start + _RANGE_BYTES, size)
            if end < size:
                file.seek(end - 1)
                file.readline()
                end = min(file.tell(), size)
            yield FileRange(str(path), start, end, end == size)
            start = end


def chunks(part: FileRange) -> Iterator[tuple[memoryview, int, bool]]:
    """Yield (whole lines, offset, is the end) of a range, each valid until the next is asked for."""
    buffer = bytearray(_CHUNK_BYTES)
    have, offset = 0, part.start
    with Path(part.path).open("rb", buffering=0) as file:
        file.seek(part.start)
        while True:
            left = part.end - offset - have
            view = memoryview(buffer)
            num = file.readinto(view[have : have + min(left, len(buffer) - have)]) if left > 0 else 0
            if not num:
                if have:
                    yield view[:have], offset, True
                return
            cut = buffer.rfind(b"\n", have, have + num) + 1
            have += num
            if not cut:
                if have == len(buffer):
                    # What was yielded before may still be looked at: the old buffer stays as it is.
                    buffer = buffer + bytes(len(buffer))
                continue
            yield view[:cut], offset, False
            offset += cut
            have -= cut
            buffer[:have] = buffer[cut : cut + have]


def packed_chunks(path: str, damage: Damage) -> Iterator[tuple[memoryview, int, bool]]:
    """Yield what `chunks` does of a gzip file; offsets are those of what was packed. Cut short, all before the cut."""
    rest, offset = b"", 0
    unpack = zlib.decompressobj(wbits=31)
    is_whole = True
    with Path(path).open("rb") as file:
        while block := file.read(_CHUNK_BYTES // 8 + 1):
            while block:
                try:
                    rest += unpack.decompress(block)
                except zlib.error:
                    damage.note_file(f"{path}: expected gzip")
                    return
                is_whole = unpack.eof
                block = unpack.unused_data if unpack.eof else b""
                if unpack.eof:
                    unpack = zlib.decompressobj(wbits=31)
            cut = rest.rfind(b"\n") + 1
            if cut:
                yield memoryview(rest)[:cut], offset, False
                rest, offset = rest[cut:], offset + cut
    if not is_whole:
        damage.torn.append(path)
    elif rest:
        yield memoryview(rest), offset, True


def msprobe_chunks(path: str, damage: Damage) -> Iterator[dict[str, MsprobeRecord]]:
    """Yield the records of one of msProbe's files, some at a time.

    A JSON string holds no line feed, so `},` at the end of a line ends a record, if records are flat: msProbe's are. A
    file that is laid out otherwise is read whole.
    """
    with Path(path).open("rb") as file:
        rest = b""
        is_first = True
        while block := file.read(_CHUNK_BYTES):
            rest += block
            cut = max(rest.rfind(b"},\n"), rest.rfind(b"},\r\n"))
            if cut < 0:
                continue
            head = rest[: cut + 1] + b"}" if is_first else b"{" + rest[: cut + 1] + b"}"
            try:
                records = _MSPROBE.decode(head)
            except MALFORMED:
                rest += file.read()
                break
            yield records
            rest, is_first = rest[cut + 2 :], False
        if not rest.strip():
            return
        if is_first and not rest.lstrip().startswith(b"{"):
            damage.note_file(f"{path}: expected an object of records")
            return
        try:
            yield _MSPROBE.decode(rest if is_first else b"{" + rest)
        except MALFORMED:
            # The file is rewritten whole each step: cut short, it ends in the middle of a record.
            cut = rest.rfind(b"}")
            while cut > 0:
                try:
                    yield _MSPROBE.decode((b"" if is_first else b"{") + rest[: cut + 1] + b"}")
                    break
                except MALFORMED:
                    cut = rest.rfind(b"}", 0, cut)
            damage.torn.append(path)


def repaired(line: bytes) -> bytes | None:
    """Return a line that others wrote with bare NaN or Infinity in it as strict JSON; None when that is not what ails it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return msgspec.json.encode(_strict(record)) if isinstance(record, dict) else None


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        result = {key: _strict(one) for key, one in value.items()}
        number = value.get("value")
        if isinstance(number, float) and not math.isfinite(number):
            result["value_text"] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
        return result
    return [_strict(one) for one in value] if isinstance(value, list) else value
