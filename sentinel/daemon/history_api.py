"""`/api/v1/history`: what the Parquet history of a run shows, bounded in rows, columns and time."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sentinel.daemon.series_api import Busy, whole_number
from sentinel.errors import ConfigError
from sentinel.exports.series import SCALAR, VALUE
from sentinel.history.wanted import SECONDS, STEPS, Wanted
from sentinel.known_words import nearest

if TYPE_CHECKING:
    from sentinel.history.pictures import Picture
    from sentinel.history.question_cache import QuestionCache
    from sentinel.history.vector_pictures import VectorPicture

MOST_CELLS = 400_000
"""Cells of a heat map: an answer of 2.7 MB."""
MOST_POINTS = 60_000
"""Columns of all series of one answer: about 5 MB of JSON."""
MOST_ROWS = 1000
MOST_COLUMNS = 4000
MOST_SERIES = 64
WAIT_S = 10.0
"""One question is answered at a time; the next waits so long."""
PARAMETERS = ("run", "kind", "statistic", "name", "series", "from", "to", "columns", "of", "find", "rank")
TENSOR_STATISTIC = "std"
"""What is shown of tensors where nobody says."""
SHOWS = ("extreme", "min", "max", "avg", "last")
"""What of a bucket a cell of a heat map shows; `extreme`: the value that is farthest from zero."""

NOTHING, VALUE_THERE, UNDEFINED, HAS_INF, HAS_NAN = range(5)
"""State of a cell: nothing was measured; it has a value; measured, and none is defined; an infinity, or a NaN, was in it."""


class HistoryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for."""

    run: str
    wanted: Wanted
    of: str = "extreme"
    find: str = ""
    """Part of the names of tensors that are listed."""
    rank: int | None = None
    """Whose vectors are shown; None: of the load of experts those of all ranks, of anything else the lowest's."""

    @classmethod
    def parse(cls, parameters: Sequence[tuple[str, str]], otherwise: str = SCALAR) -> HistoryRequest:
        """Return the request that the parameters of a URL are. ConfigError says what was expected.

        otherwise: the kind where they name none.
        """
        given: dict[str, list[str]] = {}
        for name, text in parameters:
            if name not in PARAMETERS:
                raise ConfigError(f'unknown parameter "{name[:80]}"{nearest(name[:80], PARAMETERS)}')
            given.setdefault(name, []).append(text)
        for name, texts in given.items():
            if name not in ("name", "series") and len(texts) > 1:
                raise ConfigError(f"{name}: expected it once, got it {len(texts)} times")
        if "run" not in given:
            raise ConfigError("run: expected the name of a run, got none")
        of = given.get("of", [SHOWS[0]])[0]
        if of not in SHOWS:
            raise ConfigError(f'of: expected one of {", ".join(SHOWS)}, got "{of[:40]}"')
        kind = given.get("kind", [otherwise])[0]
        wanted = Wanted(
            kind=kind,
            statistic=given.get("statistic", [{SCALAR: VALUE, STEPS: SECONDS}.get(kind, TENSOR_STATISTIC)])[0],
            names=tuple(given.get("name", ["*"]))[:MOST_SERIES],
            series=tuple(whole_number({"series": [one]}, "series", 0) for one in given.get("series", [])[:MOST_SERIES]),
            first_step=whole_number(given, "from", 0),
            last_step=whole_number(given, "to", 2**62),
            columns=min(max(whole_number(given, "columns", 1000), 1), MOST_COLUMNS),
        )
        if wanted.last_step < wanted.first_step:
            raise ConfigError(f"to: expected a step from {wanted.first_step} on, got {wanted.last_step}")
        rank = whole_number(given, "rank", 0) if "rank" in given else None
        return cls(run=given["run"][0], wanted=wanted, of=of, find=given.get("find", [""])[0][:200], rank=rank)


