"""Slack, by a bot's token: one message an incident, edited in place, and under it a thread of what changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.anomaly import Severity
from sentinel.errors import MALFORMED, ConfigError
from sentinel.report.alert import Alert, RouteConfig
from sentinel.report.message import AlertMessage, worst_first
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.delivery import Delivery, DeliveryNotes, Poster, SinkParts, check_url, host_of
from sentinel.report.sinks.secret import read_secret
from sentinel.report.sinks.slack_blocks import MAX_SECTION, clip, digest_blocks, escape, message_blocks
from sentinel.report.templates import NO_TEMPLATES, MessageTemplates

LATER = frozenset({"ratelimited", "rate_limited", "internal_error", "fatal_error", "service_unavailable", "request_timeout"})
"""Errors of Slack's Web API that mean `later`; any other means `never`. Source: the methods' lists of errors."""
GONE = frozenset({"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found", "channel_not_found"})
"""Errors of chat.update that mean that the message is no more, or is not ours any more: it is posted anew."""
LOUD = frozenset({"raised", "worse", "reopened"})
"""Changes that are shown in the channel too: a reply in a thread, and an edit, notify nobody who does not follow them."""
MAX_EDITS = 20
"""Most messages that are edited behind a digest. Too small: messages go on saying what was; too large: Slack, which allows
about fifty edits a minute, refuses them."""
SILENT_FIELDS = frozenset({"commands", "steps", "since"})
"""Fields that change with every revision, or never: no reply is made of them."""


class SlackBotConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="slack-bot"
):
    """An app of Slack that may write to a channel: its bot token needs the scope `chat:write`, and it is in the channel."""

    name: str = "slack-bot"
    """Name in metrics and in the outbox; unique."""

    token_file: str = ""
    """File that holds the bot token, `xoxb-...`."""

    token_env: str = ""
    """Environment variable that holds it."""

    channel: str = ""
    """Id of the channel, `C0123456789`, or its name with `#`."""

    api_url: str = "https://slack.com/api"
    """Where Slack's Web API is."""

    route: RouteConfig = RouteConfig(min_severity=Severity.CRITICAL, detectors=("LossSpike",))
    """What is sent; by default critical incidents, and loss spikes from warning on."""

    templates: MessageTemplates = NO_TEMPLATES
    """Texts of your own."""

    page_mention: str = ""
    """Put before a page, as Slack writes it: `<!here>`, `<@U123>`."""

    rate_per_s: float = 0.5
    """Most alerts a second, on average; each may take two requests, and Slack allows about one a second."""

    digest_after: int = 2
    """Most incidents within a minute (`notify.digest.window_s`) with a message each; of more, one of all. 0: always each."""

    timeout_s: float = 10.0
    """Longest a whole request may take, from looking up the name to the last byte of the answer."""

    def build(self, parts: SinkParts) -> SlackBotSink:
        """Return the sink; `SinkSettings.build`."""
        return SlackBotSink(
            self, parts.poster(self.timeout_s), parts.environ, parts.writer(self.name, self.templates, escape), parts.notes
        )


class SlackNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the message about an incident is."""

    channel: str
    ts: str
    """Slack's name of the message in its channel."""
    is_digest: bool = False
    """It is a digest of many, which is not edited."""
    told: str = ""
    """Key of the newest alert that is in the thread, or in the message where nothing came after."""
    fields: dict[str, str] = {}
    """Name -> hash of what the message says, by which the next one knows what changed."""


