"""Stores on free ports: S3's, which counts what it is asked for and how much it answers, Google's, and Azure's."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from .ports import free_port
from .waiting import wait_for

AZURITE = Path(__file__).parents[2] / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
"""Where `.ci/run` installs the emulator of Azure's store."""
ACCOUNT, ACCOUNT_KEY = (
    "devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
)  # fmt: skip
"""The same in every emulator of Azure's store; no secret."""


class Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    num_bytes: int
    """Of the answer's body."""


class ObjectStore:
    """moto's server with a bucket `bucket`; started by `object_store`."""

    def __init__(self, url: str, requests: list[Asked]) -> None:
        self.url, self.requests = url, requests
        self.delay_s = 0.0
        """How much later than it is had each answer goes."""
        self.client = boto3.client("s3", endpoint_url=url)
        self.client.create_bucket(Bucket="bucket")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Have nobody's keys be right until the block ends."""
        self._reset_auth("0")
        try:
            yield
        finally:
            self._reset_auth("inf")

    def _reset_auth(self, num_allowed: str) -> None:
        request = urllib.request.Request(
            f"{self.url}/moto-api/reset-auth", data=num_allowed.encode(), headers={"Content-Type": "text/plain"}
        )
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()


class _Quiet(WSGIRequestHandler):
    def log_request(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Yield a store that boto and s3fs find by the environment, until the block ends."""
    app = DomainDispatcherApplication(create_backend_app)
    requests: list[Asked] = []
    stores: list[ObjectStore] = []

    def counted(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = b"".join(app(environ, start))
        for one in stores:
            time.sleep(one.delay_s)
        requests.append(Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"], len(body)))
        return [body]

    port = free_port()
    server = make_server("127.0.0.1", port, counted, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAKEY")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUt")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        try:
            stores.append(ObjectStore(f"http://127.0.0.1:{port}", requests))
            yield stores[0]
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextlib.contextmanager
def google_object_store() -> Iterator[None]:
    """Have a store that speaks as Google's does, with a bucket `bucket`, which gcsfs finds by the environment."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        try:
            yield
        finally:
            server.stop()


@contextlib.contextmanager
def azure_object_store() -> Iterator[str]:
    """Have a store that speaks as Azure's does, with a container `bucket`, which adlfs finds by the connection string that
    this yields; skips the test where the emulator or the package is missing.
    """
    program = shutil.which("azurite-blob") or shutil.which(AZURITE)
    if program is None:
        pytest.skip(f"not installed: azurite, neither on the path nor as {AZURITE}")
    pytest.importorskip("adlfs", reason="not installed: adlfs")
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    # It knows versions of the protocol up to a date; clients that are newer say theirs.
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    server = subprocess.Popen([program, "--blobPort", str(port), *options], stdout=subprocess.DEVNULL)
    where = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}"
    found = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};{where};"

    def listens() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", found)
        patch.setenv("NO_PROXY", "127.0.0.1")
        try:
            wait_for(listens, f"azurite on {port}, exit code {server.poll()}")
            with BlobServiceClient.from_connection_string(found) as client:
                client.create_container("bucket")
            yield found
        finally:
            server.terminate()
            server.wait(60)
