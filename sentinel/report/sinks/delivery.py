"""What a sink is, what became of one delivery, and the one place that sends HTTP requests to sinks."""

from __future__ import annotations

import email.utils
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import EmailMessage
from typing import Protocol, TextIO, runtime_checkable

import msgspec
import requests
import urllib3

from sentinel.errors import ConfigError
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.links import NO_LINKS, MessageLinks
from sentinel.report.message_writer import MessageWriter, OrdersOf, no_orders
from sentinel.report.sinks import cutting
from sentinel.report.templates import NO_TEMPLATES, CompiledTemplates, MessageTemplates

CUT_S = 0.5
"""Seconds that a request that was cut off has to end; a bound on time: its connections are shut down, so it ends at once."""
MAX_RETRY_AFTER_S = 3600.0
"""Most seconds for which a Retry-After is obeyed. Too small: a busy server is pressed; too large: messages come too late."""
MAX_ANSWER_BYTES = 65536
"""Most bytes of an answer that are read; a bound on memory, above what any service says of a message."""
RETRIED_STATUSES = frozenset({408, 425, 429})
"""4xx answers that mean `later`; every other 4xx, and every redirect, means `never`."""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request."""

    outcome: str
    """`sent`, `retry` or `failed` (it would fail again)."""
    detail: str = ""
    """For people; holds no secret: neither the address's path nor its query."""
    retry_after_s: float | None = None
    """The server's own wish."""
    is_unknown: bool = False
    """The request may have been received although no answer came."""
    answer: str = ""
    """What a service answered, at most MAX_ANSWER_BYTES of it, for a sink that has to read it; never logged."""


SENT = Delivery(outcome="sent")


def checked(delivery: object) -> Delivery:
    """Return what `deliver` gave. TypeError where a sink of another package gave something else."""
    if not isinstance(delivery, Delivery):
        raise TypeError(f"deliver() gave {type(delivery).__name__}, expected a sentinel.report.sinks.delivery.Delivery")
    return delivery


class DeliveryNotes(Protocol):
    """What a sink has to know again after a restart: where it left the message about an incident."""

    def read(self, sink: str, run: str, incident: str) -> str:
        """Return what was noted of an incident; empty: nothing."""
        ...

    def write(self, sink: str, run: str, incident: str, note: str) -> None:
        """Keep a note in place of the former. Never raises: what cannot be kept is forgotten by a restart."""
        ...


class NotesInMemory:
    """Notes that die with the process."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str, str], str] = {}

    def read(self, sink: str, run: str, incident: str) -> str:
        """Return what was noted of an incident; empty: nothing."""
        return self._notes.get((sink, run, incident), "")

    def write(self, sink: str, run: str, incident: str, note: str) -> None:
        """Keep a note."""
        self._notes[sink, run, incident] = note


class Sink(Protocol):
    """Delivers alerts to one place; called from one thread, may block for its time-out."""

    name: str
    digest_after: int
    """Most incidents that are told one by one within a minute; of more, one message of all. 0: always one by one."""
    max_batch: int
    """Most alerts in one delivery."""

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Tell `alerts` in one request; several: as a digest. now: seconds since the epoch. Never raises on failure."""
        ...


@dataclass(frozen=True, kw_only=True)
class SinkParts:
    """What a sink may be built of."""

    environ: Mapping[str, str]
    """The environment as the command line hands it down, for secrets."""
    stream: TextIO
    """Where the console is."""
    links: MessageLinks = NO_LINKS
    """What messages lead to."""
    orders_of: OrdersOf = no_orders
    """Returns what was ordered because of an incident, in words."""
    notes: DeliveryNotes = field(default_factory=NotesInMemory)
    """What sinks know again after a restart."""
    capture: Capture | None = None
    """Takes what would be sent, in place of the network; None: it is sent."""
    proxy: str = ""
    """`notify.proxy`."""
    ca_file: str = ""
    """`notify.ca_file`."""

    @property
    def external_url(self) -> str:
        """Address of the daemon's page, for links; empty: no links."""
        return self.links.external_url

    def writer(self, sink: str, templates: MessageTemplates, escape: Callable[[str], str] = str) -> MessageWriter:
        """Return what makes the messages of a sink. escape: makes text safe in its markup. ConfigError for a template that
        is none.
        """
        compiled = None if templates == NO_TEMPLATES else CompiledTemplates(templates, f"notify.sinks.{sink}", escape)
        return MessageWriter(self.links, self.orders_of, compiled)

    def poster(self, timeout_s: float) -> Poster:
        """Return what makes requests as the `notify` section says."""
        return self.capture or HttpPoster(timeout_s=timeout_s, proxy=self.proxy, ca_file=self.ca_file)


