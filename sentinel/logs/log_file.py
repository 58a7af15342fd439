"""Plain logs that people have already: which kind a file is, and its rows as columns of numbers.

CSV (any delimiter), JSON lines, JSON, Hugging Face's trainer_state.json, TensorBoard's event files, offline runs of Weights
& Biases, Neptune's export as Parquet, what trainers print; text and events packed by gzip, bzip2 or xz too. Files are
read as streams: memory is what their numbers take.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from sentinel.errors import LogError
from sentinel.logs.lines import read_lines
from sentinel.logs.neptune_export import MAGIC as PARQUET
from sentinel.logs.neptune_export import first_parts, read_neptune
from sentinel.logs.rows import Log, Rows
from sentinel.logs.tables import (
    SNIFF_LINES,
    cells_of,
    delimiter_of,
    is_all_numbers,
    is_decimal_comma,
    read_csv,
    read_json,
    read_jsonl,
    unwrapped,
    whole_records,
    wrapping_of,
)
from sentinel.logs.tensorboard_events import is_event_file, read_events
from sentinel.logs.wandb_file import MAGIC as WANDB
from sentinel.logs.wandb_file import read_wandb

__all__ = ["Log", "find_logs", "is_log_directory", "read_log"]

HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 24
"""Bytes of a line; a bound on memory, 16 MiB: a longer line is no line of a log."""
MAX_JSON_BYTES = 1 << 30
"""Bytes of a JSON document, which is held whole; a bound on memory, 1 GiB: larger ones have to be made JSON lines."""
_KNOWN = (
    "CSV, JSON lines, JSON, trainer_state.json, TensorBoard events, run-*.wandb, Neptune's Parquet, "
    "or lines such as 'step 10 loss 2.3'"
)
_BINARY = {
    b"SQLite format 3": "SQLite", b"PK\x03\x04": "a zip archive",
    b"\x89HDF": "HDF5", b"\x80\x02": "a pickle",
    b"\x80\x04": "a pickle", b"(\xb5/\xfd": "zstd; unpack it: zstdcat FILE | sentinel rules backtest -",
}  # fmt: skip
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_CONTROL = bytes(range(32)).translate(None, b"\t\n\x0b\x0c\r\x1b\x08\x00")
"""Bytes that no text has; a NUL stands in the logs of a machine that lost its power."""
_DECORATION = re.compile(r"(?=.*(?:---|===|\u2500|\u2501|\u2550))[^\w.]*$")
_BARS = str.maketrans("\u2502\u2503", "||")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_LOG_NAMES = ("trainer_state.json", "metrics.csv", "trainer_log.jsonl", "progress.csv", "metrics.jsonl", "log.csv")


def read_log(path: str | Path, *, columns: Mapping[str, str] | None = None, header: Sequence[str] | None = None) -> Log:
    """Return a plain log; its format is found from its content, never from its name alone.

    path: a file, or a directory of one run's TensorBoard events, of one offline run of W&B, or that holds a single log of a
    well-known name.
    columns: channel (`loss`, `grad_norm`, `lr`, any other) -> what the file calls it, where its name does not say so.
    header: names of the columns of a table that has none.
    LogError names the file, the line where there is one, what was expected and what came.
    """
    path = Path(path)
    try:
        if path.is_dir():
            rows = _read_directory(path, columns, header)
            if isinstance(rows, Log):
                return rows
        else:
            rows = _read_file(path, header)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise LogError(f"{path}: expected {_packing(path)}, got damaged data ({error}); unpack what is left") from error
    except OSError as error:
        if error.errno is None:  # bzip2 says so of damaged data
            raise LogError(f"{path}: expected {_packing(path)}, got damaged data ({error}); unpack what is left") from error
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows.rename(dict(columns or {}))
    return rows.finish()


def is_log_directory(path: Path) -> bool:
    """Whether a directory is one run's log: event files in it, a run of W&B, or a log of a well-known name."""
    return bool(_event_files(path) or _wandb_files(path)) or any((path / name).is_file() for name in _LOG_NAMES)


