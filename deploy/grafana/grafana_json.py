"""What Grafana reads: panels, variables and dashboards as plain dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""
TAG = "sentinel"

INSTANCE = 'job=~"$job", instance=~"$instance"'
RUN = f'{INSTANCE}, run=~"$run"'


def target(expression: str, legend: str = "", *, is_instant: bool = False, is_table: bool = False) -> dict[str, Any]:
    """Return a query. In the expression `%I` stands for the matchers of a daemon, `%R` for those of a run."""
    expression = expression.replace("%I", INSTANCE).replace("%R", RUN)
    return {
        "datasource": DATASOURCE,
        "expr": expression,
        "legendFormat": legend,
        "instant": is_instant,
        "range": not is_instant,
        "format": "table" if is_table else "time_series",
    }


def panel(
    kind: str, title: str, description: str, unit: str, targets: Sequence[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    """Return a panel without its place. fields: further ones of `fieldConfig.defaults`."""
    for letter, one in zip("ABCDEFGHIJKLMNOP", targets, strict=False):
        one["refId"] = letter
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": list(targets),
        "fieldConfig": {"defaults": {"unit": unit, **fields}, "overrides": []},
    }


def graph(title: str, description: str, unit: str, *targets: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return lines over time."""
    made = panel("timeseries", title, description, unit, targets, **fields)
    made["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return made


def number(
    title: str, description: str, unit: str, expression: str, *, bad_from: float | None = None, legend: str = ""
) -> dict[str, Any]:
    """Return one number, large. bad_from: from where on it is red."""
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if bad_from is not None:
        steps.append({"color": "red", "value": bad_from})
    made = panel(
        "stat",
        title,
        description,
        unit,
        [target(expression, legend, is_instant=True)],
        thresholds={"mode": "absolute", "steps": steps},
    )
    made["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value" if bad_from is not None else "none",
        "graphMode": "none",
        "textMode": "auto",
    }
    return made


def table(title: str, description: str, columns: dict[str, str], key: str, hidden: Sequence[str] = ()) -> dict[str, Any]:
    """Return one row for each value of the label `key`. columns: heading -> expression."""
    made = panel(
        "table",
        title,
        description,
        "short",
        [target(expression, is_instant=True, is_table=True) for expression in columns.values()],
    )
    renamed = {f"Value #{letter}": heading for letter, heading in zip("ABCDEFGHIJKLMNOP", columns, strict=False)}
    made["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(("Time", "__name__", "job", "instance", *hidden), True),
                "renameByName": renamed,
            },
        },
    ]
    made["options"] = {"showHeader": True, "sortBy": [{"displayName": key, "desc": False}]}
    return made


def placed(rows: Sequence[tuple[str, int, Sequence[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return panels with places and ids. rows: (heading, height of its panels, panels side by side, wrapped)."""
    found: list[dict[str, Any]] = []
    top = 0
    for heading, height, panels in rows:
        found.append(
            {
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            }
        )
        top += 1
        across = min(len(panels), 8 if height <= 4 else 3)
        width = WIDTH // across
        for at, one in enumerate(panels):
            place = {"h": height, "w": width, "x": at % across * width, "y": top + at // across * height}
            found.append({**one, "gridPos": place})
        top += -(-len(panels) // across) * height
    return [{**one, "id": number} for number, one in enumerate(found, 1)]


def chosen(name: str, label: str, query: str, *, is_multi: bool = True) -> dict[str, Any]:
    """Return a variable whose values Prometheus knows."""
    made = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": is_multi,
        "includeAll": is_multi,
    }
    return {**made, "allValue": ".+", "current": {"text": "All", "value": "$__all"}} if is_multi else made


def annotation(name: str, expression: str, title: str, color: str) -> dict[str, Any]:
    """Return marks in every graph where the expression has a value."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expression.replace("%I", INSTANCE).replace("%R", RUN),
        "titleFormat": title,
        "step": "30s",
    }


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[tuple[str, int, Sequence[dict[str, Any]]]],
    *,
    variables: Sequence[dict[str, Any]] = (),
    annotations: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return a dashboard that leads to the others of its tag."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    daemon = [
        chosen("job", "Job", "label_values(sentinel_build_info, job)"),
        chosen("instance", "Daemon", 'label_values(sentinel_build_info{job=~"$job"}, instance)'),
    ]
    link = {
        "type": "dashboards",
        "title": "Sentinel",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": 38,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [link],
        "templating": {"list": [source, *daemon, *variables]},
        "annotations": {"list": list(annotations)},
        "panels": placed(rows),
    }
