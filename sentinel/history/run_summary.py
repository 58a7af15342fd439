"""A summary of runs, as a notebook shows it: what was judged, what is open, and what to ask next."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

from sentinel.errors import SentinelError
from sentinel.history.config import FOLDER
from sentinel.history.found_records import standing_incidents
from sentinel.history.manifest import MANIFEST
from sentinel.history.remote_run import RemoteRun, RunPlace, manifest_of, once_more_if_vanished
from sentinel.incident import Incident
from sentinel.printable import printable

MOST_INCIDENTS = 8
MOST_RUNS = 20
MOST_CHARACTERS = 200
NEXT = (
    ("series(name, statistic)", "a tensor or scalar over the steps; .plot() draws it"),
    ("tensors(), scalars()", "what was measured, and where something was not finite"),
    ("incidents(), anomalies()", "what was found"),
    ("histogram(name)", "a tensor's newest histogram"),
    ("traces(name)", "pictures of tensors that ranks made"),
    ("sql(query)", "any question, over moments, scalars, steps, ..."),
)
"""(method, what it answers)."""
_RANK = re.compile(r"r(\d{5,})-[0-9a-f]+")


def as_text(runs: Mapping[str, RunPlace]) -> str:
    """Return the summary in lines."""
    lines = []
    for name, place in list(runs.items())[:MOST_RUNS]:
        lines.append(f"run {_shown(name)}: {_shown(_extent(place))}")
        lines += [f"  open: {_shown(_said(one))}" for one in _open(name, place)]
    lines += _further(runs)
    lines += [f"  .{call}: {what}" for call, what in NEXT]
    return "\n".join(lines)


def as_html(runs: Mapping[str, RunPlace]) -> str:
    """Return the summary as HTML in which every text is escaped."""
    parts = []
    for name, place in list(runs.items())[:MOST_RUNS]:
        parts.append(f"<p><b>{_escaped(name)}</b> {_escaped(_extent(place))}<br><small>{_escaped(str(place))}</small></p>")
        rows = "".join(
            f"<tr><td>{_escaped(one.severity.value)}</td><td>{_escaped(one.id)}</td><td>{_escaped(one.title)}</td>"
            f"<td>{_escaped(one.root_name)}</td><td>{_escaped(one.suspected)}</td><td>{_escaped(one.steps)}</td></tr>"
            for one in _open(name, place)
        )
        heads = "".join(
            f"<th>{head}</th>" for head in ("severity", "open incident", "title", "began in", "suspected", "steps")
        )
        parts.append(
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>" if rows else "<p>nothing is open</p>"
        )
    parts += [f"<p>{_escaped(line)}</p>" for line in _further(runs)]
    calls = "".join(f"<li><code>.{_escaped(call)}</code> {_escaped(what)}</li>" for call, what in NEXT)
    return f"<div>{''.join(parts)}<p>Ask next:</p><ul>{calls}</ul></div>"


def _further(runs: Mapping[str, RunPlace]) -> list[str]:
    return [f"and {len(runs) - MOST_RUNS} further runs"] if len(runs) > MOST_RUNS else []


def _extent(place: RunPlace) -> str:
    """Return what is known of a run's steps and ranks, in words; what cannot be read is said in their place."""
    said = []
    try:
        manifest = manifest_of(place)
        steps = manifest.of("steps")
        if steps:
            first, last = min(one.first_step for one in steps), max(one.last_step for one in steps)
            said.append(f"steps {first:,} to {last:,}")
            if len(manifest.attempts) > 1:
                said.append(f"{len(manifest.attempts)} attempts")
        elif isinstance(place, RemoteRun) or (place / FOLDER / MANIFEST).is_file():
            said.append("a history with no step yet")
        else:
            said.append("no history: the daemon writes one unless its configuration says history: {enabled: false}")
    except SentinelError as error:
        said.append(str(error))
    ranks = _ranks(place)
    if ranks:
        said.append(f"{ranks} rank{'' if ranks == 1 else 's'} in its spool")
    return ", ".join(said)


def _ranks(place: RunPlace) -> int:
    if isinstance(place, RemoteRun):
        return 0
    try:
        found = {one.name for one in (place / "spool").iterdir()}
    except OSError:
        return 0
    return len({match[1] for name in found if (match := _RANK.fullmatch(name))})


def _open(name: str, place: RunPlace) -> list[Incident]:
    """Return the open incidents of a run, the worst first, few enough to show."""
    try:
        found = once_more_if_vanished(lambda: standing_incidents({name: place}, state="open"))
        return [one for _, one in found][:MOST_INCIDENTS]
    except (OSError, SentinelError):
        return []


def _said(one: Incident) -> str:
    return f"{one.severity.value} {one.id} {one.title} (steps {one.steps}, suspected: {one.suspected})"


def _shown(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 3] + "..."


def _escaped(text: str) -> str:
    return html.escape(_shown(text))
