"""msProbe's CSV files read as rows of Sentinel's, without guesses at what they do not contain.

A line has a few statistics of a tensor's elements. Count comes from its shape, m2 from norm, mean and count; the third
and fourth moments are not there and stay undefined. Of a tensor with NaN or infinities the finite elements are not known.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.csv_text import unguarded
from sentinel.errors import ConfigError
from sentinel.exports.msprobe_format import (
    FEATURE_FILES,
    FILE,
    FILES,
    FOLDER,
    HEAD,
    MICRO_STEP,
    OPS,
    OTHER_FILE,
    TAIL,
    TENSOR_FILES,
    slot_of,
)
from sentinel.exports.msprobe_limits import refuse_impossible
from sentinel.moments import UNKNOWN_COUNT, Moments
from sentinel.record import STATS_DTYPE

MAX_NUMBER = 2**40
"""Largest number of a step, micro-batch or chunk that is accepted; no trainer counts that far."""
MAX_ELEMENTS = 2**62
ROUNDING = 1e-4
"""Relative change of a norm that counts as rounding to six decimals, which msProbe writes by default. Too small: rounding
is read as variance; too large: the variance of tiny elements is lost."""
_NOT_A_TENSOR = "nan"
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)", re.ASCII)
_SHAPE = re.compile(r"\[(?:\d{1,18}(?:, ?\d{1,18})*,?)?\]|torch\.Size\(\[[\d, ]*\]\)", re.ASCII)


class Observation(msgspec.Struct, frozen=True):
    """One line: a tensor at a step and micro-step."""

    file: str
    """msProbe's file that the line is in: `actv`, `grad_reduced`, ..."""
    kind: str
    name: str
    """Name on the rank, as Sentinel has it."""
    vpp_stage: int
    step: int
    """As Sentinel counts: of optimizer state one less than in the line, of updated weights one more."""
    micro_step: int
    """-1: of no micro-batch."""
    shape: tuple[int, ...]
    dtype: str
    values: tuple[float, ...]
    """Values of the statistics of the file, in the file's order."""
    ops: tuple[str, ...]
    where: str
    """FILE:LINE."""


class Unread(msgspec.Struct):
    """What the folders contain and no row was made of."""

    num_no_tensor: int = 0
    """Observations of what is no tensor (None, a number): msProbe writes them as NaN."""
    num_communication: int = 0
    """Lines of collectives: they have another number of columns than their header."""
    first_communication: str = ""
    num_before_first: int = 0
    """Lines of the optimizer's state before step 0, which belongs to no step."""
    files: list[str] = []
    """Names of files that hold no tensors."""

    def add(self, other: Unread) -> None:
        """Add what another folder contains."""
        self.num_no_tensor += other.num_no_tensor
        self.num_communication += other.num_communication
        self.first_communication = self.first_communication or other.first_communication
        self.num_before_first += other.num_before_first
        self.files += other.files


class RankFolder(msgspec.Struct, frozen=True):
    """The folder that one process of one rank wrote."""

    path: str
    rank: int
    time: str
    """The time in its name, `Nov21_13-56-02`; empty: the name has none."""


def rank_folders(directory: Path) -> list[list[RankFolder]]:
    """Return the folders of ranks in `directory`, a list for each attempt: a second folder of a rank is the next attempt.

    The directory may be msProbe's output, or the folder of one rank. ConfigError when there is none.
    """
    if not directory.exists():
        raise ConfigError(f"{directory}: expected msProbe's output directory, found nothing there")
    if not directory.is_dir():
        raise ConfigError(f"{directory}: expected msProbe's output directory, got a file; give the directory that holds it")
    own = FOLDER.match(directory.resolve().name)
    if own and csv_files(directory):
        return [[RankFolder(str(directory), int(own[2]), own[1])]]
    found: list[tuple[str, RankFolder]] = []
    for path in sorted(directory.iterdir()):
        match = FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append((_time_key(match[1]), RankFolder(str(path), int(match[2]), match[1])))
    if not found:
        inside = ", ".join(sorted(path.name for path in directory.iterdir())[:6]) or "nothing"
        raise ConfigError(f"{directory}: expected folders like Nov21_13-56-02-rank0-d3a1c196, found {inside}")
    attempts: list[list[RankFolder]] = []
    for _, folder in sorted(found, key=lambda one: (one[0], one[1].rank, one[1].path)):
        # The k-th folder of a rank belongs to the k-th attempt.
        at = sum(folder.rank in {one.rank for one in attempt} for attempt in attempts)
        if at == len(attempts):
            attempts.append([])
        attempts[at].append(folder)
    return [sorted(attempt, key=lambda one: one.rank) for attempt in attempts]


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _time_key(time: str) -> str:
    """Return a text that sorts as time does: `Nov21_13-56-02` -> `11-21_13-56-02`."""
    month = _MONTHS.index(time[:3]) + 1 if time[:3] in _MONTHS else 0
    return f"{month:02}-{time[3:]}"


