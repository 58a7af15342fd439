"""A server of Weights & Biases of our own: what the client asks of it in online mode, over HTTP, and kept as it came."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .ports import free_port

KEY = "abcdef0123456789" * 2 + "01234567"
ENTITY = "team"
_OPERATION = re.compile(r"\s*(?:query|mutation)\s+(\w+)")
_OFFSETS = {"historyLineCount": "wandb-history.jsonl", "eventsLineCount": "wandb-events.jsonl", "logLineCount": "output.log"}


@dataclass
class WandbRun:
    """What the server has of one run."""

    params: dict[str, Any] = field(default_factory=dict)
    """What the run was begun or changed with last, without its config: `displayName`, `jobType`, ..."""
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    """File that is streamed -> its lines; what comes again at the same offset is written over what is there."""
    files: dict[str, bytes] = field(default_factory=dict)
    """File that was uploaded -> what is in it."""
    exit_codes: list[int] = field(default_factory=list)
    """One for each time that the run was said to be over."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows, in the order in which they stand; NaN is whatever the client writes for it."""
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    @property
    def summary(self) -> dict[str, Any]:
        """The newest value of each key."""
        lines = self.lines.get("wandb-summary.json", [])
        return dict(json.loads(lines[-1])) if lines else {}


@dataclass
class WandbArtifact:
    """What the server has of one artifact."""

    kind: str
    name: str
    run: str
    """Id of the run that logged it."""
    manifest: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Place in the store -> what is there."""
    is_committed: bool = False

    @property
    def files(self) -> dict[str, bytes]:
        """The files that the manifest names, as they were uploaded."""
        return {path: self.stored[path] for path in self.manifest.get("contents", {})}


class WandbServer:
    """Keeps runs, alerts and artifacts, also while it is stopped. `failing` makes it answer with an error."""

    def __init__(self) -> None:
        self.runs: dict[str, WandbRun] = {}
        self.artifacts: list[WandbArtifact] = []
        self.alerts: list[dict[str, Any]] = []
        self.calls: list[str] = []
        """Operations of GraphQL, and methods with paths of what else was asked, in their order."""
        self.unknown: list[str] = []
        """What was asked that this server has no answer for."""
        self.failing: int | None = None
        """The status that every request is answered with; None: what it is asked for."""
        self.loses_answers = False
        """Whether what is streamed is kept, and answered with 502 all the same."""
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[WandbServer]:
        """Serve until the block ends."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Serve, at the address that it had."""
        self._server = _Server(("127.0.0.1", self._port), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections; does nothing when it is stopped."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.hang_up()
            self._thread.join()
        self._server = self._thread = None

    def answers_as_asked(self) -> None:
        """Be there, and fail no more."""
        self.failing, self.loses_answers = None, False
        if self._server is None:
            self.start()

    def forget(self) -> None:
        """Have nothing, as in the beginning."""
        for kept in (self.runs, self.artifacts, self.alerts, self.calls, self.unknown):
            kept.clear()

    def answer(self, method: str, path: str, authorization: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a request."""
        with self._lock:
            call = f"{method} {path}"
            if path == "/graphql":
                call = _operation(json.loads(body)["query"])
            self.calls.append(call)
            if path.startswith("/sdk/otel/"):  # what the client tells of itself
                return 200, b"{}"
            if self.failing is not None:
                return self.failing, b'{"error": "as told"}'
            if method == "PUT":
                return self._put(path, body)
            if _key_of(authorization) != KEY:
                return 401, b'{"errors": [{"message": "user is not logged in"}]}'
            if path == "/graphql":
                return self._graphql(call, json.loads(body).get("variables") or {})
            if method == "POST" and path.endswith("/file_stream"):
                return self._stream(path.split("/")[4], json.loads(body))
        self.unknown.append(call)
        return 404, b"{}"

    def _stream(self, run: str, body: dict[str, Any]) -> tuple[int, bytes]:
        kept = self.runs[run]
        for name, part in body.get("files", {}).items():
            lines = kept.lines.setdefault(name, [])
            lines[part["offset"] : part["offset"] + len(part["content"])] = part["content"]
        if body.get("complete"):
            kept.exit_codes.append(body["exitcode"])
        return (502, b"") if self.loses_answers else (200, b"{}")

    def _put(self, path: str, body: bytes) -> tuple[int, bytes]:
        _, place, owner, name = path.split("/", 3)
        if place == "run-files":
            self.runs[owner].files[name] = body
        elif name == "manifest":
            self.artifacts[int(owner)].manifest = json.loads(body)
        else:
            self.artifacts[int(owner)].stored[name] = body
        return 200, b""

    def _graphql(self, operation: str, variables: dict[str, Any]) -> tuple[int, bytes]:
        ask = getattr(self, f"_ask_{operation}", None)
        if ask is None:
            self.unknown.append(operation)
            return 200, json.dumps({"errors": [{"message": f"no answer for {operation}"}]}).encode()
        return 200, json.dumps({"data": ask(variables)}).encode()

    def _ask_Viewer(self, _: dict[str, Any]) -> Any:
        viewer = {"id": "dXNlcg==", "entity": ENTITY, "username": "user", "email": "user@example.com", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def _ask_ServerFeaturesQuery(self, _: dict[str, Any]) -> Any:
        return {"serverInfo": {"features": []}}

    def _ask_RunResumeStatus(self, variables: dict[str, Any]) -> Any:
        run = self.runs.get(variables["name"])
        entity = {"id": "ZW50aXR5", "name": ENTITY}
        return {"model": {"id": "cHJvamVjdA==", "name": variables["project"], "entity": entity, "bucket": self._bucket(run)}}

    def _bucket(self, run: WandbRun | None) -> Any:
        if run is None:
            return None
        return {
            "id": run.params["id"], "name": run.params["name"], "displayName": run.params.get("displayName"),
            **{count: len(run.lines.get(name, [])) for count, name in _OFFSETS.items()},
            "summaryMetrics": json.dumps(run.summary), "config": json.dumps(run.config),
            "historyTail": json.dumps(run.lines.get("wandb-history.jsonl", [])[-1:]), "eventsTail": "[]",
            "tags": [], "notes": "", "wandbConfig": json.dumps({"t": 1}),
        }  # fmt: skip

    def _ask_UpsertBucket(self, variables: dict[str, Any]) -> Any:
        name = variables["name"]
        is_new = name not in self.runs
        run = self.runs.setdefault(name, WandbRun())
        if config := variables.get("config"):
            run.config = json.loads(config)
        run.params.update({key: value for key, value in variables.items() if value is not None and key != "config"})
        run.params["id"] = base64.b64encode(f"Run:v1:{name}".encode()).decode()
        project = {"id": "cHJvamVjdA==", "name": variables["project"], "entity": {"id": "ZW50aXR5", "name": ENTITY}}
        bucket = {
            "id": run.params["id"], "name": name, "displayName": run.params.get("displayName"), "description": "",
            "config": json.dumps(run.config), "sweepName": None, "project": project,
            "historyLineCount": len(run.history),
        }  # fmt: skip
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _ask_CreateRunFiles(self, variables: dict[str, Any]) -> Any:
        run = variables["run"]
        files = [{"name": one, "uploadUrl": f"{self.url}/run-files/{run}/{one}"} for one in variables["files"]]
        return {"createRunFiles": {"runID": self.runs[run].params["id"], "uploadHeaders": [], "files": files}}

    def _ask_NotifyScriptableRunAlert(self, variables: dict[str, Any]) -> Any:
        self.alerts.append(variables)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _ask_ArtifactType(self, _: dict[str, Any]) -> Any:
        return {"project": None}

    def _ask_CreateArtifact(self, variables: dict[str, Any]) -> Any:
        given = variables["input"]
        self.artifacts.append(
            WandbArtifact(kind=given["artifactTypeName"], name=given["artifactCollectionName"], run=given.get("runName", ""))
        )
        artifact = {"id": str(len(self.artifacts) - 1), "state": "PENDING", "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def _ask_CreateArtifactManifest(self, variables: dict[str, Any]) -> Any:
        return {"createArtifactManifest": {"artifactManifest": self._manifest(variables["artifactID"])}}

    def _ask_UpdateArtifactManifest(self, variables: dict[str, Any]) -> Any:
        return {"updateArtifactManifest": {"artifactManifest": self._manifest(variables["artifactManifestID"])}}

    def _manifest(self, artifact: str) -> Any:
        file = {"id": artifact, "uploadUrl": f"{self.url}/artifacts/{artifact}/manifest", "uploadHeaders": []}
        return {"id": artifact, "file": file}

    def _ask_CreateArtifactFiles(self, variables: dict[str, Any]) -> Any:
        edges: list[dict[str, Any]] = [
            {"node": {"storagePath": f"{one['artifactID']}/{one['name']}", "uploadHeaders": [], "uploadMultipartUrls": None,
                      "uploadUrl": f"{self.url}/artifacts/{one['artifactID']}/{one['name']}",
                      "artifact": {"id": one["artifactID"]}}}
            for one in variables["input"]["artifactFiles"]
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _ask_CommitArtifact(self, variables: dict[str, Any]) -> Any:
        self.artifacts[int(variables["artifactID"])].is_committed = True
        return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "0"}}}


class _Server(http.server.ThreadingHTTPServer):
    """Closes its connections when it is stopped: the client keeps them open."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""

    def hang_up(self) -> None:
        for one in list(self._open):
            self.shutdown_request(one)


def _handler_of(server: WandbServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = server.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _any

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _operation(query: str) -> str:
    found = _OPERATION.match(query)
    return found[1] if found else query.strip()[:40]


def _key_of(authorization: str) -> str:
    with contextlib.suppress(ValueError):
        return base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")[2]
    return ""
