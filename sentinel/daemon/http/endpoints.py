"""One function an endpoint: reads the request, asks the daemon, and writes the answer.

Starlette runs each in a thread of its pool.
"""

from __future__ import annotations

import getpass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sentinel.control.acts import ActRequest
from sentinel.daemon.commanding import ACTIONS
from sentinel.daemon.history_api import HistoryRequest
from sentinel.daemon.http.assets import ASSETS
from sentinel.daemon.http.daemon_api import DaemonApi
from sentinel.daemon.http.event_stream import EventStreams
from sentinel.daemon.http.incident_page import render_incident, story_of
from sentinel.daemon.http.page import render_page
from sentinel.daemon.http.responses import html, lines, plain, problem, saved
from sentinel.daemon.pipeline_api import PipelineRequest
from sentinel.daemon.rules_api import WhatIfRequest
from sentinel.daemon.series_api import SeriesRequest
from sentinel.daemon.trace_api import TraceRequest
from sentinel.history.wanted import ANY_TENSORS
from sentinel.report.silences import SilenceRequest

MAX_ITEMS = 1000
"""Most anomalies, incidents or entries of the audit in one answer."""


def page(request: Request) -> Response:
    """Return the page for people."""
    api = api_of(request)
    body = render_page(
        api.runs(),
        [msgspec.json.decode(line) for line in api.incidents(None, limit=50, is_open=True)],
        api.health(),
        [msgspec.to_builtins(one) for one in api.silences()],
    )
    return html(body)


def asset(request: Request) -> Response:
    """Return a file of the page; 304 where whoever asks has it."""
    found = ASSETS.get(request.path_params["name"])
    if found is None:
        return problem(404, "there is no such file of the page")
    headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.body, headers=headers, media_type=found.media_type)


def incident(request: Request) -> Response:
    """Return the page of one incident, open or over."""
    shown = api_of(request).incident(request.query_params.get("run"), request.path_params["incident"])
    return html(render_incident(shown))


def incident_story(request: Request) -> Response:
    """Return all that is known of an incident, open or over: what a message says of it, its revisions, its anomalies."""
    shown = api_of(request).incident(request.query_params.get("run"), request.path_params["incident"])
    return plain(story_of(shown))


def runs(request: Request) -> Response:
    """Return the runs that are served."""
    return plain({"runs": api_of(request).runs()})


def anomalies(request: Request) -> Response:
    """Return the newest anomalies: of a run, of a step, before a position."""
    found = api_of(request).anomalies(
        request.query_params.get("run"),
        limit=number(request, "limit", 100, MAX_ITEMS) or 0,
        before=number(request, "before", None),
        step=number(request, "step", None),
    )
    return lines("anomalies", found)


def incidents(request: Request) -> Response:
    """Return the newest revision of each incident: of a run, of those that are open."""
    state = request.query_params.get("state", "all")
    if state not in ("all", "open"):
        raise ValueError(f'state must be "all" or "open", got "{state}"')
    found = api_of(request).incidents(
        request.query_params.get("run"),
        limit=number(request, "limit", 100, MAX_ITEMS) or 0,
        is_open=state == "open",
    )
    return lines("incidents", found)


def act(request: Request) -> Response:
    """Take what a person does about an incident."""
    asked = msgspec.json.decode(request.state.body, type=dict[str, Any])
    run = asked.pop("run", None)
    if not isinstance(run, str):
        raise ValueError('expected {"run": NAME, "incident": ID, "act": "ack", "resolve" or "reopen", "who": NAME, ...}')
    return plain(api_of(request).act(run, msgspec.convert(asked, ActRequest)), 202)


def silences(request: Request) -> Response:
    """Return the silences that hold now."""
    return plain({"silences": msgspec.to_builtins(api_of(request).silences())})


def silence(request: Request) -> Response:
    """Begin a silence, or end one."""
    asked = msgspec.json.decode(request.state.body, type=dict[str, Any])
    wanted = asked.pop("end", None)
    if wanted is None:
        done = api_of(request).silence(msgspec.convert(asked, SilenceRequest))
    elif isinstance(wanted, str) and set(asked) <= {"who"}:
        done = api_of(request).end_silence(wanted, str(asked.get("who") or getpass.getuser()))
    else:
        raise ValueError('expected {"matchers": [...], "for_s": SECONDS, "why": TEXT, ...}, or {"end": ID, "who": NAME}')
    return plain(msgspec.to_builtins(done), 202)


