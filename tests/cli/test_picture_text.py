"""A picture as lines: what is ill is in it, nothing is wider or longer than the page, and no name moves a cursor."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.cells import cell_len

from sentinel.anomaly import Severity
from sentinel.cli.course import Course
from sentinel.cli.picture_text import Page, picture_lines
from sentinel.cli.recent_findings import HotLayer
from sentinel.cli.recent_scalars import RecentScalar
from sentinel.cli.run_picture import RankPicture, RunPicture
from sentinel.cli.sparkline import sparkline
from sentinel.run_end import EXCEPTION, RunEnd

from ..support.anomalies import a_nan, an_incident
from ..support.hostile_run import EVIL


def a_picture(name: str = "gpt", **differing: Any) -> RunPicture:
    """A run that is ill in every way at once; `name` is in every text that a run may choose."""
    incidents = [
        an_incident(title=f"NaN born in {name}", severity=severity, root_name=name, id=f"i{at}")
        for at, severity in enumerate((Severity.CRITICAL, Severity.WARNING, Severity.INFO))
    ]
    ranks = [
        RankPicture(rank=rank, health=health, words=name, step=rank, busy_s=0.1 * (rank + 1), step_time_s=1.0)
        for rank, health in enumerate(("alive", "late", "silent", "ended") * 4)
    ]
    layers = [HotLayer(name=name, num_anomalies=2, score=3.5, worst=f"wgrad of {name}: norm 12", last_step=4)] * 12
    fields: dict[str, Any] = {
        "run": name, "directory": f"/runs/{name}", "time": 1.0, "state": "running", "attempt": 1, "step": 1204,
        "steps_per_s": 2.125, "judged_step": 1203, "daemon": name,
        "loss": RecentScalar(name="loss", points=tuple((step, 2.0 + math.sin(step)) for step in range(200))),
        "grad_norm": RecentScalar(name=name, points=((1, 1.0), (2, math.nan))),
        "incidents": tuple(incidents), "ranks": tuple(ranks), "slowest": tuple(reversed(ranks)), "hottest": tuple(layers),
        "anomalies": tuple(a_nan(f"a{at}", tag_name=name) for at in range(12)), "problems": (name * 3,) * 3,
        "num_ranks_missing": 2, "num_ranks_unread": 7, "quiet_s": 70.0,
    }  # fmt: skip
    return RunPicture(**fields | differing)


def text_of(picture: RunPicture, width: int = 100, height: int | None = None, encoding: str = "utf-8") -> str:
    return "\n".join(line.plain for line in picture_lines(picture, Page(width, encoding), height))


def test_what_is_asked_first_stands_first() -> None:
    lines = text_of(a_picture()).splitlines()

    assert lines[0] == "gpt  attempt 1, step 1,204, 2.125 steps/s, running  00:00:01 UTC"
    assert lines[1] == "no step was ended for 70 s"
    assert lines[2] == "step 1,203 judged, by process gpt"
    assert lines[3].startswith("loss       1.118")
    assert lines[4].startswith("grad norm  NaN") and lines[4].endswith("\u2581!")
    assert lines[5] == "ranks: 4 alive, 4 late, 4 silent, 4 ended, 2 not begun, 7 more not read"
    titles = [line for line in lines if line.isupper() or line[:6].isupper()]
    assert [one.split(" ")[0] for one in titles] == ["OPEN", "SLOWEST", "HOTTEST", "NEWEST", "PROBLEMS"]
    incidents = lines[lines.index("OPEN INCIDENTS (3)") + 1 :]
    assert incidents[0].startswith("critical NaN born in gpt (i0)") and incidents[2].startswith("warning  NaN")
    assert "rank 15    1.6 s of its own work a step, 2 times the median" in lines
    assert "gpt  2 anomalies, 3.5 times its bound: wgrad of gpt: norm 12" in lines


def test_a_run_that_is_well_has_no_word_of_anything_ill() -> None:
    well = a_picture(
        incidents=(), hottest=(), anomalies=(), problems=(), slowest=(), quiet_s=1.0, num_ranks_missing=0,
        num_ranks_unread=0, ranks=(RankPicture(rank=0, health="alive", step=4),), grad_norm=None,
    )  # fmt: skip

    assert len(text_of(well).splitlines()) == 4
    assert text_of(well).endswith("ranks: 1 alive")


def test_how_a_run_ended_stands_above_its_values() -> None:
    ended = RunEnd(how=EXCEPTION, rank=3, step=7, detail="ValueError: no")
    picture = a_picture(state="ended", course=Course(num_steps=7, num_ranks=4, num_tensors=9, ended=ended))

    lines = text_of(picture).splitlines()

    assert lines[1] == "ended: rank 3, in step 7, raised ValueError: no; it was the first to go"
    assert "SLOWEST RANKS" not in lines and "steps/s" not in lines[0]


@pytest.mark.parametrize("width", [40, 60, 80, 132])
@pytest.mark.parametrize("name", ["gpt", EVIL * 20, "\u5b57\u6bb5" * 200, "[red]markup[/red] :smile: \u0301" * 30])
def test_nothing_is_wider_than_the_page_and_no_name_is_more_than_a_name(width: int, name: str) -> None:
    lines = picture_lines(a_picture(name), Page(width))

    assert max(cell_len(line.plain) for line in lines) <= width
    assert all(line.plain.isprintable() for line in lines)
    assert "step 1,204" in lines[0].plain or width < 60


@pytest.mark.parametrize("height", [1, 4, 12, 24, 40])
def test_nothing_is_longer_than_the_page_and_each_list_keeps_its_first(height: int) -> None:
    text = text_of(a_picture(), 80, height)

    assert len(text.splitlines()) <= height
    if height >= 40:
        assert all(title in text for title in ("OPEN INCIDENTS", "SLOWEST", "HOTTEST", "NEWEST", "PROBLEMS"))
        assert "and 9 more" in text, "what is left out is counted"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_blocks_gets_letters_that_it_has(encoding: str) -> None:
    text = text_of(a_picture("caf\u00e9 \u5b57"), encoding=encoding)

    text.encode(encoding)
    assert "\\u5b57" in text and "=" in text


def test_a_sparkline_shows_the_spike_of_one_step_and_what_is_not_finite() -> None:
    values = [1.0] * 1000
    values[500], values[900] = 9.0, math.inf

    line = sparkline(values, 20)

    assert line == "\u2581" * 10 + "\u2588" + "\u2581" * 7 + "!" + "\u2581"
    assert sparkline([], 20) == "" and sparkline([3.0], 20) == "\u2581"
    assert sparkline([math.nan], 20) == "!"
    assert sparkline([-1e308, 1e308], 20, is_ascii=True) == "_#"
    assert sparkline([1.0, 2.0], 0) == ""