class SinkSettings(Protocol):
    """The configuration of one sink: a frozen struct, each field documented. Other packages offer theirs by entry point."""

    @property
    def name(self) -> str:
        """Name in metrics and in the outbox; unique."""
        ...

    @property
    def route(self) -> RouteConfig:
        """What is sent."""
        ...

    def build(self, parts: SinkParts) -> Sink:
        """Return the sink. ConfigError where a secret is missing. Opens no connection."""
        ...


@runtime_checkable
class ResendingSink(Protocol):
    """A sink that forgets what it is not sent again."""

    def restore(self, open_alerts: Sequence[Alert]) -> None:
        """Take what a run had been sent of before this daemon served it, by this daemon or another; due at once."""
        ...

    def release(self, run: str) -> None:
        """Forget the alerts of a run without a word: it is served no more by this daemon, and may be by another."""
        ...

    def keep_alive(self, now: float) -> tuple[Delivery | None, float | None]:
        """Repeat what stands when that is due: (what became of it or None, when it is due next or None)."""
        ...


class MailCarrier(Protocol):
    """Hands one mail to a server."""

    def carry(self, message: EmailMessage) -> Delivery:
        """Hand it over and say what became of it; never raises for what a network or a server does."""
        ...


class Poster(Protocol):
    """Sends one POST request."""

    def post(self, url: str, body: bytes, headers: Mapping[str, str], now: float) -> Delivery:
        """Send and say what became of it; never raises for what a network does."""
        ...


class Capture(Poster, MailCarrier, Protocol):
    """What is given everything that a sink would send, by whichever way."""


