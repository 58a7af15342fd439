"""The page at `/`: plain HTML made on the server, no script, no file from anywhere else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import msgspec

from sentinel.incident import IncidentAct

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2024;background:#fcfcfd}
h1{font-size:1.3rem;margin:0 0 .2rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.35rem .7rem;border-bottom:1px solid #e4e6ea;
vertical-align:top}th{font-weight:600;color:#60646c;font-size:.85rem}
.critical{color:#b3191f;font-weight:600}.warning{color:#a05b00;font-weight:600}.info{color:#60646c}
.ok{color:#1d7a3c}.muted{color:#60646c}code{font:13px ui-monospace,monospace}
@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e8eb}th,td{border-color:#30343a}
.critical{color:#ff8488}.warning{color:#f0b35c}.ok{color:#6fd08c}.muted,.info,th{color:#a0a6ae}}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PAGE_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The Content-Security-Policy of the page: nothing runs and nothing is fetched, whatever text got into it."""


def render_page(runs: Iterable[Mapping[str, Any]], incidents: Iterable[Mapping[str, Any]], health: Mapping[str, Any]) -> str:
    """Return the whole page. Every text is escaped here and nowhere else.

    runs, incidents, health: as `DaemonApi` gives them.
    """
    status = str(health.get("status", ""))
    problems = "".join(f"<li>{_text(problem)}</li>" for problem in health.get("problems", ()))
    others = ", ".join(f"process {_text(one)}" for one in health.get("standby_of", ()))
    standby = (
        f'<p class="warning">Standby of {others}: runs that it serves are judged and shown there, and are taken over here '
        "when it ends.</p>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sentinel</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta http-equiv="refresh" content="5">'
        f"<style>{_STYLE}</style></head><body><h1>Sentinel</h1>"
        f'<p class="muted">version {_text(health.get("version", ""))}, '
        f'<span class="{"ok" if status == "ok" else "warning"}">{_text(status)}</span></p>'
        + (standby if others else "")
        + (f'<ul class="warning">{problems}</ul>' if problems else "")
        + _incidents(list(incidents))
        + _runs(list(runs))
        + "</body></html>\n"
    )


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
            f'<tr><td class="{kind}">{_text(severity)}</td><td>{_text(one.get("run", ""))}</td>'
            f"<td>{_text(one.get('title', ''))}<br><code>{_text(one.get('id', ''))}</code></td>"
            f"<td>{_text(one.get('root_name', ''))}<br>"
            f'<span class="muted">{_text(_or_empty(one, "module", "segment"))}</span></td>'
            f"<td>{_text(ranks)}</td><td>{_text(_steps(one))}</td>"
            f"<td>{_text(one.get('num_members', ''))}</td>"
            f"<td>{_text(_newest_act(one))}</td>"
            f"<td>{_text(one.get('verdict', ''))}<br><span class='muted'>{_text(evidence)}</span></td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("", "Run", "Incident", "First cause", "Ranks", "Steps", "Anomalies", "People", "Suspected")
    )
    return f"<h2>Open incidents</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _newest_act(incident: Mapping[str, Any]) -> str:
    acts = list(incident.get("acts", ()))
    return msgspec.convert(acts[-1], IncidentAct).in_words if acts else ""


def _runs(runs: list[Mapping[str, Any]]) -> str:
    if not runs:
        return '<h2>Runs</h2><p class="muted">No run has written anything here yet.</p>'
    rows = []
    for run in runs:
        scalars: Mapping[str, Any] = run.get("scalars", {})
        newest = ", ".join(f"{_text(name)} {_text(_number(value))}" for name, value in list(scalars.items())[:6])
        ranks: Mapping[str, Any] = run.get("ranks", {})
        late = ranks.get("late", 0)
        rows.append(
            f"<tr><td>{_text(run.get('run', ''))}</td><td>{_text(run.get('attempt', ''))}</td>"
            f"<td>{_text(run.get('judged_step', ''))}</td>"
            f"<td>{_text(ranks.get('expected', 0) - ranks.get('missing', 0))} of {_text(ranks.get('expected', 0))}"
            + (f' <span class="warning">{_text(late)} late</span>' if late else "")
            + f"</td><td>{newest}</td><td>{_text(run.get('num_anomalies', 0))}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>" for name in ("Run", "Attempt", "Step judged", "Ranks live", "Newest values", "Anomalies")
    )
    return f"<h2>Runs</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _text(value: object) -> str:
    return escape("" if value is None else str(value), quote=True)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _or_empty(incident: Mapping[str, Any], *names: str) -> str:
    return next((str(incident[name]) for name in names if incident.get(name)), "")