def series(request: Request) -> Response:
    """Return values of tensors or scalars over steps."""
    return plain(api_of(request).questions.series(SeriesRequest.parse(request.query_params.multi_items())))


def history(request: Request) -> Response:
    """Return what the history of a run holds."""
    return plain(api_of(request).questions.history(HistoryRequest.parse(request.query_params.multi_items())))


def history_series(request: Request) -> Response:
    """Return single series over steps, in columns."""
    return plain(api_of(request).questions.history_series(HistoryRequest.parse(request.query_params.multi_items())))


def heatmap(request: Request) -> Response:
    """Return one statistic of many tensors over steps."""
    return plain(api_of(request).questions.heatmap(HistoryRequest.parse(request.query_params.multi_items(), ANY_TENSORS)))


def traces(request: Request) -> Response:
    """Return pictures of tensors that the ranks of a run have made."""
    return plain(api_of(request).questions.traces(TraceRequest.parse(request.query_params.multi_items())))


def vectors(request: Request) -> Response:
    """Return the value of each expert, or of each head, over steps."""
    return plain(api_of(request).questions.vectors(HistoryRequest.parse(request.query_params.multi_items())))


def pipeline(request: Request) -> Response:
    """Return a step as its ranks ran it."""
    return plain(api_of(request).questions.pipeline(PipelineRequest.parse(request.query_params.multi_items())))


def report(request: Request) -> Response:
    """Return the post-mortem of a run, or of one of its incidents, to be saved; it takes seconds."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return problem(403, "post-mortems are not written for other pages")  # One could have the machine compute.
    found = api_of(request).questions.report(named_run(request), request.query_params.get("incident"))
    return saved(found.name, found.body)


async def events(request: Request) -> Response:
    """Return a stream that says what has changed, as long as the page is open; 503 where too many are."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return problem(403, "streams are not begun for other pages")  # One could keep all of them to itself.
    streams: EventStreams = request.app.state.streams
    return streams.begun()


def divergence(request: Request) -> Response:
    """Return where two runs diverge: the step and the tensor."""
    runs = request.query_params.getlist("run")
    return plain(api_of(request).questions.divergence(runs, request.query_params.get("statistic", "std")))


def marks(request: Request) -> Response:
    """Return restarts, checkpoints, changes of the rules and commands of a run."""
    return plain({"marks": api_of(request).questions.marks(named_run(request))})


def rules(request: Request) -> Response:
    """Return the rules in force of a run, and what each said so far."""
    return plain(api_of(request).questions.rules(named_run(request)))


def what_if(request: Request) -> Response:
    """Return what a rule with other numbers would have said; a POST, so that no other page has the machine compute."""
    return plain(api_of(request).questions.what_if(msgspec.json.decode(request.state.body, type=WhatIfRequest)))


def audit(request: Request) -> Response:
    """Return who did what, the newest first."""
    limit = number(request, "limit", 100, MAX_ITEMS) or 0
    return plain({"audit": api_of(request).audit(request.query_params.get("run"), limit=limit)})


def control(request: Request) -> Response:
    """Command the trainers of a run."""
    asked = msgspec.json.decode(request.state.body, type=dict[str, Any])
    run, action = asked.pop("run", None), asked.pop("action", None)
    if not isinstance(run, str) or action not in ACTIONS:
        raise ValueError(f'expected {{"run": NAME, "action": {" or ".join(map(repr, ACTIONS))}, ...}}')
    return plain(api_of(request).control(run, action, asked))


def reload(request: Request) -> Response:
    """Have rules and configuration read again; 422 where one cannot be."""
    result = api_of(request).reload()
    return plain(result, 200 if result.get("outcome") == "ok" else 422)


def api_of(request: Request) -> DaemonApi:
    """Return whom to ask."""
    api: DaemonApi = request.app.state.api
    return api


def named_run(request: Request) -> str:
    """Return the run that a query names. ValueError where it names none."""
    run = request.query_params.get("run")
    if run is None:
        raise ValueError("run: expected the name of a run, got none")
    return run


def number(request: Request, name: str, otherwise: int | None, most: int = 2**62) -> int | None:
    """Return a whole number of the query, at most `most`; `otherwise` where it is not there. ValueError."""
    text = request.query_params.get(name)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise ValueError(f'{name} must be a whole number, got "{text[:40]}"')
    return min(int(text), most)