class HistoryQueries:
    """Answers requests, from any thread, one at a time: a picture may cost as much as one core can do in its time."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._cache: QuestionCache | None = None
        """From the first question on: what reads histories is loaded then."""

    def held(self, run_dir: Path, request: HistoryRequest) -> dict[str, Any]:
        """Return what the history of a run holds."""
        from sentinel.history.pictures import held

        with self._turn() as cache:
            return held(request.run, run_dir, request.find, cache=cache)

    def series(self, run_dir: Path, request: HistoryRequest) -> dict[str, Any]:
        """Return columns of single series; what nothing was measured of is left out."""
        picture = self._picture(run_dir, request, MOST_SERIES, MOST_POINTS)
        steps = picture.first_step + picture.width * np.arange(picture.steps.shape[1])
        found = []
        for at, row in enumerate(picture.rows):
            there = np.flatnonzero(picture.steps[at] > 0)
            found.append(
                {
                    **msgspec.to_builtins(row),
                    "steps": steps[there].tolist(),
                    **{name: _listed(getattr(picture, name)[at, there]) for name in ("least", "greatest", "mean", "last")},
                    "nans": picture.nans[at, there].tolist(),
                    "infs": picture.infs[at, there].tolist(),
                }
            )
        return {**_about(request, picture), "series": found}

    def heatmap(self, run_dir: Path, request: HistoryRequest) -> dict[str, Any]:
        """Return a row a series and a column a bucket: `values` (float32) and `states` (uint8), row by row, in base64.

        Of a history without a tensor there are neither rows nor columns where the request leaves the kind to it.
        """
        picture = self._picture(run_dir, request, MOST_ROWS, MOST_CELLS)
        values = _shown(picture, request.of)
        states = np.where(np.isfinite(values), VALUE_THERE, UNDEFINED)
        states = np.where(picture.infs > 0, HAS_INF, states)
        states = np.where(picture.nans > 0, HAS_NAN, states)
        states = np.where(picture.steps > 0, states, NOTHING)
        most = float(np.finfo(np.float32).max)
        return {
            **_about(request, picture),
            "of": request.of,
            "num_columns": picture.steps.shape[1],
            "rows": msgspec.to_builtins(picture.rows),
            "values": _packed(np.clip(values, -most, most).astype("<f4")),
            "states": _packed(states.astype(np.uint8)),
        }

    def vectors(self, run_dir: Path, request: HistoryRequest) -> dict[str, Any]:
        """Return the value of each expert, or head, over steps: `values`, `states` as of a heat map, and what they come to.

        The kind is `router` or `attention`; where nothing was recorded `choices` is empty.
        """
        from sentinel.history.vector_pictures import LOAD, vector_picture

        # What a statistic of vectors is called, that of tensors is not.
        statistic = "" if request.wanted.statistic == TENSOR_STATISTIC else request.wanted.statistic
        wanted = msgspec.structs.replace(request.wanted, statistic=statistic, rows=MOST_ROWS, cells=MOST_CELLS)
        with self._turn():
            choices, picture = vector_picture(request.run, run_dir, wanted, request.rank)
        told = {"run": request.run, "kind": wanted.kind, "choices": [msgspec.to_builtins(one) for one in choices]}
        if picture is None:
            return told
        is_there = np.isfinite(picture.mean)
        states = np.where(picture.bad > 0, HAS_NAN, np.where(is_there, VALUE_THERE, NOTHING))
        most = float(np.finfo(np.float32).max)
        return told | {
            "series": picture.choice.series,
            "name": picture.choice.name,
            "statistic": picture.choice.statistic,
            "axis": picture.choice.axis,
            "rank": picture.rank,
            "first_step": picture.first_step,
            "last_step": picture.last_step,
            "width": picture.width,
            "num_values": len(picture.mean),
            "num_columns": picture.mean.shape[1],
            "values": _packed(np.clip(picture.mean, -most, most).astype("<f4")),
            "states": _packed(states.astype(np.uint8)),
            "of_values": _of_values(picture),
            "balance": _balance(picture.mean) if picture.choice.statistic == LOAD else None,
        }

    def divergence(self, runs: Mapping[str, Path], statistic: str) -> dict[str, Any]:
        """Return where two runs diverge; see `sentinel.history.divergence` for how that is told."""
        from sentinel.history.divergence import divergence_of

        with self._turn():
            told: dict[str, Any] = msgspec.to_builtins(divergence_of(runs, statistic))
            return told

    def _picture(self, run_dir: Path, request: HistoryRequest, most_rows: int, most_cells: int) -> Picture:
        from sentinel.history.pictures import picture_of

        wanted = msgspec.structs.replace(request.wanted, rows=most_rows, cells=most_cells)
        with self._turn() as cache:
            return picture_of(request.run, run_dir, wanted, cache)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[QuestionCache]:
        if not self._asking.acquire(timeout=WAIT_S):
            raise Busy("the history is being asked for another request; try again in a moment")
        try:
            if self._cache is None:
                from sentinel.history.question_cache import QuestionCache

                self._cache = QuestionCache()
            yield self._cache
        finally:
            self._asking.release()


def _about(request: HistoryRequest, picture: Picture) -> dict[str, Any]:
    return {
        "run": request.run,
        "kind": picture.kind,
        "statistic": request.wanted.statistic,
        "first_step": picture.first_step,
        "last_step": picture.last_step,
        "width": picture.width,
    }


def _shown(picture: Picture, of: str) -> npt.NDArray[np.float64]:
    named: Mapping[str, Callable[[], npt.NDArray[np.float64]]] = {
        "min": lambda: picture.least,
        "max": lambda: picture.greatest,
        "avg": lambda: picture.mean,
        "last": lambda: picture.last,
        "extreme": lambda: np.where(-picture.least > picture.greatest, picture.least, picture.greatest),
    }
    return named[of]()


def _of_values(picture: VectorPicture) -> list[dict[str, Any]]:
    """Return what each expert, or head, came to over all columns."""
    found = []
    for at, row in enumerate(picture.mean):
        there = np.flatnonzero(np.isfinite(row))
        of_row = row[there]
        found.append(
            {
                "mean": float(of_row.mean()) if len(there) else None,
                "least": float(np.nanmin(picture.least[at])) if len(there) else None,
                "greatest": float(np.nanmax(picture.greatest[at])) if len(there) else None,
                "last": float(of_row[-1]) if len(there) else None,
                "last_step_above_0": int(picture.last_above[at]),
                "num_bad": int(picture.bad[at].sum()),
            }
        )
    return found


def _balance(shares: npt.NDArray[np.float64]) -> dict[str, list[Any]]:
    """Return of each column of shares [experts, columns] the entropy over that of equal shares, the largest share over the
    mean one, and how many experts got no token; null where nothing was measured."""
    is_there: npt.NDArray[np.bool_] = np.asarray(np.isfinite(shares).any(axis=0))
    known = np.where(np.isfinite(shares), shares, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(known > 0, known * np.log(known), 0.0).sum(axis=0) / np.log(max(2, len(shares)))
    absent = np.full(len(is_there), np.nan)
    return {
        "entropy": _listed(np.where(is_there, entropy, absent)),
        "max_over_mean": _listed(np.where(is_there, known.max(axis=0) * len(shares), absent)),
        "idle": [int(num) if there else None for num, there in zip((known == 0).sum(axis=0), is_there, strict=True)],
    }


def _listed(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [value if value == value else None for value in values.tolist()]


def _packed(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
