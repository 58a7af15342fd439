"""PagerDuty, e-mail, Discord, Teams and signed webhooks: what each is sent, and that nothing is past its limits."""

from __future__ import annotations

import base64
import email
import email.policy
import hashlib
import hmac
import io
import json
import subprocess

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.incident import IncidentAct
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert import Alert
from sentinel.report.alert_context import AlertContext
from sentinel.report.links import MessageLinks
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks import discord, pagerduty, teams
from sentinel.report.sinks.alertmanager import AlertmanagerConfig, identity
from sentinel.report.sinks.console import ConsoleConfig
from sentinel.report.sinks.delivery import SENT, SinkParts
from sentinel.report.sinks.discord import DiscordForm
from sentinel.report.sinks.mail import EmailConfig
from sentinel.report.sinks.pagerduty import PagerDutyConfig
from sentinel.report.sinks.slack_blocks import digest_blocks, message_blocks
from sentinel.report.sinks.teams import TeamsForm
from sentinel.report.sinks.webhook import WebhookConfig, signature, signing_key

from ..support.anomalies import an_incident
from ..support.servers import need
from ..support.slack_server import is_within_limits

CRITICAL = Severity.CRITICAL
LINKS = MessageLinks(external_url="https://s.example", runbook_url="https://w/{detector}", dashboard_url="https://g/{run}")
WRITER = MessageWriter(LINKS, lambda alert: ["monitoring is on, steps 75 to 94"])
ENVIRON = {"KEY": "k" * 32, "SECRET": "whsec_" + base64.b64encode(b"0" * 24).decode(), "PLAIN": "s3cret"}
MAIL = {"host": "mail.example", "sender": "sentinel@example.org", "to": ("oncall@example.org",)}


class Posted:
    """A poster that keeps what it was given."""

    def __init__(self):
        self.requests = []

    def post(self, url, body, headers, now):
        self.requests.append((url, body, dict(headers)))
        return SENT


def built(config, **changes):
    sink = config.build(SinkParts(environ=ENVIRON, stream=io.StringIO(), links=LINKS, **changes))
    sink._poster = Posted()
    return sink


def an_alert(change="opened", *, was=None, **fields):
    incident = an_incident(**{"severity": CRITICAL, "detectors": ("AnomalyNan",), "ranks": (3,), **fields})
    context = AlertContext(opened=1_780_000_000.0, ranks=(RankIdentity(rank=3, host="node17", gpu="5"),), num_ranks=1)
    key = f"s:{incident.run}:{incident.id}:{incident.revision}"
    return Alert(
        key=key, sink="s", change=change, incident=incident, context=context, was_severity=was, created=1_780_000_060.0
    )


def test_pagerduty_is_told_what_broke_where_and_where_to_look():
    sink = built(PagerDutyConfig(routing_key_env="KEY"))

    sink.deliver([an_alert(module="blocks.3.mlp")], 0.0)

    ((url, body, _),) = sink._poster.requests
    event = json.loads(body)
    assert url == "https://events.pagerduty.com/v2/enqueue"
    assert (event["routing_key"], event["event_action"], event["dedup_key"]) == ("k" * 32, "trigger", "r:i1")
    assert event["payload"]["summary"] == "CRITICAL: run r: NaN in blocks.3, step 7"
    assert {key: event["payload"][key] for key in ("source", "severity", "component", "group", "class", "timestamp")} == {
        "source": "node17", "severity": "critical", "component": "blocks.3.mlp", "group": "r", "class": "AnomalyNan",
        "timestamp": "2026-05-28T20:26:40.000+00:00",
    }  # fmt: skip
    assert event["payload"]["custom_details"]["machines"] == "rank 3: node17, GPU 5"
    assert [link["text"] for link in event["links"]] == ["incident", "runbook", "dashboard"]
    assert event["client_url"] == "https://s.example/incidents/i1?run=r"


@pytest.mark.parametrize(
    ("alert", "action"),
    [
        (an_alert(), "trigger"),
        (an_alert("raised"), "trigger"),
        (an_alert("acknowledged"), "acknowledge"),
        (an_alert("reopened"), "trigger"),
        (an_alert("resolved", state="resolved"), "resolve"),
        (an_alert("closed", state="closed"), "resolve"),
        (an_alert("opened", state="ended", detectors=("RunEnded",)), "trigger"),
    ],
)
def test_an_incident_is_one_of_pagerduty_from_its_opening_to_its_end(alert, action):
    event = built(PagerDutyConfig(routing_key_env="KEY")).event(alert)

    assert (event["event_action"], event["dedup_key"]) == (action, "r:i1")


