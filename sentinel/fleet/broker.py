"""The connection to NATS JetStream: how it is made, what its streams are, and what its errors mean."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.fleet.join_lease import MAX_RECORDS
from sentinel.fleet.subjects import FRAMES, FRAMES_STREAM, LEASE, LEASES, PARTITIONS, PARTITIONS_STREAM, RAW, STREAM, inbox

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")

RECONNECT_S = 0.5
LEAVE_S = 10.0
"""A server that answers nothing for so long is left for another one, which may be with those that it is parted from."""
UNSENT_S = 10.0
"""A connection over which nothing of what is sent arrives is over after so long. Before it tries another server the client
waits until what it has written is sent, which over a link that is cut took the kernel's quarter of an hour."""
MAX_SAID = 100
"""Most errors that are said while there is no connection, each once."""
STREAM_BYTES = 4 * 2**30
"""Most bytes that the stream holds, unless said otherwise: past it nodes wait, and their spools hold what is new."""


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the broker is, and as whom it is spoken to."""

    server: str
    """nats://HOST:PORT or tls://HOST:PORT; several with commas between."""
    ca_file: str = ""
    """Certificates (PEM) by which the server is known; empty: those of the system."""
    cert_file: str = ""
    """Our own certificate chain (PEM), where the server asks for one."""
    key_file: str = ""
    login_file: str = ""
    """File of two lines, user and password, that only its owner may read."""

    def __post_init__(self) -> None:
        for one in self.servers:
            if not re.fullmatch(r"(nats|tls)://([^\s/@]*@)?[^\s/@]+", one):
                raise ConfigError(f'--server: expected nats://HOST:PORT or tls://HOST:PORT, got "{without_password(one)}"')
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--client-cert and --client-key: expected both or none, got one")

    @property
    def servers(self) -> list[str]:
        """The addresses."""
        return [one.strip() for one in self.server.split(",")]

    @property
    def shown(self) -> str:
        """The addresses as they may be printed."""
        return ", ".join(map(without_password, self.servers))

    def login(self) -> tuple[str, str] | None:
        """Return (user, password) as the file has them now; None: there is no file. ConfigError."""
        if not self.login_file:
            return None
        path = Path(self.login_file)
        try:
            mode, lines = path.stat().st_mode, path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: expected two lines, user and password, got: {error}") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{path}: expected a file that only its owner may read, got mode {stat.S_IMODE(mode):04o}; chmod 600"
            )
        if len(lines) < 2 or not lines[0]:
            raise ConfigError(f"{path}: expected two lines, user and password, got {len(lines)}")
        return lines[0], lines[1]

    def tls(self) -> ssl.SSLContext | None:
        """Return how the server is known and what it is shown; None: in the clear. ConfigError."""
        if not (self.ca_file or self.cert_file or any(one.startswith("tls://") for one in self.servers)):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-ca, --client-cert, --client-key: expected files in PEM, got: {error}") from error
        return context


def _is_no_note_of_ends(record: logging.LogRecord) -> bool:
    """Return whether a line of asyncio is any but that with which each end of a TLS connection of nats-py is noted."""
    return "eof_received" not in str(record.msg)


def without_password(server: str) -> str:
    """Return an address without who may use it."""
    return re.sub(r"//[^@/]*@", "//***@", server)


def error_words(error: Exception) -> str:
    """Return what an error of the broker says, for people."""
    return getattr(error, "description", None) or str(error) or type(error).__name__


def nats_client() -> Any:
    """Return the library's client, not connected; ConfigError: it is not installed."""
    try:
        from nats.aio.client import Client
    except ImportError as error:
        raise ConfigError('a fleet needs the NATS client: pip install "sentinel[fleet]" (nats-py)') from error
    return Client()


