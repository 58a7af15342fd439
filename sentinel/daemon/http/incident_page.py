"""What is shown of one incident, open or over: what a message says of it, and how it went on; as a page, and as JSON."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from sentinel.daemon.http.daemon_api import ShownIncident
from sentinel.daemon.http.html_frame import text, whole_page
from sentinel.report.alert import Alert
from sentinel.report.message import AlertMessage, message_of

MAX_REVISIONS = 200
"""Newest revisions that are shown; a bound on the size of the page."""


def render_incident(shown: ShownIncident) -> str:
    """Return the whole page."""
    newest, message = shown.revisions[-1], _message(shown)
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(words)}</td></tr>" for name, words in message.fields)
    links = "".join(f' | <a href="{text(one.url)}" rel="noreferrer">{text(one.name)}</a>' for one in message.links)
    body = (
        f'<p class="muted"><a href="..">Sentinel</a>{links}</p>'
        f'<h1 class="{newest.severity.value}">{text(message.headline())}</h1>'
        f'<p class="muted"><code>{text(newest.id)}</code>, {text(newest.state)}, revision {newest.revision}</p>'
        f"<table>{rows}</table>{_history(shown)}"
    )
    return whole_page(f"{newest.id} - Sentinel", body, root="../", refresh_s=5 if newest.state == "open" else 0)


def story_of(shown: ShownIncident) -> dict[str, Any]:
    """Return the same as plain values, with the newest revision whole and its anomalies."""
    message = _message(shown)
    return {
        "headline": message.headline(),
        "fields": message.fields,
        "links": msgspec.to_builtins(message.links),
        "incident": msgspec.to_builtins(shown.revisions[-1]),
        "revisions": [
            {
                **{
                    name: getattr(one, name)
                    for name in ("revision", "time", "state", "title", "root_name", "suspected", "steps")
                },
                "severity": one.severity.value,
                "num_members": one.num_members,
            }
            for one in reversed(shown.revisions[-MAX_REVISIONS:])
        ],
        "anomalies": [msgspec.Raw(one) for one in shown.anomalies],
    }


def _message(shown: ShownIncident) -> AlertMessage:
    newest = shown.revisions[-1]
    change = "opened" if newest.state == "open" else newest.state
    alert = Alert(key="", sink="", change=change, incident=newest, context=shown.context, created=newest.time)
    return message_of(alert, shown.orders, shown.links)


def _history(shown: ShownIncident) -> str:
    rows = []
    for one in reversed(shown.revisions[-MAX_REVISIONS:]):
        moment = f"{datetime.datetime.fromtimestamp(one.time, datetime.UTC):%Y-%m-%d %H:%M:%S}" if 0 < one.time < 4e9 else ""
        rows.append(
            f'<tr><td>{one.revision}</td><td>{moment}</td><td>{text(one.state)}</td><td class="{one.severity.value}">'
            f"{text(one.severity.value)}</td><td>{text(one.title)}</td><td>{text(one.root_name)}</td><td>{text(one.suspected)}</td>"
            f"<td>{text(one.steps)}</td><td>{one.num_members}</td></tr>"
        )
    names = ("Revision", "UTC", "State", "", "What", "First cause", "Suspected", "Steps", "Anomalies")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<h2>How it went on</h2><table><tr>{head}</tr>{''.join(rows)}</table>"
