"""The connection to NATS JetStream: how it is made, what its streams are, and what its errors mean."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sentinel.errors import ConfigError
from sentinel.fleet.broker_credentials import AUTHORITY_WORDS, Login, NkeyCredentials, read_credentials, read_login
from sentinel.fleet.join_lease import MAX_RECORDS
from sentinel.fleet.subjects import FRAMES, FRAMES_STREAM, LEASE, LEASES, PARTITIONS, PARTITIONS_STREAM, RAW, STREAM, inbox
from sentinel.printable import printable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

log = logging.getLogger("sentinel.fleet")
Whom = TypeVar("Whom", Login, NkeyCredentials)

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
    creds_file: str = ""
    """File of a user's JWT and the seed of its nkey, where the server goes by those of an operator; in place of a login."""
    on_error: Callable[[Exception], None] | None = None
    """Told what goes wrong with a connection, in place of the log; None: the log is."""

    def __post_init__(self) -> None:
        for one in self.servers:
            if not re.fullmatch(r"(nats|tls)://([^\s/@]*@)?[^\s/@]+", one):
                raise ConfigError(f'--server: expected nats://HOST:PORT or tls://HOST:PORT, got "{without_password(one)}"')
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--client-cert and --client-key: expected both or none, got one")
        if self.login_file and self.creds_file:
            raise ConfigError("--login and --creds: expected one or none, got both; which it is depends on the server")

    @property
    def servers(self) -> list[str]:
        """The addresses."""
        return [one.strip() for one in self.server.split(",")]

    @property
    def shown(self) -> str:
        """The addresses as they may be printed."""
        return ", ".join(map(without_password, self.servers))

    def login(self) -> Login | None:
        """Return the login as its file has it now; None: there is no file. ConfigError."""
        return read_login(Path(self.login_file)) if self.login_file else None

    def credentials(self) -> NkeyCredentials | None:
        """Return the credentials as their file has them now; None: there is no file. ConfigError."""
        return read_credentials(Path(self.creds_file)) if self.creds_file else None

    def check(self) -> None:
        """Raise ConfigError where a file that is named is not what it is named as."""
        self.login()
        self.credentials()
        self.tls()

    def tls(self) -> ssl.SSLContext | None:
        """Return how the server is known and what it is shown; None: in the clear. ConfigError."""
        if not (self.ca_file or self.cert_file or any(one.startswith("tls://") for one in self.servers)):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f'--tls-ca "{self.ca_file}": expected certificates in PEM, got: {_file_words(error)}'
            ) from error
        try:
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f'--client-cert "{self.cert_file}", --client-key "{self.key_file}": expected a certificate chain and its '
                f"key in PEM, got: {_file_words(error)}"
            ) from error
        return context


def _file_words(error: OSError) -> str:
    """Return what is wrong with a file of certificates; an error of the TLS library is one of the system, too."""
    return (str(error) if isinstance(error, ssl.SSLError) else error.strerror) or type(error).__name__


def _is_no_note_of_ends(record: logging.LogRecord) -> bool:
    """Return whether a line of asyncio is any but that with which each end of a TLS connection of nats-py is noted."""
    return "eof_received" not in str(record.msg)


def without_password(server: str) -> str:
    """Return an address without who may use it."""
    return re.sub(r"//[^@/]*@", "//***@", server)


def error_words(error: Exception) -> str:
    """Return what an error of the broker says, for people."""
    return getattr(error, "description", None) or str(error) or type(error).__name__


def what_to_do(error: Exception, config: BrokerConfig) -> str:
    """Return how whoever runs this mends an error of a connection; empty: it passes by itself, or nobody knows."""
    words = error_words(error).lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message:
            return "name the server in --server as its certificate does"
        return "name the certificate of the server's authority with --tls-ca"
    login = config.login_file or config.creds_file or "no --login"
    if any(word in words for word in AUTHORITY_WORDS):
        return f"it lets nobody in with {login}: give --login, or --creds, the file of a user that it knows"
    if "permissions violation" in words:
        return (
            f"the user of {login} may not: give --login, or --creds, the file of who this is: of the node of --node "
            "and of this run, of a join, a worker, or status; `sentinel fleet rights` prints what each may"
        )
    return ""


def nats_client(tls: Callable[[], ssl.SSLContext | None] = lambda: None) -> Any:
    """Return the library's client, not connected; ConfigError: it is not installed. tls: as of `BrokerClient`."""
    try:
        from sentinel.fleet.broker_client import BrokerClient
    except ImportError as error:
        raise ConfigError('a fleet needs the NATS client: pip install "sentinel[fleet]" (nats-py)') from error
    return BrokerClient(tls)


async def connect(config: BrokerConfig, name: str, on_connected: Callable[[], Awaitable[None]] | None = None) -> Client:
    """Return a connection, which is made again whenever it is lost; waits until there is one. on_connected: called each
    time it was made again.
    """
    client: Client = nats_client(config.tls)
    said = set[str]()

    async def note(error: Exception) -> None:
        if config.on_error is not None:
            config.on_error(error)
            return
        if client.is_closed:
            return  # how an end went that was asked for: TLS says that the server sent something meanwhile
        # Each of several servers has words of its own, in turn.
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        if words not in said and len(said) < MAX_SAID:
            said.add(words)
            log.warning(
                "broker %s: %s; it is tried again%s", config.shown, without_password(words),
                f"; {mend}" if (mend := what_to_do(error, config)) else "",
            )  # fmt: skip

    async def connected() -> None:
        said.clear()
        _bound_sending(client)
        log.info("broker %s: connected again", config.shown)
        if on_connected is not None:
            await on_connected()

    options = _as_whom(config)
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


def _as_whom(config: BrokerConfig) -> dict[str, Any]:
    """Return the options by which the client says who it is. They are asked for at each connection: a password, a JWT and a
    seed are changed without a restart. ConfigError: as the files are now, they are none.
    """
    if (login := config.login()) is not None:
        return {
            "user": lambda: _again(config.login, login).user,
            "password": lambda: _again(config.login, login).password,
            "inbox_prefix": inbox(login.user),
        }
    if (credentials := config.credentials()) is not None:
        return {
            "signature_cb": lambda nonce: _again(config.credentials, credentials).sign(nonce),
            "user_jwt_cb": lambda: _again(config.credentials, credentials).jwt.encode(),
            "inbox_prefix": inbox(credentials.user),
        }
    return {}


def _again(read: Callable[[], Whom | None], first: Whom) -> Whom:
    """Return what is read now. An error of the client's, after which it tries again: it cannot be, or is another user's."""
    from nats.errors import Error

    try:
        found = read() or first
    except ConfigError as error:
        raise Error(str(error)) from error
    if found.user != first.user:
        raise Error(f"expected user {printable(first.user)}, as at the start, got {printable(found.user)}; start anew")
    return found


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
