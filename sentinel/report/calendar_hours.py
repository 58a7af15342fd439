"""Hours: when a route or a maintenance holds, as people write it: `Mon-Fri 09:00-18:00 Europe/Berlin`."""

from __future__ import annotations

import datetime
import re
import zoneinfo

from sentinel.errors import ConfigError
from sentinel.known_words import near, nearest

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HOURS = re.compile(r"(?:([A-Za-z][A-Za-z,\- ]*?)\s+)?(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)(?:\s+(\S+))?")


class Hours:
    """Times of days of the week: without days of every day, without a zone in UTC; over midnight where they end first."""

    def __init__(self, text: str, path: str) -> None:
        """path: for errors."""
        found = _HOURS.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f'{path} must be like "Mon-Fri 09:00-18:00 Europe/Berlin", got "{text[:80]}"')
        days, from_hour, from_minute, to_hour, to_minute, zone = found.groups()
        self._days = _days(days, path) if days else frozenset(range(7))
        self._begin, self._end = _time(from_hour, from_minute, path), _time(to_hour, to_minute, path)
        if self._begin == self._end:
            raise ConfigError(f'{path} must have an end other than its beginning, got "{text[:80]}"')
        try:
            self._zone = zoneinfo.ZoneInfo(zone or "UTC")
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            hint = near(zone, sorted(zoneinfo.available_timezones())) or "; an example: Europe/Berlin"
            raise ConfigError(f'{path}: unknown time zone "{zone}"{hint}') from error

    def until(self, now: float) -> float | None:
        """Return when the hours end that `now` is in, seconds since the epoch; None: it is in none."""
        return max((end for begin, end in self._around(now) if begin <= now < end), default=None)

    def next(self, now: float) -> float:
        """Return when the next hours begin, seconds since the epoch."""
        return min(begin for begin, _ in self._around(now) if begin > now)

    def _around(self, now: float) -> list[tuple[float, float]]:
        today = datetime.datetime.fromtimestamp(now, self._zone).date()
        found = []
        for offset in range(-1, 9):
            day = today + datetime.timedelta(days=offset)
            if day.weekday() in self._days:
                last = day + datetime.timedelta(days=int(self._end <= self._begin))
                found.append((self._at(day, self._begin), self._at(last, self._end)))
        return found

    def _at(self, day: datetime.date, minutes: int) -> float:
        midnight = datetime.datetime.combine(day, datetime.time(), self._zone)
        return (midnight + datetime.timedelta(minutes=minutes)).timestamp()


def _time(hour: str, minute: str, path: str) -> int:
    minutes = int(hour) * 60 + int(minute)
    if int(minute) > 59 or minutes > 24 * 60:
        raise ConfigError(f"{path} must have times from 00:00 to 24:00, got {hour}:{minute}")
    return minutes


def _days(text: str, path: str) -> frozenset[int]:
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in re.split(r"[,\s]+", re.sub(r"\s*-\s*", "-", text)))):
        first, dash, last = (one.strip().title()[:3] for one in part.partition("-"))
        for day in (first, last) if dash else (first,):
            if day not in DAYS:
                raise ConfigError(f'{path}: unknown day "{part}"{nearest(part, DAYS)}')
        begin, end = DAYS.index(first), DAYS.index(last if dash else first)
        found.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(found)