def csv_files(folder: Path) -> list[tuple[int, int, str, Path]]:
    """Return (first step, last step, file, path) of msProbe's files of tensors in a folder, by steps."""
    found = []
    for path in folder.iterdir():
        match = FILE.fullmatch(path.name)
        if match and match[1] in FILES and path.is_file():
            found.append((int(match[2]), int(match[3]), match[1], path))
    # Files of one step in the order in which msProbe's own step goes through them.
    return sorted(found, key=lambda one: (one[0], one[1], FILES.index(one[2])))


def other_files(folder: Path) -> list[str]:
    """Return the names of a folder's files that hold no tensors. ConfigError for a CSV file that is not msProbe's."""
    known = {path for _, _, _, path in csv_files(folder)}
    left = sorted(path for path in folder.iterdir() if path not in known)
    for path in left:
        match = FILE.fullmatch(path.name)
        if match:
            near = difflib.get_close_matches(match[1], FILES, 1)
            hint = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(FILES)}"
            raise ConfigError(f'{path}: expected one of msProbe\'s files, got "{match[1]}"{hint}')
    return [path.name for path in left]


def read_file(path: Path, file: str, steps: tuple[int, int], unread: Unread) -> Iterator[Observation]:
    """Yield the lines of one of msProbe's files. ConfigError, with FILE:LINE, for one that is torn or makes no sense.

    steps: the first and the last one in the file's name. unread: counts what becomes no row.
    """
    try:
        with path.open("r", encoding="utf-8", newline="") as stream:
            yield from _lines(stream, path, file, steps, unread)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8, {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}") from error


def _lines(stream: object, path: Path, file: str, steps: tuple[int, int], unread: Unread) -> Iterator[Observation]:
    text = _EndedLines(stream, path)
    reader = csv.reader(text, strict=True)
    header = next(reader, None)
    if header is None:
        raise ConfigError(f"{path}:1: expected a header, got an empty file")
    has_micro_steps, ops = _columns(path, file, header)
    lead = len(HEAD) + has_micro_steps
    for fields in reader:
        where = f"{path}:{reader.line_num}"
        if file == OTHER_FILE and fields and not fields[0].strip().isdigit() and re.fullmatch(r"[a-z_0-9.]+", fields[0]):
            unread.num_communication += 1
            unread.first_communication = unread.first_communication or where
            continue
        if len(fields) != len(header):
            raise ConfigError(f"{where}: expected {len(header)} fields as in the header, got {len(fields)}; torn?")
        if not fields[1].isprintable():
            raise ConfigError(f"{where}: name: expected visible characters, got {fields[1][:60]!r}")
        vpp_stage, step = _whole(where, "vpp_stage", fields[0]), _whole(where, "step", fields[2])
        micro_step = _whole(where, MICRO_STEP, fields[3]) if has_micro_steps else -1
        if not steps[0] <= step <= steps[1]:
            raise ConfigError(f"{where}: expected a step in [{steps[0]}, {steps[1]}] as the file's name says, got {step}")
        columns = dict(zip(header[lead:], fields[lead:], strict=True))
        values = tuple(_number(where, op, columns[op]) for op in ops)
        shape, dtype = _shape(where, columns.get("shape", "[]")), columns.get("dtype", "")
        refuse_impossible(where, dict(zip(ops, values, strict=True)), None if file in FEATURE_FILES else shape)
        if shape is None or (not dtype.startswith("torch.") and dtype):
            if shape is None and dtype == _NOT_A_TENSOR and all(math.isnan(value) for value in values):
                unread.num_no_tensor += 1
                continue
            got = f'"{columns.get("shape", "")[:60]}" and "{dtype[:40]}"'
            raise ConfigError(f"{where}: expected a shape and a dtype like [4, 64] and torch.float32, got {got}")
        name, dtype = unguarded(fields[1]), dtype.removeprefix("torch.")
        found = Observation(file, "", name, vpp_stage, step, micro_step, shape, dtype, values, ops, where)
        for one in _placed(found):
            if one.step >= 0:
                yield one
            else:
                unread.num_before_first += 1


