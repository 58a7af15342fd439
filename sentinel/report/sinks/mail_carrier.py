"""Hands mails to a server over SMTP, within a deadline for all of it."""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
import threading
from collections.abc import Callable
from email.message import EmailMessage

import msgspec

from sentinel.report.sinks.delivery import CUT_S, Delivery


class MailServer(msgspec.Struct, frozen=True, kw_only=True):
    """Whom mails are handed to."""

    host: str
    port: int
    security: str
    """`starttls`, `tls` or `none`."""
    username: str = ""
    password: str = ""
    timeout_s: float = 30.0


class SmtpCarrier:
    """A connection a mail. A server that does not answer in time is cut off."""

    def __init__(self, server: MailServer, ca_file: str = "") -> None:
        """ca_file: certificate authorities to trust; empty: the usual ones."""
        self._server = server
        self._ca_file = ca_file
        self._late: threading.Thread | None = None

    def carry(self, message: EmailMessage) -> Delivery:
        """Hand it over."""
        where = f"smtp://{self._server.host}"
        if self._late is not None and self._late.is_alive():
            return Delivery(outcome="retry", detail=f"{where}: the delivery before has not ended yet")
        found: list[Delivery] = []
        session = _Session()
        thread = threading.Thread(
            target=lambda: found.append(self._sent(message, session, where)), name="sentinel-mail", daemon=True
        )
        thread.start()
        thread.join(self._server.timeout_s)
        if thread.is_alive():
            session.cut()
            thread.join(CUT_S)
        if thread.is_alive():
            self._late = thread
        if found and not session.is_cut:
            return found[0]
        detail = f"{where}: not taken within {self._server.timeout_s:g} s"
        return Delivery(outcome="retry", detail=detail, is_unknown=session.is_sending)

    def _sent(self, message: EmailMessage, session: _Session, where: str) -> Delivery:
        config = self._server
        try:
            context = ssl.create_default_context(cafile=self._ca_file or None)
            with session.opened(lambda: self._connected(context)) as server:
                if config.security == "starttls":
                    server.starttls(context=context)
                if config.username:
                    server.login(config.username, config.password)
                session.is_sending = True
                server.send_message(message)
            return Delivery(outcome="sent")
        except smtplib.SMTPRecipientsRefused as error:
            codes = {code for code, _ in error.recipients.values()}
            outcome = "retry" if any(400 <= code < 500 for code in codes) else "failed"
            return Delivery(outcome=outcome, detail=f"{where}: no recipient was taken: {', '.join(map(str, sorted(codes)))}")
        except smtplib.SMTPResponseException as error:
            outcome = "failed" if error.smtp_code >= 500 else "retry"
            return Delivery(outcome=outcome, detail=f"{where}: {type(error).__name__} {error.smtp_code}")
        except smtplib.SMTPNotSupportedError as error:
            return Delivery(outcome="failed", detail=f"{where}: {error}")
        except (OSError, smtplib.SMTPException) as error:
            return Delivery(outcome="retry", detail=f"{where}: {_why(error)}", is_unknown=session.is_sending)

    def _connected(self, context: ssl.SSLContext) -> smtplib.SMTP:
        config = self._server
        if config.security == "tls":
            return smtplib.SMTP_SSL(config.host, config.port, timeout=config.timeout_s, context=context)
        return smtplib.SMTP(config.host, config.port, timeout=config.timeout_s)


class _Session:
    """A connection that another thread can cut: a server that says a byte a second keeps within every time-out of a read."""

    def __init__(self) -> None:
        self.is_sending = False
        """The message may have been received."""
        self.is_cut = False
        self._server: smtplib.SMTP | None = None

    def opened(self, connect: Callable[[], smtplib.SMTP]) -> smtplib.SMTP:
        self._server = connect()
        if self.is_cut:
            self.cut()
        return self._server

    def cut(self) -> None:
        """Shut the connection down, which ends whatever waits for it."""
        self.is_cut = True
        connection = getattr(self._server, "sock", None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or type(error).__name__}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