@pytest.mark.slow
def test_standard_webhooks_are_signed_as_openssl_says():
    need("openssl")
    sink = built(WebhookConfig(url="http://h/x", secret_env="SECRET"))

    sink.deliver([an_alert()], 1_780_000_060.9)

    ((_, body, headers),) = sink._poster.requests
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    command = ["openssl", "dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{(b'0' * 24).hex()}", "-binary"]
    found = subprocess.run(command, input=signed, capture_output=True, check=True).stdout
    assert headers["webhook-timestamp"] == "1780000060"
    assert headers["webhook-signature"] == "v1," + base64.b64encode(found).decode()


def test_a_repeat_has_the_same_id_and_another_message_another_one():
    sink = built(WebhookConfig(url="http://h/x", secret_env="PLAIN"))

    alert, other = an_alert(run="läuft\n"), an_alert(number=2)
    sink.deliver([alert], 1.0)
    sink.deliver([msgspec.structs.replace(alert, repeated=True)], 99.0)
    sink.deliver([alert, other], 1.0)

    first, again, both = (headers["webhook-id"] for _, _, headers in sink._poster.requests)
    assert first == again != both and first.isascii() and first.isprintable()


def test_a_signature_is_of_id_time_and_body():
    key = signing_key("p", "s3cret")
    whole = signature(key, "msg_1", "7", b"{}")

    assert whole == "v1," + base64.b64encode(hmac.new(b"s3cret", b"msg_1.7.{}", hashlib.sha256).digest()).decode()
    assert len({whole, signature(key, "msg_2", "7", b"{}"), signature(key, "msg_1", "8", b"{}")}) == 3
    with pytest.raises(ConfigError, match="p: expected base64 behind whsec_"):
        signing_key("p", "whsec_!")


def mail_of(*alerts):
    sink = EmailConfig(**MAIL).build(SinkParts(environ=ENVIRON, stream=io.StringIO(), links=LINKS))
    return email.message_from_bytes(sink.message(alerts, 1_780_000_060.0).as_bytes(), policy=email.policy.default)


def test_mails_about_one_incident_are_a_thread():
    first, again = mail_of(an_alert()), mail_of(an_alert())
    later = mail_of(an_alert("resolved", was=CRITICAL, revision=2, state="resolved"))
    other = mail_of(an_alert(number=2))

    assert first["Message-ID"] == again["Message-ID"], "a repeat is the same message"
    assert later["In-Reply-To"] == later["References"] == first["Message-ID"] != later["Message-ID"]
    assert other["Message-ID"] != first["Message-ID"] and other["References"] is None


def test_a_mail_says_all_of_it_in_plain_text():
    made = mail_of(an_alert(evidence=("suspected x: to do: drain node17",)))

    assert made["Subject"] == "CRITICAL: run r: NaN in blocks.3, step 7"
    assert made["To"] == "oncall@example.org" and made["Auto-Submitted"] == "auto-generated"
    text = made.get_content()
    for said in ("run: r", "machines: rank 3: node17, GPU 5", "what to do: drain node17", "runbook: https://w/AnomalyNan"):
        assert said in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"host": ""}, "notify.sinks.email.host: expected the name of a mail server"),
        ({"to": ()}, "notify.sinks.email.to: expected an address like oncall@example.org, got ''"),
        ({"sender": "a b@c"}, "notify.sinks.email.sender: expected an address"),
        ({"to": ("a@b\r\nBcc: x@y",)}, "notify.sinks.email.to: expected an address"),
        ({"username": "u"}, "notify.sinks.email.username and password_file or password_env: expected both or none"),
        ({"security": "ssl"}, "notify.sinks.email.security must be one of starttls, tls, none, got 'ssl'"),
        ({"security": "none", "username": "u"}, "security must be starttls or tls where a username is given"),
    ],
)
def test_a_mail_server_that_cannot_be_asked_is_refused_by_its_path(changes, said):
    with pytest.raises(ConfigError) as error:
        EmailConfig(**{**MAIL, **changes}).build(SinkParts(environ=ENVIRON, stream=io.StringIO()))

    assert said in str(error.value)


def test_discord_mentions_nobody_unless_it_is_a_page():
    form = DiscordForm(WRITER, "<@&7>")
    quiet = form.message(an_alert(run="@everyone", title="<@1> [x](http://evil)"))
    page = form.message(msgspec.structs.replace(an_alert(), is_page=True))

    assert (quiet["content"], quiet["allowed_mentions"]) == ("", {"parse": []})
    assert page["content"] == "<@&7>" and "roles" in page["allowed_mentions"]["parse"]
    assert "[x](http" not in quiet["embeds"][0]["description"]
    assert "[incident](https://s.example/incidents/i1?run=r)" in page["embeds"][0]["description"]


