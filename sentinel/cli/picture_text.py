"""A RunPicture as lines for a terminal or a pipe: what is asked first stands first, and nothing is wider than the page."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from sentinel.anomaly import Anomaly
from sentinel.anomaly_words import place_words, short_number
from sentinel.cli.recent_findings import LATELY_STEPS, HotLayer
from sentinel.cli.recent_scalars import RecentScalar
from sentinel.cli.run_picture import ALIVE, ENDED, GONE, LATE, SILENT, WAITING, RankPicture, RunPicture
from sentinel.cli.sparkline import sparkline
from sentinel.cli.time_lengths import duration_words
from sentinel.incident import Incident
from sentinel.ingest.closing import LATE_AFTER_S
from sentinel.printable import printable
from sentinel.report.message import end_cut, middle_cut

MAX_CHARACTERS = 2000
"""Of one text out of a run; the page is narrower."""
MOST_ROWS = (8, 5, 3, 2, 1)
"""Rows of each list, from a tall page to one of a few lines."""
SLOW_ROWS = 3
PROBLEM_ROWS = 2
"""Lines of one problem."""
STYLES = {
    "critical": "bold red", "warning": "yellow", "info": "dim",
    ALIVE: "green", LATE: "yellow", SILENT: "bold red", GONE: "dim",
}  # fmt: skip
INDENT = "  "


class Page:
    """The measures of what is written to, and lines of it."""

    def __init__(self, width: int, encoding: str = "utf-8") -> None:
        """width: in columns. encoding: of the stream; what it cannot say is written as an escape."""
        self.width = width
        self._encoding = encoding
        self.is_ascii = _cannot_say("\u2581\u2588", encoding)

    def seen(self, text: str) -> str:
        """Return text of a run as it may be shown: nothing in it moves a cursor, ends a line or cannot be written."""
        return printable(end_cut(text, MAX_CHARACTERS)).encode(self._encoding, "backslashreplace").decode(self._encoding)

    def line(self, *parts: str | tuple[str, str]) -> Text:
        """Return one line of texts, each with a style or none, cut where the page ends."""
        line, left = Text(), self.width
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            text = self.seen(text)
            size = cell_len(text)
            if size > left:
                text = set_cell_size(text, max(left - 3, 0)) + "..."[: min(left, 3)]
            line.append(text, style)
            left -= min(size, left)
        return line

    def folded(self, text: str, most: int, style: str = "", indent: str = INDENT) -> list[Text]:
        """Return a text in at most so many lines; where more would be needed the last one ends with dots."""
        wide = max(self.width - len(indent), 8)
        lines = textwrap.wrap(self.seen(text), wide) or [""]
        if len(lines) > most:
            lines = [*lines[: most - 1], f"{lines[most - 1][: wide - 3]}..."]
        return [self.line((indent + one, style)) for one in lines]


def picture_lines(picture: RunPicture, page: Page, height: int | None = None) -> list[Text]:
    """Return the picture, at most `height` lines; None: however many there are."""
    for most in MOST_ROWS:
        lines = _lines(picture, page, most)
        if height is None or len(lines) <= height:
            return lines
    return lines[:height]


def _lines(picture: RunPicture, page: Page, most: int) -> list[Text]:
    if picture.state == WAITING:
        return [_head(picture, page), *page.folded(f"{picture.note}; waiting", 6, indent="")]
    slow = picture.slowest if picture.state != ENDED else ()
    parts: list[list[Text]] = [
        [_head(picture, page), *_progress(picture, page), *_scalars(picture, page)],
        _ranks(picture, page, most),
        _section(
            page, f"OPEN INCIDENTS ({len(picture.incidents)})", picture.incidents, most,
            lambda one: _incident(one, picture, page),
        ),
        _section(page, "SLOWEST RANKS", slow[:SLOW_ROWS], most, lambda one: _slow(one, picture, page)),
        _section(
            page, f"HOTTEST LAYERS of the last {LATELY_STEPS} steps", picture.hottest, most, lambda one: [_hot(one, page)]
        ),
        _section(
            page, "NEWEST ANOMALIES", picture.anomalies, most,
            lambda one: [_anomaly(one, page)],
        ),
        _section(page, "PROBLEMS", picture.problems, most, lambda one: page.folded(one, PROBLEM_ROWS, indent="")),
    ]  # fmt: skip
    return [line for part in parts for line in part]


def _head(picture: RunPicture, page: Page) -> Text:
    where = [f"attempt {picture.attempt}"] if picture.attempt else []
    if picture.step is not None:
        where.append(f"step {picture.step:,}")
    if picture.steps_per_s is not None and picture.state != ENDED:
        where.append(f"{short_number(picture.steps_per_s)} steps/s")
    where.append(picture.state)
    clock = f"  {datetime.fromtimestamp(picture.time, UTC):%H:%M:%S} UTC" if picture.time else ""
    said = f"  {', '.join(where)}{clock}"
    room = max(page.width - cell_len(said), 8)
    name = page.seen(picture.run)
    return page.line((name if cell_len(name) <= room else set_cell_size(name, room - 3) + "...", "bold"), said)


def _progress(picture: RunPicture, page: Page) -> list[Text]:
    lines = []
    for words in picture.course.lines if picture.state == ENDED else ():
        lines += page.folded(words, 3, "bold red" if picture.course.is_bad else "", indent="")
    if picture.state != ENDED and picture.quiet_s > LATE_AFTER_S:
        lines.append(page.line((f"no step was ended for {duration_words(picture.quiet_s)}", "yellow")))
    judged = "nothing judged" if picture.judged_step is None else f"step {picture.judged_step:,} judged"
    if picture.daemon is not None:
        lines.append(page.line((f"{judged}, by process {picture.daemon}", "dim")))
    elif picture.state != ENDED:
        lines.append(page.line((f"{judged}; no daemon: sentinel serve {picture.directory}", "yellow")))
    else:
        lines.append(page.line((judged, "dim")))
    return lines


def _scalars(picture: RunPicture, page: Page) -> list[Text]:
    found = [
        (name, one) for name, one in (("loss", picture.loss), ("grad norm", picture.grad_norm), ("lr", picture.lr)) if one
    ]
    if not found:
        return [page.line(("no loss, gradient norm or learning rate was logged so far", "dim"))]
    wide = max(len(name) for name, _ in found)
    return [_scalar(name.ljust(wide), one, page) for name, one in found]


def _scalar(name: str, one: RecentScalar, page: Page) -> Text:
    value = _number(one.value)
    drawn = sparkline([value for _, value in one.points], page.width - len(name) - 14, is_ascii=page.is_ascii)
    return page.line(f"{name}  ", (f"{value:<10}  ", "" if math.isfinite(one.value) else "bold red"), (drawn, "cyan"))


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else short_number(value)


def _ranks(picture: RunPicture, page: Page, most: int) -> list[Text]:
    health = picture.health
    counts = [(f"{health[one]} {one}", STYLES[one]) for one in (ALIVE, LATE, SILENT, GONE) if one in health]
    if picture.num_ranks_missing:
        counts.append((f"{picture.num_ranks_missing} not begun", "yellow"))
    if picture.num_ranks_unread:
        counts.append((f"{picture.num_ranks_unread} more not read", "dim"))
    parts: list[str | tuple[str, str]] = ["ranks: "]
    for at, one in enumerate(counts):
        parts += [", ", one] if at else [one]
    ill = [one for one in picture.ranks if one.health in (SILENT, LATE)]
    if picture.state != ENDED:
        ill += [one for one in picture.ranks if one.health == GONE]
    lines = [page.line(*parts)] if counts else []
    lines += [_rank(one, page) for one in ill[:most]]
    return [*lines, *_further(page, len(ill) - most)]


def _rank(one: RankPicture, page: Page) -> Text:
    step = "" if one.step is None else f", step {one.step:,}"
    return page.line(f"{INDENT}rank {one.rank}  ", (one.health, STYLES[one.health]), f"{step}: {one.words}")


def _section(page: Page, title: str, items: Sequence[Any], most: int, lines_of: Callable[..., Iterable[Text]]) -> list[Text]:
    if not items:
        return []
    lines = [page.line((title, "bold"))]
    for one in items[:most]:
        lines += lines_of(one)
    return [*lines, *_further(page, len(items) - most)]


def _further(page: Page, number: int) -> list[Text]:
    return [page.line((f"{INDENT}and {number} more", "dim"))] if number > 0 else []


def _incident(one: Incident, picture: RunPicture, page: Page) -> list[Text]:
    style = STYLES[one.severity.value]
    first, *more = page.folded(f"{one.severity.value:8} {one.title} ({one.id})", 3, style, indent="")
    known = [f"began with {one.root_name}"] if one.root_name else []
    known.append(f"steps {one.steps}")
    if one.suspected != "unknown":
        known.append(f"suspected: {one.suspected}")
    if (act := one.acknowledged(picture.time)) is not None:
        known.append(act.in_words)
    return [first, *more, page.line((INDENT + "; ".join(known), "dim"))]


def _slow(one: RankPicture, picture: RunPicture, page: Page) -> list[Text]:
    is_busy = one.busy_s is not None
    times = [other.busy_s if is_busy else other.step_time_s for other in picture.ranks]
    middle = statistics.median_low(time for time in times if time is not None)
    own = (one.busy_s if is_busy else one.step_time_s) or 0.0
    what = "s of its own work a step" if is_busy else "s a step, waits not known"
    more = f", {own / middle:.3g} times the median" if middle > 0 else ""
    return [page.line(f"rank {one.rank:<5} {own:.3g} {what}{more}")]


def _hot(one: HotLayer, page: Page) -> Text:
    much = "" if one.score is None else f", {one.score:.3g} times its bound"
    num = f"{one.num_anomalies} anomal{'y' if one.num_anomalies == 1 else 'ies'}"
    # Names differ in their ends, and those of a model may be long.
    return page.line(f"{middle_cut(page.seen(one.name), page.width // 3)}  {num}{much}: {one.worst}")


def _anomaly(one: Anomaly, page: Page) -> Text:
    where = middle_cut(page.seen(place_words(one)), page.width - 9)
    return page.line((f"{one.severity.value:8} ", STYLES[one.severity.value]), where)


def _cannot_say(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False
