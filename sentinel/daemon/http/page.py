"""The page at `/` in plain HTML, made on the server: what is shown until the script runs, and where none does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec

from sentinel.daemon.http.html_frame import text, whole_page
from sentinel.incident import IncidentAct


def render_page(
    runs: Iterable[Mapping[str, Any]],
    incidents: Iterable[Mapping[str, Any]],
    health: Mapping[str, Any],
    silences: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Return the whole page. Every text is escaped where it is put into it, by `html_frame.text`.

    runs, incidents, health, silences: as `DaemonApi` gives them.
    """
    status = str(health.get("status", ""))
    problems = "".join(f"<li>{text(problem)}</li>" for problem in health.get("problems", ()))
    others = ", ".join(f"process {text(one)}" for one in health.get("standby_of", ()))
    standby = (
        f'<p class="warning">Standby of {others}: runs that it serves are judged and shown there, and are taken over here '
        "when it ends.</p>"
    )
    body = (
        "<h1>Sentinel</h1>"
        f'<p class="muted">version {text(health.get("version", ""))}, '
        f'<span class="{"ok" if status == "ok" else "warning"}">{text(status)}</span></p>'
        + (standby if others else "")
        + (f'<ul class="warning">{problems}</ul>' if problems else "")
        + _incidents(list(incidents))
        + _silences(list(silences))
        + _runs(list(runs))
    )
    return whole_page("Sentinel", body, refresh_s=5)


def _steps(one: Mapping[str, Any]) -> str:
    newest = max(one.get("last_step", -1), one.get("active_step", -1))
    return f"{one['opened_step']} to {newest}" if "opened_step" in one else ""


def _incidents(incidents: list[Mapping[str, Any]]) -> str:
    if not incidents:
        return '<h2>Open incidents</h2><p class="ok">None.</p>'
    rows = []
    for one in incidents:
        severity = str(one.get("severity", "info"))
        kind = severity if severity in ("critical", "warning") else "info"
        evidence = "; ".join(map(str, list(one.get("evidence", ()))[:3]))
        ranks = ", ".join(map(str, list(one.get("ranks", ()))[:8]))
        rows.append(
            f'<tr><td class="{kind}">{text(severity)}</td><td>{text(one.get("run", ""))}</td>'
            f"<td>{_link_to(one)}</td>"
            f"<td>{text(one.get('root_name', ''))}<br>"
            f'<span class="muted">{text(_or_empty(one, "module", "segment"))}</span></td>'
            f"<td>{text(ranks)}</td><td>{text(_steps(one))}</td>"
            f"<td>{text(one.get('num_members', ''))}</td>"
            f"<td>{text(_newest_act(one))}</td>"
            f"<td>{text(one.get('verdict', ''))}<br><span class='muted'>{text(evidence)}</span></td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("", "Run", "Incident", "First cause", "Ranks", "Steps", "Anomalies", "People", "Suspected")
    )
    return f"<h2>Open incidents</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _silences(silences: list[Mapping[str, Any]]) -> str:
    if not silences:
        return ""
    rows = []
    for one in silences:
        until = datetime.fromtimestamp(one.get("until", 0.0), UTC)
        matchers = "".join(f"<code>{text(matcher)}</code> " for matcher in one.get("matchers", ()))
        rows.append(
            f"<tr><td><code>{text(one.get('id', ''))}</code></td><td>{matchers}</td><td>{until:%Y-%m-%d %H:%M} UTC</td>"
            f"<td>{text(one.get('who', ''))}</td><td>{text(one.get('why', ''))}</td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "Silenced", "Until", "By", "Why"))
    return f"<h2>Silences</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _link_to(incident: Mapping[str, Any]) -> str:
    run, name = (quote(str(incident.get(key, "")), safe="") for key in ("run", "id"))
    words = f"{text(incident.get('title', ''))}<br><code>{text(incident.get('id', ''))}</code>"
    return f'<a href="{text(f"incidents/{name}?run={run}")}">{words}</a>'


def _newest_act(incident: Mapping[str, Any]) -> str:
    acts = list(incident.get("acts", ()))
    return msgspec.convert(acts[-1], IncidentAct).in_words if acts else ""


def _runs(runs: list[Mapping[str, Any]]) -> str:
    if not runs:
        return '<h2>Runs</h2><p class="muted">No run has written anything here yet.</p>'
    rows = []
    for run in runs:
        scalars: Mapping[str, Any] = run.get("scalars", {})
        newest = ", ".join(f"{text(name)} {text(_number(value))}" for name, value in list(scalars.items())[:6])
        ranks: Mapping[str, Any] = run.get("ranks", {})
        late = ranks.get("late", 0)
        rows.append(
            f"<tr><td>{text(run.get('run', ''))}</td><td>{text(run.get('attempt', ''))}</td>"
            f"<td>{text(run.get('judged_step', ''))}</td>"
            f"<td>{text(ranks.get('expected', 0) - ranks.get('missing', 0))} of {text(ranks.get('expected', 0))}"
            + (f' <span class="warning">{text(late)} late</span>' if late else "")
            + f"</td><td>{newest}</td><td>{text(run.get('num_anomalies', 0))}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>" for name in ("Run", "Attempt", "Step judged", "Ranks live", "Newest values", "Anomalies")
    )
    return f"<h2>Runs</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _or_empty(incident: Mapping[str, Any], *names: str) -> str:
    return next((str(incident[name]) for name in names if incident.get(name)), "")