def test_teams_shows_facts_and_opens_links():
    message = TeamsForm(WRITER).message(an_alert())

    content = message["attachments"][0]["content"]
    assert [one["title"] for one in content["actions"]] == ["incident", "runbook", "dashboard"]
    assert {"title": "machines", "value": "rank 3: node17, GPU 5"} in content["body"][1]["facts"]


EVIL = st.one_of(
    st.sampled_from(
        [
            "\x1b[2J\x07", "a\nb\r\nBcc: x@y", "\0", "x" * 10**6, "<!channel> <@U1>", "**b** _i_ `c` [l](http://e)",
            "<img src=x onerror=alert(1)>", "=cmd()|x", "&" * 5000, "*" * 5000, "\u202e", "\ud800",
            "\U0001f525" * 5000, '"' * 5000,
        ]
    ),
    st.text(max_size=300),
)  # fmt: skip


@st.composite
def hostile_alerts(draw):
    def text():
        return draw(EVIL)

    incident = an_incident(
        run="good-run" + text(), title=text(), root_name=text(), module=text(), segment=text(), suspected=text(),
        severity=draw(st.sampled_from(list(Severity))), detectors=(text(),) * 20, ranks=tuple(range(30)),
        evidence=(f"suspected x: {text()}", f"suspected x: to do: drain it {text()}", text()) * 4,
        acts=(IncidentAct(incident="i", act=text(), who=text(), why=text()),), skip_steps=tuple(range(99)),
    )  # fmt: skip
    ranks = tuple(RankIdentity(rank=n, host=text(), pod=text(), gpu=text()) for n in range(4))
    context = AlertContext(opened=1e9, ranks=ranks, num_ranks=3000, job=text(), labels={"team": text()})
    return Alert(key=text(), sink="s", change="opened", incident=incident, context=context, is_page=True, created=1e9)


@settings(max_examples=15, deadline=None)
@given(st.lists(hostile_alerts(), min_size=1, max_size=3))
def test_no_name_breaks_a_limit_or_a_form_and_the_run_is_always_named(alerts):
    alert = alerts[0]
    message = WRITER.write(alert)

    slack = message_blocks(alert, message, "<!here>")
    assert is_within_limits(slack) and is_within_limits(digest_blocks(alerts, WRITER, "<!here>"))
    assert "good-run" in slack["blocks"][0]["text"]["text"] and "good-run" in slack["text"][:80]
    assert "drain it" in json.dumps(slack), "what to do is never cut off"
    assert "<!channel>" not in json.dumps(slack["blocks"][2:]) and "<@U1>" not in json.dumps(slack["blocks"][2:])

    event = built(PagerDutyConfig(routing_key_env="KEY")).event(alert)
    payload = event["payload"]
    assert len(payload["summary"]) <= pagerduty.MAX_SUMMARY and "good-run" in payload["summary"][:80]
    assert len(event["dedup_key"]) <= 255 and len(payload["source"]) <= 255
    assert len(msgspec.json.encode(event)) < 512 * 1024

    for body in (DiscordForm(WRITER, "@here").message(alert), DiscordForm(WRITER).digest(alerts)):
        (embed,) = body["embeds"]
        assert len(embed["title"]) <= discord.MAX_TITLE and len(embed["description"]) <= discord.MAX_DESCRIPTION
        assert sum(len(str(part)) for part in embed.values()) <= 6000
        assert "good" in embed["title"] + embed["description"]
    for body in (TeamsForm(WRITER).message(alert), TeamsForm(WRITER).digest(alerts)):
        assert len(msgspec.json.encode(body)) <= teams.MAX_BYTES and b"good" in msgspec.json.encode(body)

    made = mail_of(*alerts)
    assert "\n" not in made["Subject"] and made["Bcc"] is None and made["To"] == "oncall@example.org"
    assert "good-run" in (made["Subject"] if len(alerts) == 1 else made.get_content())

    sink = built(AlertmanagerConfig(urls=("http://h",)))
    annotations = sink.alert(alert, identity(alert.incident), 1e9)["annotations"]
    assert all(text.isprintable() for text in annotations.values())
    assert all(len(text) <= 1000 for name, text in annotations.items() if not name.endswith("_url"))

    stream = io.StringIO()
    ConsoleConfig().build(SinkParts(environ={}, stream=stream)).deliver(alerts, 0.0)
    assert all(line.isprintable() for line in stream.getvalue().splitlines()) and "good-run" in stream.getvalue()