async def connect(config: BrokerConfig, name: str, on_connected: Callable[[], Awaitable[None]] | None = None) -> Client:
    """Return a connection, which is made again whenever it is lost; waits until there is one. on_connected: called each
    time it was made again.
    """
    client: Client = nats_client()
    said = set[str]()

    async def note(error: Exception) -> None:
        # Each of several servers has words of its own, in turn.
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        if words not in said and len(said) < MAX_SAID:
            said.add(words)
            log.warning("broker %s: %s; it is tried again", config.shown, without_password(words))

    async def connected() -> None:
        said.clear()
        _bound_sending(client)
        log.info("broker %s: connected again", config.shown)
        if on_connected is not None:
            await on_connected()

    options: dict[str, Any] = {}
    if (login := config.login()) is not None:
        # Asked for at each connection: a password is changed without a restart.
        options = {"user": lambda: (config.login() or login)[0], "password": lambda: (config.login() or login)[1]}
        options["inbox_prefix"] = inbox(login[0])
    tls = config.tls()
    if tls is not None:
        options["tls"] = tls
        logging.getLogger("asyncio").addFilter(_is_no_note_of_ends)
    # In an order of our own, so that whoever leaves a server comes to another one.
    await client.connect(
        random.sample(config.servers, len(config.servers)), dont_randomize=True, name=name, max_reconnect_attempts=-1,
        reconnect_time_wait=RECONNECT_S, connect_timeout=2,  # type: ignore[arg-type]
        ping_interval=5, max_outstanding_pings=2, error_cb=note, reconnected_cb=connected, **options,
    )  # fmt: skip
    _bound_sending(client)
    return client


def _bound_sending(client: Client) -> None:
    """Have a connection be over where nothing that is sent arrives for `UNSENT_S`. Linux alone can."""
    # The client has no word for its socket.
    writer = getattr(getattr(client, "_transport", None), "_io_writer", None)
    connection = writer.get_extra_info("socket") if writer is not None else None
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNSENT_S * 1e3))


async def ensure_streams(jetstream: JetStreamContext, max_bytes: int, replicas: int = 1) -> None:
    """Make the streams of chunks and of leases where there are none. By the join alone: nodes administer no streams.

    max_bytes: of the stream of chunks. replicas: servers of a cluster that each have all of both; streams that have fewer
    get as many, and none is taken from any.
    """
    await _ensure(jetstream, (LEASES, LEASE), (STREAM, RAW), max_bytes, replicas)


async def ensure_worker_streams(jetstream: JetStreamContext, max_bytes: int, replicas: int = 1) -> None:
    """Make the streams of frames for workers and of who has which partition; by workers alone, otherwise as above."""
    await _ensure(jetstream, (PARTITIONS_STREAM, PARTITIONS), (FRAMES_STREAM, FRAMES), max_bytes, replicas)


async def _ensure(
    jetstream: JetStreamContext, records: tuple[str, str], taken: tuple[str, str], max_bytes: int, replicas: int
) -> None:
    """Make a stream of records of leases, and one of what is taken from it, each (name, subject)."""
    from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
    from nats.js.errors import NotFoundError

    leases = StreamConfig(
        name=records[0], subjects=[records[1]], retention=RetentionPolicy.LIMITS, storage=StorageType.FILE,
        num_replicas=replicas, discard=DiscardPolicy.OLD, max_msgs=MAX_RECORDS, duplicate_window=0.1,
    )  # fmt: skip
    chunks = StreamConfig(
        name=taken[0], subjects=[taken[1]], retention=RetentionPolicy.LIMITS, storage=StorageType.FILE,
        num_replicas=replicas, discard=DiscardPolicy.NEW, max_bytes=max_bytes, duplicate_window=0.1,
    )  # fmt: skip
    for config in (leases, chunks):
        try:
            found = (await jetstream.stream_info(str(config.name))).config
        except NotFoundError:
            await jetstream.add_stream(config)
            log.info("stream %s: made", config.name)
        else:
            if found.subjects != config.subjects:
                # An earlier version's; what lies in it is read from the spools again.
                found.subjects = config.subjects
                await jetstream.update_stream(found)
                log.info("stream %s: takes %s now", config.name, ", ".join(config.subjects or ()))
            if (found.num_replicas or 1) < replicas:
                found.num_replicas = replicas
                await jetstream.update_stream(found)
                log.info("stream %s: is on %d servers now", config.name, replicas)
