"""Times of days of the week."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from sentinel.errors import ConfigError
from sentinel.report.calendar_hours import Hours


def at(text, zone="Europe/Berlin"):
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


OFFICE = Hours("Mon-Fri 09:00-18:00 Europe/Berlin", "hours")


def test_hours_hold_on_their_days_in_their_zone():
    assert OFFICE.until(at("2026-11-23T09:00")) == at("2026-11-23T18:00")
    assert OFFICE.until(at("2026-11-23T08:59")) is None
    assert OFFICE.until(at("2026-11-23T18:00")) is None
    assert OFFICE.until(at("2026-11-28T12:00")) is None
    assert OFFICE.next(at("2026-11-27T18:00")) == at("2026-11-30T09:00")


def test_hours_past_midnight_belong_to_the_day_on_which_they_begin():
    night = Hours("Fri 22:00-06:00", "hours")

    assert night.until(at("2026-11-28T03:00", "UTC")) == at("2026-11-28T06:00", "UTC")
    assert night.until(at("2026-11-27T03:00", "UTC")) is None


def test_hours_follow_the_clocks_of_their_zone():
    assert OFFICE.next(at("2026-10-24T12:00")) - at("2026-10-23T09:00") == 3 * 86400.0 + 3600.0


@pytest.mark.parametrize(
    "text", ["09:00-10:00", "Sat,Sun 09:00-10:00", "Fri-Mon 09:00-10:00", "sunday 00:00-24:00", "sat - mon 9:00-10:00"]
)
def test_days_are_read_as_people_write_them(text):
    assert Hours(text, "hours").until(at("2026-11-29T09:30", "UTC")) is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Mon-Fri", 'hours must be like "Mon-Fri 09:00-18:00 Europe/Berlin", got "Mon-Fri"'),
        ("Mom-Fri 09:00-18:00", 'unknown day "Mom-Fri"'),
        ("09:00-18:00 Europe/Berln", 'unknown time zone "Europe/Berln"; did you mean "Europe/Berlin"?'),
        ("09:00-09:00", "an end other than its beginning"),
        ("09:00-25:00", "from 00:00 to 24:00"),
        ("09:60-10:00", "from 00:00 to 24:00"),
    ],
)
def test_what_is_no_time_is_said(text, words):
    with pytest.raises(ConfigError) as caught:
        Hours(text, "hours")

    assert words in str(caught.value)
