"""AlertMessage: what people are told of an incident, in the order in which they ask; every text bounded, without controls.

The order: which run and what happened, where, since when, how bad it is, what was done, what to do next, and links.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Callable, Sequence

import msgspec

from sentinel.anomaly import Severity
from sentinel.incident import CLOSED_STATES, Incident
from sentinel.printable import printable
from sentinel.report.alert import Alert, AlikeRuns
from sentinel.report.alert_context import AlertContext

MAX_RUN = 300
"""Most characters of a run's name; a bound on the length of a message, above that of any folder."""
MAX_FIELD = 600
"""Most characters of any other text; a bound as above."""
PHONE = 80
"""Characters that a phone shows of a message: severity, run and the beginning of what happened stand within."""
LEAST_WHAT = 24
"""Characters of what happened that a long name of a run leaves room for. Too small: nobody knows what it is about; too
large: names that begin alike look alike."""
LEAST_RUN = 16
"""Characters of a run's name that are always left, the last of them its end."""

_WORDS = {
    "opened": "{}", "raised": "now {}", "worse": "{}, much worse", "refined": "{}, more is known",
    "acknowledged": "{}, acknowledged", "reopened": "{}, reopened",
}  # fmt: skip
_OVER = {
    "resolved": "resolved: none of it is anomalous any more",
    "settled": "settled: the new level lasted, and is what is normal from now on",
    "ended": "ended: the run, or this attempt of it, is over",
    "closed": "closed by a person",
    "merged": "merged: it is part of another incident",
}


class Link(msgspec.Struct, frozen=True):
    """Where a message leads."""

    name: str
    """`incident`, `runbook` or `dashboard`."""
    url: str


class AlertMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink says of one alert, in its own form."""

    word: str
    """What changed and how bad it is: `CRITICAL`, `now CRITICAL`, `CRITICAL resolved`."""
    run: str
    what: str
    """What happened, with its step."""
    num_more: int = 0
    """Further runs that it is about."""
    is_repeated: bool = False
    fields: tuple[tuple[str, str], ...] = ()
    """(name, text), what is asked first first; nothing that is empty."""
    links: tuple[Link, ...] = ()
    title: str = ""
    """In place of the headline: what the user's template makes of it; empty: the user has none."""
    body: str = ""
    """In place of the fields: the same, escaped for the sink that it is for."""

    def headline(self, limit: int = 10**6) -> str:
        """Return one line within a limit, `CRITICAL: run a: loss 9 against 1, step 12`: the run is not cut."""
        return self._line(limit, limit)

    def summary(self, limit: int) -> str:
        """Return the same line for phones: severity, run and what happened begin within the first PHONE characters."""
        return self._line(limit, min(limit, PHONE))

    @property
    def link(self) -> str:
        """Address of the incident's page; empty: the daemon's address is not known."""
        return next((one.url for one in self.links if one.name == "incident"), "")

    def fields_under(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the fields, and before them whatever a headline had no room for."""
        cut = [("run", self.run), ("what", self.what)]
        return (*(pair for pair in cut if not self.title and pair[1] not in headline), *self.fields)

    def _line(self, limit: int, carried: int) -> str:
        if self.title:
            return end_cut(self.title, limit)
        more = f" and {self.num_more} more" if self.num_more else ""
        head, tail = f"{self.word}: run ", " (repeated)" if self.is_repeated else ""
        name = self.run
        if len(head) + len(name) + len(more) + min(len(self.what), LEAST_WHAT) + 2 > carried:
            name = middle_cut(name, max(carried - len(head) - len(more) - LEAST_WHAT - 2, LEAST_RUN))
        head = f"{head}{name}{more}: "
        return head + end_cut(self.what, max(limit - len(head) - len(tail), 0)) + tail


def message_of(alert: Alert, done: Sequence[str] = (), links: Sequence[Link] = ()) -> AlertMessage:
    """Return what is said of an alert. done: what was ordered because of it, in words."""
    return AlertMessage(
        word=_word(alert),
        run=visible(alert.incident.run, MAX_RUN),
        what=visible(_what(alert.incident), MAX_FIELD),
        num_more=alert.alike.num_runs - 1 if alert.alike is not None else 0,
        is_repeated=alert.repeated,
        fields=tuple(facts(alert, done)),
        links=tuple(links),
    )


def headline(alert: Alert) -> str:
    """Return one line: what changed, how bad, which run, what. `CRITICAL: run a: loss-spike, step 12`."""
    return message_of(alert).headline()


def facts(alert: Alert, done: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return (name, text) of what a person asks behind the headline, the first question first, empty ones left out."""
    incident, context = alert.incident, alert.context
    suspected = incident.suspected if incident.suspected != "unknown" else "not known" if incident.reasons else ""
    pairs = [
        ("runs", _alike(alert.alike)),
        ("now", _OVER.get(incident.state, "")),
        ("merged into", incident.merged_into or ""),
        ("began with", incident.root_name),
        ("module", incident.module),
        ("segment", incident.segment),
        ("ranks", _counted(list(map(str, incident.ranks)), 16)),
        ("machines", _machines(incident, context)),
        ("job", context.job),
        ("labels", ", ".join(f"{name}={value}" for name, value in context.labels.items())),
        ("since", _since(incident, context)),
        ("steps", incident.steps + (f" of attempt {incident.attempt}" if incident.attempt else "")),
        ("how bad", _how_bad(alert)),
        ("cause", suspected),
        ("because", "; ".join(incident.reasons[:4])),
        ("known", "; ".join(incident.facts[:4])),
        ("done", "; ".join(done)),
        ("people", "; ".join(act.in_words for act in incident.acts[-3:])),
        ("what to do", incident.to_do),
        ("batches to skip", _skipped(incident)),
        ("commands", _commands(incident)),
    ]
    return [(name, visible(text, MAX_FIELD)) for name, text in pairs if text]


def digest_headline(alerts: Sequence[Alert]) -> str:
    """Return `12 alerts at once in 2 runs, 1 of them pages`."""
    runs = sorted({alert.incident.run for alert in alerts})
    num_pages = sum(alert.is_page for alert in alerts)
    where = f"{len(runs)} runs" if len(runs) > 1 else f"run {middle_cut(visible(runs[0], MAX_RUN), PHONE // 2)}"
    text = f"{len(alerts)} alerts at once in {where}"
    return text + (f", {num_pages} of them pages" if num_pages else "")


def worst_first(alerts: Sequence[Alert]) -> list[Alert]:
    """Return alerts with pages first, then by severity, then oldest first."""
    return sorted(alerts, key=lambda one: (not one.is_page, -one.incident.severity.level, one.created, one.key))


def visible(text: str, limit: int) -> str:
    """Return text of at most `limit` characters in which nothing moves a cursor, ends a line or hides."""
    # A text may be a megabyte: only what can be shown is looked at.
    return end_cut(printable(end_cut(text, limit)), limit)


def end_cut(text: str, limit: int) -> str:
    """Return text of at most `limit` characters; where something was cut off it ends with dots."""
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."[:limit]


def fitted(lines: Sequence[str], budget: int, cut: Callable[[str, int], str] = end_cut) -> list[str]:
    """Return lines of at most `budget` characters in all: the longest are cut, none is left out, short ones stay whole."""
    limit = budget
    while sum(min(len(line), limit) for line in lines) > budget:
        limit = limit * 9 // 10
    return [cut(line, limit) for line in lines]


def middle_cut(text: str, limit: int) -> str:
    """Return text of at most `limit` characters, the beginning and the end of it: names often differ in their ends."""
    if len(text) <= limit:
        return text
    end = (limit - 3) // 3
    return text[: limit - 3 - end] + "..." + text[len(text) - end :]


def _word(alert: Alert) -> str:
    level = alert.incident.severity.value.upper()
    if alert.alike is not None and alert.alike.num_open and alert.change in CLOSED_STATES:
        # Some of them are over, which is no all-clear.
        return f"{level}, {alert.alike.num_open} of {alert.alike.num_incidents} open"
    return _WORDS.get(alert.change, f"{{}} {alert.change}").format(level)


def _what(incident: Incident) -> str:
    step = f"step {incident.opened_step}"
    return incident.title + ("" if re.search(rf"\b{step}\b", incident.title[:MAX_FIELD]) else f", {step}")


def _alike(alike: AlikeRuns | None) -> str:
    if alike is None or alike.num_runs < 2:
        return ""
    names = [middle_cut(name, PHONE // 2) for name in alike.runs[:8]]
    more = f" and {alike.num_runs - len(names)} more" if alike.num_runs > len(names) else ""
    return (
        f"{alike.num_runs} with incidents that are alike, {alike.num_open} of {alike.num_incidents} open: "
        f"{', '.join(names)}{more}; what follows is of the first"
    )


def _counted(items: list[str], most: int) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _machines(incident: Incident, context: AlertContext) -> str:
    if not incident.ranks:
        hosts = list(dict.fromkeys(one.node or one.host for one in context.ranks if one.node or one.host))
        more = " and others" if context.num_ranks > len(context.ranks) else ""
        return ", ".join(hosts) + more if hosts else ""
    ranks_by_place: dict[tuple[bool, str], list[int]] = {}
    for one in context.ranks:
        if one.in_words:
            ranks_by_place.setdefault((one.rank == context.origin, one.in_words), []).append(one.rank)
    words = []
    for (is_origin, place), ranks in ranks_by_place.items():
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        words.append(f"{named}{', where it began' if is_origin and context.num_ranks > 1 else ''}: {place}")
    num_more = context.num_ranks - sum(map(len, ranks_by_place.values()))
    return "; ".join(words) + (f"; and {num_more} more" if words and num_more > 0 else "")


def _since(incident: Incident, context: AlertContext) -> str:
    opened = context.opened or incident.time
    if not 0 < opened < 4e9:
        return ""
    return f"{datetime.datetime.fromtimestamp(opened, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC, step {incident.opened_step}"


def _how_bad(alert: Alert) -> str:
    incident, was = alert.incident, alert.was_severity
    before = f", was {was.value}" if was is not None and was != incident.severity else ""
    words = [incident.severity.value + before + (", somebody should get up" if alert.is_page else "")]
    if incident.num_worse:
        times = "once" if incident.num_worse == 1 else f"{incident.num_worse} times"
        words.append(f"{times} several times worse than was told")
    if incident.num_members:
        words.append(f"{incident.num_members} anomal{'y' if incident.num_members == 1 else 'ies'}")
    if incident.detectors:
        words.append(f"seen by {_counted(list(incident.detectors), 8)}")
    return "; ".join(words)


def _skipped(incident: Incident) -> str:
    if not incident.skip_steps:
        return ""
    words = f"step{'s' if len(incident.skip_steps) > 1 else ''} {', '.join(map(str, incident.skip_steps[:16]))}"
    if incident.skip_ranks:
        words += f", the part of rank {', '.join(map(str, incident.skip_ranks[:16]))}"
    return words + (f"; {len(incident.skip_samples)} samples" if incident.skip_samples else "")


def _commands(incident: Incident) -> str:
    """Return what to type next, where the run's directory is."""
    what = f"{incident.id} -d {shlex.quote(end_cut(incident.run, MAX_RUN))}"
    is_nobodys = incident.state == "open" and incident.severity is not Severity.INFO and not incident.acts
    return f"sentinel explain {what}" + (f"; sentinel ack {what}" if is_nobodys else "")