class HttpPoster:
    """POST (or another method) over requests: bounded in time as a whole, in what it reads, and without redirects.

    timeout_s: for all of a request: the name's lookup, the connection, TLS, and every byte of the answer. Each request is
    made by a thread of its own, which is cut off then; one that even so does not end (a name is being looked up) is left
    behind, and no other is made before it has ended.

    The environment's proxies are not read, for `cli/` and `collect/environment.py` alone read the environment; `proxy`
    names one.
    """

    def __init__(self, *, timeout_s: float = 10.0, proxy: str = "", ca_file: str = "", method: str = "POST") -> None:
        self._method = method
        self._timeout_s = timeout_s
        self._connect_timeout_s = min(timeout_s, 5.0)
        self._proxies = {"http": proxy, "https": proxy} if proxy else {}
        self._ca_file = ca_file
        self._session = self._new_session()
        self._late: threading.Thread | None = None

    def _new_session(self) -> requests.Session:
        session = cutting.session()
        session.proxies = dict(self._proxies)
        if self._ca_file:
            session.verify = self._ca_file
        return session

    def post(self, url: str, body: bytes, headers: Mapping[str, str], now: float) -> Delivery:
        """Return what became of it; see Delivery."""
        where = host_of(url)
        if self._late is not None and self._late.is_alive():
            detail = f"{where}: the request before has not ended yet; is its name looked up in vain?"
            return Delivery(outcome="retry", detail=detail)
        found: list[Delivery] = []
        request = cutting.OpenRequest()
        session = self._session

        def make() -> None:
            with request:
                found.append(self._made(request, session, url, body, headers, now))

        thread = threading.Thread(target=make, name="sentinel-post", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not thread.is_alive():
            return found[0]
        request.cut()
        thread.join(CUT_S)
        if thread.is_alive():
            self._late, self._session = thread, self._new_session()
        elif request.was_answered:
            return found[0]  # The status came in time; what is cut off is the rest of the answer.
        what = "whole answer" if request.was_connected else "connection"
        detail = f"{where}: no {what} within {self._timeout_s:g} s"
        return Delivery(outcome="retry", detail=detail, is_unknown=request.was_connected)

    def _made(
        self,
        request: cutting.OpenRequest,
        session: requests.Session,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        now: float,
    ) -> Delivery:
        where = host_of(url)
        try:
            with session.request(
                self._method,
                url,
                data=body,
                headers={"Content-Type": "application/json", "User-Agent": "sentinel", **headers},
                timeout=(self._connect_timeout_s, self._timeout_s),
                allow_redirects=False,
                stream=True,
            ) as answer:
                # The status has come: the request was received, whatever happens to the rest of the answer.
                request.was_answered = True
                text = _beginning(answer)
                delivery = judge_answer(answer.status_code, answer.headers, " ".join(text[:200].split()), where, now)
                return msgspec.structs.replace(delivery, answer=text)
        except requests.exceptions.ConnectTimeout:
            return Delivery(outcome="retry", detail=f"{where}: no connection within {self._connect_timeout_s:g} s")
        except requests.exceptions.Timeout:
            # Not while TLS still shook hands: nothing was sent yet.
            is_unknown = request.was_connected
            return Delivery(
                outcome="retry", detail=f"{where}: no answer within {self._timeout_s:g} s", is_unknown=is_unknown
            )
        except requests.exceptions.ConnectionError as error:
            was_refused = any(isinstance(cause, urllib3.exceptions.NewConnectionError) for cause in _causes(error))
            is_tls = isinstance(error, requests.exceptions.SSLError)
            word = "refused or host unknown" if was_refused else "TLS failed" if is_tls else "connection lost"
            if not was_refused and not is_tls and any(isinstance(cause, TimeoutError) for cause in _causes(error)):
                word = f"it took nothing of the request for {self._connect_timeout_s:g} s"
            return Delivery(outcome="retry", detail=f"{where}: {word}", is_unknown=not (was_refused or is_tls))
        except (requests.exceptions.RequestException, ValueError) as error:
            return Delivery(outcome="failed", detail=f"{where}: {type(error).__name__}")
        except Exception as error:
            return Delivery(outcome="retry", detail=f"{where}: {type(error).__name__}", is_unknown=True)


def judge_answer(status: int, headers: Mapping[str, str], text: str, where: str, now: float) -> Delivery:
    """Return what an HTTP answer means: 2xx sent; 408, 425, 429 and 5xx later; anything else never."""
    detail = f"{where}: HTTP {status} {text}".rstrip()
    if 200 <= status < 300:
        return Delivery(outcome="sent", detail=detail)
    if status in RETRIED_STATUSES or status >= 500:
        return Delivery(outcome="retry", detail=detail, retry_after_s=retry_after(headers.get("Retry-After"), now))
    return Delivery(outcome="failed", detail=detail)


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or a date), at most MAX_RETRY_AFTER_S."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except (TypeError, ValueError):
            return None
    if not seconds >= 0:
        return 0.0
    return min(seconds, MAX_RETRY_AFTER_S)


def host_of(url: str) -> str:
    """Return `scheme://host:port` of an address: what may be logged of one whose path is a secret."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}"


def check_url(url: str, path: str) -> str:
    """Return `url` when it is an http(s) address, else raise ConfigError naming `path`, never the address."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"{path} must be an http or https address with a host, got another {len(url)} characters")
    return url


def _beginning(answer: requests.Response) -> str:
    head = b""
    try:
        for part in answer.iter_content(4096):
            head += part
            if len(head) >= MAX_ANSWER_BYTES:
                break
    except requests.exceptions.RequestException:
        pass
    return head[:MAX_ANSWER_BYTES].decode("utf-8", "replace")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = [error]
    for one in seen:
        yield one
        reason = getattr(one, "reason", None)
        for other in (*one.args, reason, one.__cause__, one.__context__):
            if isinstance(other, BaseException) and other not in seen:
                seen.append(other)
