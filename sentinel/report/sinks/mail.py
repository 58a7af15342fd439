"""E-mail, by SMTP: plain text, and all messages about one incident are one thread."""

from __future__ import annotations

import email.message
import email.policy
import email.utils
import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sentinel.errors import ConfigError
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import digest_headline, visible, worst_first
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import Delivery, MailCarrier, SinkParts
from sentinel.report.sinks.mail_carrier import MailServer, SmtpCarrier
from sentinel.report.sinks.secret import read_secret
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

SECURITY = ("starttls", "tls", "none")
MAX_SUBJECT = 200
MAX_DIGEST_LINES = 100
PORTS = {"starttls": 587, "tls": 465, "none": 25}


class EmailConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="email"):
    """A mail server that takes messages from us."""

    name: str = "email"
    """Name in metrics and in the outbox; unique."""

    host: str = ""
    """Name of the mail server."""

    port: int = 0
    """Its port; 0: the usual one, 587 for starttls, 465 for tls, 25 for none."""

    security: str = "starttls"
    """`starttls` (it must offer it), `tls` (from the first byte on), or `none`: in the clear, for a relay on this host."""

    username: str = ""
    """Name to log in with; empty: there is no login."""

    password_file: str = ""
    """File that holds the password."""

    password_env: str = ""
    """Environment variable that holds the password."""

    sender: str = ""
    """Address that messages come from."""

    to: tuple[str, ...] = ()
    """Addresses that messages go to."""

    route: RouteConfig = RouteConfig()
    """Incidents that are sent; by default every one from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    rate_per_s: float = 0.2
    """Most messages a second, on average."""

    digest_after: int = 2
    """Most incidents within a minute (`notify.digest.window_s`) with a message each; of more, one of all. 0: always each."""

    timeout_s: float = 30.0
    """Longest a whole delivery may take, from looking up the name to the server's last word."""

    def __post_init__(self) -> None:
        path = f"notify.sinks.{self.name}"
        if self.security not in SECURITY:
            raise ConfigError(f"{path}.security must be one of {', '.join(SECURITY)}, got {self.security!r}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"{path}.port must be in [0, 65535], got {self.port}")
        if self.security == "none" and self.username:
            raise ConfigError(
                f"{path}.security must be starttls or tls where a username is given: passwords are not sent bare"
            )

    def build(self, parts: SinkParts) -> EmailSink:
        """Return the sink; `SinkSettings.build`."""
        return EmailSink(
            self,
            parts.environ,
            parts.writer(self.name, self.templates),
            lambda server: parts.capture or SmtpCarrier(server, parts.ca_file),
        )


class EmailSink:
    """Sends a message a delivery. Its Message-ID is the idempotency key: a repeat has the same."""

    max_batch = 500

    def __init__(
        self,
        config: EmailConfig,
        environ: Mapping[str, str],
        writer: MessageWriter,
        carrier_of: Callable[[MailServer], MailCarrier],
    ) -> None:
        path = f"notify.sinks.{config.name}"
        self.name = config.name
        self.digest_after = config.digest_after
        if not config.host:
            raise ConfigError(f"{path}.host: expected the name of a mail server, got none")
        for key, address in [("sender", config.sender), *(("to", one) for one in config.to or ("",))]:
            if "@" not in address or not address.isprintable() or any(char in address for char in " ,;<>"):
                raise ConfigError(f"{path}.{key}: expected an address like oncall@example.org, got {address!r}")
        password = read_secret(f"{path}.password", config.password_file, config.password_env, environ)
        if bool(config.username) != bool(password):
            raise ConfigError(f"{path}.username and password_file or password_env: expected both or none, got one")
        server = MailServer(
            host=config.host, port=config.port or PORTS[config.security], security=config.security,
            username=config.username, password=password, timeout_s=config.timeout_s,
        )  # fmt: skip
        self._carrier = carrier_of(server)
        self._config = config
        self._writer = writer
        self._domain = config.sender.rpartition("@")[2]

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Send one message; the deadline is for all of it."""
        return self._carrier.carry(self.message(alerts, now))

    def message(self, alerts: Sequence[Alert], now: float) -> email.message.EmailMessage:
        """Return the message of one alert, or of many."""
        made = email.message.EmailMessage(policy=email.policy.SMTP)
        made["From"] = self._config.sender
        made["To"] = ", ".join(self._config.to)
        made["Date"] = email.utils.formatdate(now)
        made["Auto-Submitted"] = "auto-generated"  # So that nobody's holiday answers it.
        if len(alerts) == 1:
            self._about_one(made, alerts[0])
        else:
            self._about_many(made, alerts)
        return made

    def _about_one(self, made: email.message.EmailMessage, alert: Alert) -> None:
        message = self._writer.write(alert)
        thread = self._id(f"{self.name}:{alert.incident.run}:{alert.incident.id}")
        made["Subject"] = message.summary(MAX_SUBJECT)
        if alert.was_severity is None:
            # The first of them is what the others answer to.
            made["Message-ID"] = thread
        else:
            made["Message-ID"] = self._id(alert.key)
            made["In-Reply-To"] = made["References"] = thread
        made["X-Sentinel-Incident"] = visible(alert.incident.id, MAX_SUBJECT).encode("ascii", "replace").decode()
        facts = message.body or "\n".join(f"{name}: {text}" for name, text in message.fields_under(""))
        links = "\n".join(f"{one.name}: {one.url}" for one in message.links)
        made.set_content(encodable("\n\n".join(filter(None, [message.headline(), facts, links]))) + "\n")

    def _about_many(self, made: email.message.EmailMessage, alerts: Sequence[Alert]) -> None:
        worst = worst_first(alerts)
        made["Subject"] = digest_headline(alerts)
        made["Message-ID"] = self._id("\n".join(sorted(alert.key for alert in alerts)))
        lines = []
        for alert in worst[:MAX_DIGEST_LINES]:
            message = self._writer.write(alert)
            lines.append(message.summary(300) + (f"\n    {message.link}" if message.link else ""))
        more = [f"and {len(alerts) - MAX_DIGEST_LINES} more"] if len(alerts) > MAX_DIGEST_LINES else []
        made.set_content(encodable("\n".join([*lines, *more])) + "\n")

    def _id(self, key: str) -> str:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"<{digest}@{self._domain}>"


def encodable(text: str) -> str:
    """Return text that every mail server takes: what is no character is a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