class SlackBotSink:
    """Talks to chat.postMessage and chat.update."""

    max_batch = 500

    def __init__(
        self,
        config: SlackBotConfig,
        poster: Poster,
        environ: Mapping[str, str],
        writer: MessageWriter,
        notes: DeliveryNotes,
    ) -> None:
        path = f"notify.sinks.{config.name}"
        self.name = config.name
        self.digest_after = config.digest_after
        if not config.channel:
            raise ConfigError(f'{path}.channel: expected the id of a channel, "C0123456789", or its name with #; got none')
        token = read_secret(f"{path}.token", config.token_file, config.token_env, environ)
        if not token:
            raise ConfigError(f"{path}.token: expected token_file or token_env, which says where the token is; got neither")
        self._url = check_url(config.api_url, f"{path}.api_url").rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json; charset=utf-8"}
        self._channel = config.channel
        self._mention = config.page_mention
        self._poster = poster
        self._writer = writer
        self._notes = notes

    def deliver(self, alerts: Sequence[Alert], now: float) -> Delivery:
        """Post or edit the message of an incident and say in its thread what changed; or post a digest of several."""
        if len(alerts) > 1:
            return self._digest(alerts, now)
        [alert] = alerts
        message, note = self._writer.write(alert), self._noted(alert)
        if note is None:
            return self._open(alert, message, now)
        if not note.is_digest:
            edit = self._call("chat.update", {"channel": note.channel, "ts": note.ts, **self._blocks(alert, message)}, now)
            if edit.outcome == "failed" and error_of(edit) in GONE:
                return self._open(alert, message, now)
            if edit.outcome != "sent" or note.told == alert.key:
                return edit
        return self._reply(alert, message, note, now)

    def _open(self, alert: Alert, message: AlertMessage, now: float) -> Delivery:
        delivery = self._call("chat.postMessage", {"channel": self._channel, **self._blocks(alert, message)}, now)
        self._note([alert], delivery, told=alert.key, fields=_hashes(message))
        return delivery

    def _reply(self, alert: Alert, message: AlertMessage, note: SlackNote, now: float) -> Delivery:
        hashes = _hashes(message)
        news = [
            f"*{escape(name)}*  {escape(text)}"
            for name, text in message.fields
            if name in hashes and hashes[name] != note.fields.get(name)
        ]
        is_loud = alert.is_page or alert.change in LOUD
        lines = [f"{self._mention} " if alert.is_page and self._mention else "", escape(message.summary(400)), *news]
        body = {
            "channel": note.channel, "thread_ts": note.ts, "text": clip("\n".join(filter(None, lines)), MAX_SECTION),
            "reply_broadcast": is_loud, "unfurl_links": False,
        }  # fmt: skip
        delivery = self._call("chat.postMessage", body, now)
        if delivery.outcome == "failed" and error_of(delivery) in GONE:
            return self._open(alert, message, now)
        if delivery.outcome == "sent":
            self._write(alert, msgspec.structs.replace(note, told=alert.key, fields=hashes))
        return delivery

    def _digest(self, alerts: Sequence[Alert], now: float) -> Delivery:
        body = {"channel": self._channel, **digest_blocks(alerts, self._writer, self._mention)}
        delivery = self._call("chat.postMessage", body, now)
        if delivery.outcome == "sent":
            known = {alert.key: note for alert in alerts if (note := self._noted(alert)) is not None}
            self._note([alert for alert in alerts if alert.key not in known], delivery, is_digest=True)
            for alert in [one for one in worst_first(alerts) if one.key in known][:MAX_EDITS]:
                self._refresh(alert, known[alert.key], now)
        return delivery

    def _refresh(self, alert: Alert, note: SlackNote, now: float) -> None:
        """Have the message of an incident say what the digest says of it. It is news no more: what fails stays as it was."""
        if note.is_digest:
            return
        message = self._writer.write(alert)
        body = {"channel": note.channel, "ts": note.ts, **self._blocks(alert, message)}
        if self._call("chat.update", body, now).outcome == "sent":
            self._write(alert, msgspec.structs.replace(note, told=alert.key, fields=_hashes(message)))

    def _blocks(self, alert: Alert, message: AlertMessage) -> dict[str, Any]:
        return {**message_blocks(alert, message, self._mention), "unfurl_links": False}

    def _noted(self, alert: Alert) -> SlackNote | None:
        text = self._notes.read(self.name, alert.incident.run, alert.incident.id)
        try:
            return msgspec.json.decode(text, type=SlackNote) if text else None
        except MALFORMED:
            return None

    def _note(
        self,
        alerts: Sequence[Alert],
        delivery: Delivery,
        *,
        told: str = "",
        is_digest: bool = False,
        fields: dict[str, str] | None = None,
    ) -> None:
        """Keep where a message is that was posted now."""
        try:
            posted = msgspec.json.decode(delivery.answer, type=_Posted)
        except MALFORMED:
            return
        if delivery.outcome == "sent" and posted.ts:
            channel = posted.channel or self._channel
            note = SlackNote(channel=channel, ts=posted.ts, told=told, is_digest=is_digest, fields=fields or {})
            for alert in alerts:
                self._write(alert, note)

    def _write(self, alert: Alert, note: SlackNote) -> None:
        self._notes.write(self.name, alert.incident.run, alert.incident.id, msgspec.json.encode(note).decode())

    def _call(self, method: str, body: dict[str, Any], now: float) -> Delivery:
        """Return what became of a call: Slack says 200 to errors, too."""
        delivery = self._poster.post(f"{self._url}/{method}", msgspec.json.encode(body), self._headers, now)
        error = error_of(delivery) if delivery.outcome == "sent" else ""
        if not error:
            return delivery
        outcome = "retry" if error in LATER else "failed"
        return msgspec.structs.replace(delivery, outcome=outcome, detail=f"{host_of(self._url)}: {method}: {error}")


class _Posted(msgspec.Struct):
    ok: bool = False
    error: str = ""
    channel: str = ""
    ts: str = ""


def error_of(delivery: Delivery) -> str:
    """Return the error that an answer of the Web API names; empty: it went well."""
    try:
        posted = msgspec.json.decode(delivery.answer, type=_Posted)
    except MALFORMED:
        return "the answer is not JSON of Slack"
    return "" if posted.ok else posted.error[:100] or "it says no, and not why"


def _hashes(message: AlertMessage) -> dict[str, str]:
    return {
        name: hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()
        for name, text in message.fields
        if name not in SILENT_FIELDS
    }