class _EndedLines:
    """Lines of a file, of which the last must end as the others do: msProbe ends every line."""

    def __init__(self, stream: object, path: Path) -> None:
        self._lines = iter(stream)  # type: ignore[call-overload]
        self._path = path
        self._num = 0

    def __iter__(self) -> _EndedLines:
        return self

    def __next__(self) -> str:
        line: str = next(self._lines)
        self._num += 1
        if not line.endswith(("\n", "\r")):
            raise ConfigError(f"{self._path}:{self._num}: expected a whole line, the file ends in the middle of one; torn?")
        return line


def _columns(path: Path, file: str, header: list[str]) -> tuple[bool, tuple[str, ...]]:
    """Return (whether there are micro-steps, the statistics) of a header."""
    has_micro_steps = header[3:4] == [MICRO_STEP]
    lead = [*HEAD, MICRO_STEP] if has_micro_steps else list(HEAD)
    if header[: len(lead)] != lead:
        raise ConfigError(f"{path}:1: expected a header that begins {','.join(HEAD)}, got {','.join(header)[:120]}")
    known = tuple(FEATURE_FILES[file].columns) if file in FEATURE_FILES else OPS
    rest = header[len(lead) :]
    if len(set(rest)) != len(rest):
        raise ConfigError(f"{path}:1: a column is there twice: {','.join(rest)}")
    ops = tuple(word for word in rest if word not in (*TAIL, "id"))
    for word in ops:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ConfigError(f'{path}:1: unknown column "{word}"{hint}; known: {", ".join((*known, *TAIL))}')
    if file not in FEATURE_FILES and "shape" not in rest:
        raise ConfigError(f"{path}:1: expected a column shape: without it nobody knows how many elements there are")
    return has_micro_steps, ops


def _placed(line: Observation) -> Iterator[Observation]:
    """Yield what a line is about, in our words."""
    replace = msgspec.structs.replace
    if line.file in FEATURE_FILES:
        features = FEATURE_FILES[line.file]
        name = line.name.removesuffix(features.suffix) + features.ending
        for op, value in zip(line.ops, line.values, strict=True):
            feature = features.columns[op]
            yield replace(
                line, kind=features.kind, name=f"{name}:{feature.quantity}", shape=(), dtype="float64",
                values=(value**feature.power,), ops=("value",),
            )  # fmt: skip
        return
    if line.file == OTHER_FILE:
        yield replace(line, kind="grad_momentum_alignment")
        return
    kind, shift = TENSOR_FILES[line.file]
    if kind in ("activation", "dgrad"):
        slot = slot_of(kind, line.name)
        if slot is None:
            raise ConfigError(f'{line.where}: expected a name that ends in .input or .output, got "{line.name[:120]}"')
        yield replace(line, kind=slot.kind, name=slot.name)
        return
    if not line.name:
        raise ConfigError(f"{line.where}: expected the name of a parameter, got none")
    yield replace(line, kind=kind, step=line.step + shift)


def _whole(where: str, column: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 13 and int(text) < MAX_NUMBER):
        raise ConfigError(f'{where}: {column}: expected a number from 0 on, got "{text[:40]}"')
    return int(text)


def _number(where: str, column: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f'{where}: {column}: expected a number, nan or inf, got "{text[:40]}"')
    return float(text)


def _shape(where: str, text: str) -> tuple[int, ...] | None:
    if text == _NOT_A_TENSOR:
        return None
    if not _SHAPE.fullmatch(text):
        raise ConfigError(f'{where}: shape: expected a list of sizes like [4, 64], got "{text[:40]}"')
    shape = tuple(int(size) for size in re.findall(r"\d+", text))
    if math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(f"{where}: shape: expected at most 2**62 elements, got {text[:60]}")
    return shape