def find_logs(path: Path) -> list[Path]:
    """Return the logs that a path means: itself, or those of a directory and of the runs in it, sorted."""
    if not path.is_dir() or is_log_directory(path):
        return [path]
    files = [one for one in path.iterdir() if one.is_file() and not one.name.startswith(".") and _ends_like_log(one.name)]
    folders = [one for one in path.iterdir() if one.is_dir()]
    of_wandb = [one for one in folders if _wandb_files(one)]
    # W&B's `latest-run` is a link to one that is there, and its own logs lie beside its runs.
    runs = [one for one in folders if is_log_directory(one) and not (one.is_symlink() and one in of_wandb)]
    files = [one for one in files if not (of_wandb and one.name.startswith("debug"))]
    files += [part for folder in (path, *folders) for part in first_parts(folder)]
    saved = [(int(found[1]), one) for one in runs if (found := _CHECKPOINT.fullmatch(one.name))]
    if saved:
        # Each checkpoint's trainer_state holds the whole log so far: the newest is all of them.
        runs = [one for one in runs if not _CHECKPOINT.fullmatch(one.name)] + [max(saved)[1]]
    return sorted([*files, *runs])


def _ends_like_log(name: str) -> bool:
    return re.sub(r"\.(gz|bz2|xz)$", "", name).endswith((".csv", ".tsv", ".jsonl", ".ndjson", ".log", ".txt", ".json"))


def _event_files(path: Path) -> list[Path]:
    return sorted(one for one in path.glob("*tfevents*") if one.is_file() and not one.name.endswith(".profile-empty"))


def _wandb_files(path: Path) -> list[Path]:
    return sorted(one for one in path.glob("run-*.wandb") if one.is_file())


def _read_directory(path: Path, columns: Mapping[str, str] | None, header: Sequence[str] | None) -> Rows | Log:
    files = _event_files(path)
    if files:
        rows = Rows(path, "tensorboard")
        read_events(rows, files, _open)
        return rows
    if len(of_wandb := _wandb_files(path)) == 1:
        return _read_file(of_wandb[0], header)
    named = [path / name for name in _LOG_NAMES if (path / name).is_file()]
    if not named:
        inside = find_logs(path)
        if len(inside) == 1:
            return read_log(inside[0], columns=columns, header=header)
        found = f"found {', '.join(one.name for one in inside[:6])}; name one of them" if inside else "found none"
        raise LogError(f"{path}: expected a log, or a directory with event files of TensorBoard or run-*.wandb, {found}")
    return read_log(named[0], columns=columns, header=header)


def _read_file(path: Path, header: Sequence[str] | None) -> Rows:
    with _open(path) as stream:
        head = stream.read(HEAD_BYTES)
    if not head.strip():
        raise LogError(f"{path}: expected a log, got an empty file")
    if is_event_file(head):
        rows = Rows(path, "tensorboard")
        read_events(rows, [path], _open)
        return rows
    if "tfevents" in path.name and b"\x00" in head:
        raise LogError(f"{path}: expected event records of TensorBoard, got other bytes at its beginning; damaged")
    if head.startswith(PARQUET):
        rows = Rows(path, "neptune")
        read_neptune(rows, path)
        return rows
    if head.startswith(WANDB):
        rows = Rows(path, "wandb")
        with path.open("rb") as stream:
            read_wandb(rows, stream)
        return rows
    encoding = _encoding(path, head)
    text = head.decode(encoding, "replace").lstrip("\ufeff").replace("\x00", "")
    lines = text.splitlines(keepends=True)
    if len(head) == HEAD_BYTES and len(lines) > 1:
        lines.pop()  # cut in the middle
    form = _json_form(lines)
    with _open(path) as stream:
        if form == "json":
            rows = Rows(path, "json")
            read_json(rows, _whole(path, stream, encoding))
            return rows
        numbered = _lines(path, stream, encoding)
        if form == "jsonl" and (wrapping := wrapping_of(lines)):
            rows = Rows(path, "text")
            read_lines(rows, unwrapped(numbered, wrapping))
            return rows
        if form == "jsonl":
            rows = Rows(path, "jsonl")
            read_jsonl(rows, ((at, line) for at, line in numbered if line.strip()))
            return rows
        kept = [line.translate(_BARS) for line in whole_records(lines) if _is_given(line)][:SNIFF_LINES]
        delimiter = delimiter_of(kept) if kept else None
        if delimiter is not None:
            rows = Rows(path, "csv")
            names = list(header) if header else _names_of_table(path, lines, kept, delimiter)
            given = ((at, line if line.isascii() else line.translate(_BARS)) for at, line in numbered if _is_given(line))
            read_csv(rows, given, delimiter, names, is_decimal=is_decimal_comma(kept, delimiter))
        else:
            rows = Rows(path, "text")
            read_lines(rows, numbered)
    if not rows.num_rows:
        what = "rows under its header" if rows.form == "csv" else "a log"
        got = f"got {kept[0].strip()[:60]!r}" if kept else "got only comments"
        raise LogError(f"{path}:1: expected {what} ({_KNOWN}), {got}")
    return rows


