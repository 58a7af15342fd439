"""TLS: what connects is shown the newest whole pair, and what is connected stays."""

from __future__ import annotations

import datetime
import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sentinel.daemon.http.certificate import Certificate, expiry
from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.server import HttpServer
from sentinel.errors import ConfigError

from ...support.certificates import write_pair
from ...support.waiting import wait_for
from .test_endpoints import FakeApi


@contextmanager
def tls_server(directory: Path) -> Iterator[HttpServer]:
    config = HttpConfig(tls_cert=str(directory / "cert.pem"), tls_key=str(directory / "key.pem"))
    server = HttpServer(FakeApi(), config, Credentials(directory, config))
    server.start()
    try:
        wait_for(lambda: server.is_answering)
        yield server
    finally:
        server.stop()


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


def connection_to(server: HttpServer, trust: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", server.port, timeout=30.0, context=trust)


def status_on(one: http.client.HTTPSConnection) -> int:
    one.request("GET", "/healthz")
    with one.getresponse() as answer:
        answer.read()
        return answer.status


def test_a_renewed_certificate_is_shown_to_who_connects_and_drops_nobody(tmp_path: Path) -> None:
    cert, _ = write_pair(tmp_path)
    with tls_server(tmp_path) as server:
        assert server.url.startswith("https://127.0.0.1:")
        former = trusting(cert)
        standing = connection_to(server, former)
        assert status_on(standing) == 200

        write_pair(tmp_path, until="2041-01-02")

        assert server.refresh() == []
        with pytest.raises(ssl.SSLCertVerificationError):
            status_on(connection_to(server, former))
        assert status_on(connection_to(server, trusting(cert))) == 200
        assert status_on(standing) == 200
        assert server.certificate_expires == datetime.datetime(2041, 1, 2, tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize("broken", ["other key", "no key", "no certificate", "cut off", "encrypted"])
def test_a_broken_new_pair_leaves_the_former_in_force_and_says_so(tmp_path: Path, broken: str) -> None:
    cert, key = write_pair(tmp_path)
    with tls_server(tmp_path) as server:
        trust = trusting(cert)
        good = cert.read_bytes(), key.read_bytes()
        if broken == "other key":
            write_pair(tmp_path)
            cert.write_bytes(good[0])
        elif broken == "no key":
            key.unlink()
        elif broken == "no certificate":
            cert.write_text("nothing of the kind\n")
        elif broken == "cut off":
            cert.write_bytes(good[0][:200])
        else:
            write_pair(tmp_path, password=b"secret")

        [problem] = server.refresh()

        assert problem.startswith("tls: the former certificate is in use, until 2040-01-02 00:00 UTC: http.tls_cert")
        assert status_on(connection_to(server, trust)) == 200
        cert.write_bytes(good[0])
        key.write_bytes(good[1])
        assert server.refresh() == []


def test_a_pair_that_is_broken_at_the_start_is_refused(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path)
    with pytest.raises(ConfigError, match=r"http\.tls_cert .*: expected a certificate in PEM"):
        Certificate(key, cert)
    with pytest.raises(ConfigError, match="No such file"):
        Certificate(cert, tmp_path / "none.pem")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_who_speaks_an_older_tls_or_none_is_refused(tmp_path: Path) -> None:
    cert, _ = write_pair(tmp_path)
    old = trusting(cert)
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with tls_server(tmp_path) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status_on(connection_to(server, old))
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            status_on(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30.0))
        assert status_on(connection_to(server, trusting(cert))) == 200


@pytest.mark.parametrize("until", ["2040-01-02", "2049-12-31", "2050-01-01", "2099-05-06"])
def test_the_end_of_a_certificate_is_read_from_it(tmp_path: Path, until: str) -> None:
    cert, _ = write_pair(tmp_path, until=until)

    assert expiry(cert.read_text()) == datetime.datetime.fromisoformat(until).replace(tzinfo=datetime.UTC).timestamp()