def stats_of(lines: list[Observation]) -> npt.NDArray[np.void]:
    """Return the statistics of lines that have the same columns: [lines] STATS_DTYPE.

    Unknown statistics are NaN, an unknown min or max is that of no elements, an unknown count of zeros UNKNOWN_COUNT.
    Non-finite elements are counted as far as they are known: at least one where a statistic shows one.
    """
    ops = lines[0].ops
    if ops == ("value",):
        # One number, and it is all there is.
        return np.concatenate([Moments.of([line.values[0]]).stats for line in lines])
    table = np.array([line.values for line in lines], np.float64).reshape(len(lines), len(ops))
    column = dict(zip(ops, table.T, strict=True))
    unknown = np.full(len(lines), np.nan)
    low, high, mean, norm = (column.get(op, unknown) for op in ("min", "max", "mean", "norm"))
    size = np.array([math.prod(line.shape) for line in lines], np.int64)
    reported = np.array([column[op] for op in ("min", "max", "mean", "norm") if op in column]).reshape(-1, len(lines))
    stats = np.zeros(len(lines), STATS_DTYPE)

    has_nan = np.isnan(reported).any(axis=0) & (size > 0)
    num_nan = np.where(np.isfinite(column["nans"]), column["nans"], 0) if "nans" in column else has_nan.astype(np.float64)
    stats["num_nan"] = np.minimum(num_nan, size)
    # A mean of NaN without a NaN among the elements is that of two infinities.
    both = has_nan & (stats["num_nan"] == 0)
    stats["num_pos_inf"] = (high == np.inf) | (mean == np.inf) | both
    stats["num_neg_inf"] = (low == -np.inf) | (mean == -np.inf) | both
    lone = (norm == np.inf) & (stats["num_pos_inf"] + stats["num_neg_inf"] == 0)
    stats["num_pos_inf"] += lone
    bad = stats["num_nan"] + stats["num_pos_inf"] + stats["num_neg_inf"]
    stats["count"] = np.maximum(size - bad, 0)

    n = np.maximum(stats["count"], 1).astype(np.float64)
    is_clean = bad == 0
    stats["min"] = np.where(np.isfinite(low), low, np.inf)
    stats["max"] = np.where(np.isfinite(high), high, -np.inf)
    stats["mean"] = np.where(is_clean & np.isfinite(mean), mean, np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        m2 = np.maximum(norm * norm - n * mean * mean, 0.0)
        # No elements between min and max vary more (Bhatia and Davis 2000). What rounded digits leave of equal ones goes,
        # as long as that costs no more of the norm than rounding does: of tiny elements the norm alone still has digits.
        least = np.minimum(m2, n * np.maximum(high - mean, 0.0) * np.maximum(mean - low, 0.0))
        is_close = np.abs(np.sqrt(least + n * mean * mean) - norm) <= ROUNDING * norm
        m2 = np.where(is_close, least, m2) + 0.0
    stats["m2"] = np.where(is_clean, m2, np.nan)
    stats["m3"] = stats["m4"] = np.nan
    single = (stats["count"] == 1) & is_clean
    if single.any():
        value = np.where(np.isfinite(mean), mean, np.where(np.isfinite(low), low, high))
        for name in ("mean", "min", "max"):
            stats[name][single] = np.where(np.isfinite(value), value, stats[name])[single]
        known = single & np.isfinite(value)
        for name in ("m2", "m3", "m4"):
            stats[name][known] = 0.0
    empty = stats["count"] == 0
    for name, value_ in (("mean", 0.0), ("m2", 0.0), ("m3", 0.0), ("m4", 0.0), ("min", np.inf), ("max", -np.inf)):
        stats[name][empty] = value_
    stats["num_zero"] = UNKNOWN_COUNT
    if "zeros" in column:
        share = column["zeros"]
        with np.errstate(invalid="ignore"):
            stats["num_zero"] = np.where(np.isfinite(share), np.rint(np.nan_to_num(share) * size), UNKNOWN_COUNT)
    stats["num_zero"] = np.where(size == 0, 0, np.minimum(stats["num_zero"], size))
    found = Moments(stats)
    found.set_norm_only(is_clean & ~empty & np.isnan(stats["mean"]) & np.isfinite(norm), norm)
    return found.stats