def _is_given(line: str) -> bool:
    """Whether a line of a table says something: blank ones, comments, rules and Excel's own hint do not."""
    if not line.strip() or line.lstrip().startswith(("#", "sep=")):
        return False
    return line.lstrip()[0] not in "-=+|\u2500\u2501\u250c\u250f\u2514\u2517\u251c\u2521" or not _DECORATION.match(line)


def _names_of_table(path: Path, lines: Sequence[str], kept: Sequence[str], delimiter: str) -> list[str] | None:
    """Return names for a table whose first line is no header; None: it has one."""
    first = cells_of(kept[0], delimiter)
    if not is_all_numbers(first):
        return None
    # numpy's savetxt, gnuplot and many a shell script write the header as a comment.
    before = [line for line in lines[: lines.index(kept[0])] if line.lstrip().startswith("#")]
    for line in reversed(before):
        names = cells_of(line.lstrip().lstrip("#").strip(), delimiter)
        if len(names) == len(first) and not is_all_numbers(names):
            return names
    if len(first) == 1:
        return ["loss"]
    leading = [cells_of(line, delimiter)[0] for line in kept]
    counts = [float(cell) for cell in leading if cell.strip().lstrip("-").isdigit()]
    if len(first) == 2 and len(counts) == len(kept) and counts == sorted(counts):
        return ["step", "loss"]
    raise LogError(
        f"{path}:1: expected a header that names its {len(first)} columns (step, loss, grad_norm, lr), got numbers; "
        "add one, or give --header step,loss,..."
    )


def _json_form(lines: Sequence[str]) -> str:
    """Return `json` for one document, `jsonl` for one a line, empty for what is no JSON."""
    kept = [line.strip() for line in lines if line.strip()][:SNIFF_LINES]
    if not kept or kept[0][0] not in "{[":
        return ""
    first = kept[0]
    if first[0] == "[":
        inside = first[1:].strip() or (kept[1] if len(kept) > 1 else "")
        return "json" if inside[:1] in ("{", "]") or re.match(r"\[\s*\d", inside) else ""
    inside = first[1:].strip() or (kept[1] if len(kept) > 1 else "")
    if inside[:1] not in ('"', "}"):
        return ""
    if first.endswith("}") and any(line.startswith("{") for line in kept[1:]):
        return "jsonl"
    return "json"


def _encoding(path: Path, head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for magic, what in _BINARY.items():
        if head.startswith(magic):
            raise LogError(f"{path}: expected a log ({_KNOWN}), got {what}")
    if b"\x00" in head[:-1] and len(head) > 3 and not any(head[1:64:2]):
        return "utf-16-le"
    if b"\x00" in head and not any(head[0:64:2]):
        return "utf-16-be"
    if b"\x00" in head and (head.translate(None, _CONTROL) != head or not head.strip(b"\x00")):
        raise LogError(f"{path}: expected a log ({_KNOWN}), got binary data")
    return "utf-8"


def _packing(path: Path) -> str:
    """Return by what a file is packed; empty: by nothing known."""
    with path.open("rb") as stream:
        head = stream.read(6)
    return next((name for magic, name in _PACKED.items() if head.startswith(magic)), "")


def _open(path: Path) -> BinaryIO:
    packing = _packing(path)
    opened: dict[str, Callable[..., object]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
    return cast(BinaryIO, opened.get(packing, open)(path, "rb"))


def _lines(path: Path, stream: BinaryIO, encoding: str) -> Iterator[tuple[int, str]]:
    """Yield (1-based number, line with its end); bytes that are no text become marks, and a byte order mark goes."""
    text = io.TextIOWrapper(stream, encoding, errors="replace", newline=None)
    at = 0
    try:
        while line := text.readline(MAX_LINE_BYTES):
            at += 1
            if len(line) >= MAX_LINE_BYTES:
                raise LogError(f"{path}:{at}: expected a line of a log, got one of more than {MAX_LINE_BYTES >> 20} MiB")
            yield at, line.lstrip("\ufeff").replace("\x00", "") if at == 1 or "\x00" in line else line
    finally:
        if not stream.closed:
            text.detach()  # whoever opened the stream closes it


def _whole(path: Path, stream: BinaryIO, encoding: str) -> str:
    data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise LogError(f"{path}: expected at most {MAX_JSON_BYTES >> 30} GiB of JSON, got more; write it as JSON lines")
    return data.decode(encoding, "replace").lstrip("\ufeff")
