import io
import json

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.report.alert import RouteConfig, alerts_for
from sentinel.report.links import MessageLinks
from sentinel.report.message_writer import MessageWriter
from sentinel.report.sinks.alertmanager import AlertmanagerConfig, AlertmanagerSink
from sentinel.report.sinks.console import ConsoleConfig, ConsoleSink
from sentinel.report.sinks.delivery import SENT, Delivery, SinkParts, judge_answer, retry_after
from sentinel.report.sinks.sink_table import NotifyConfig, build_sinks
from sentinel.report.sinks.slack import SlackConfig
from sentinel.report.sinks.slack_blocks import MAX_BLOCKS, MAX_SECTION, MAX_TOTAL, clip, escape
from sentinel.report.sinks.webhook import WebhookConfig, WebhookSink

from ..support.anomalies import an_incident

ENVIRON = {"SLACK": "https://hooks.slack.example/services/T/B/secret", "KEY": "k3y"}


class FakePoster:
    def __init__(self, answers=()):
        self.answers = list(answers)
        self.requests = []

    def post(self, url, body, headers, now):
        self.requests.append((url, body, dict(headers)))
        return self.answers.pop(0) if self.answers else SENT


def on_rank_2(number=1, **changes):
    usual = {
        "opened_step": 71, "last_step": 72, "severity": Severity.CRITICAL, "root": "a",
        "root_name": "blocks.3.mlp activation rank 2", "ranks": (2,), "time": 900.0,
    }  # fmt: skip
    return an_incident(number, **(usual | changes))


def an_alert(sink, before=None, after=None, **changes):
    return alerts_for(before, after or on_rank_2(**changes), [(sink, RouteConfig())], now=1000.0)[0]


WRITER = MessageWriter(MessageLinks(external_url="https://sentinel.example"))


class FakeParts(SinkParts):
    """Parts with a poster that keeps what it was asked to send."""

    def __init__(self, answers=(), **changes):
        usual = {"environ": ENVIRON, "stream": io.StringIO(), "links": MessageLinks(external_url="https://sentinel.example")}
        super().__init__(**(usual | changes))
        object.__setattr__(self, "fake", FakePoster(answers))

    def poster(self, timeout_s):
        return self.fake


def slack(**changes):
    parts = FakeParts()
    return SlackConfig(url_env="SLACK", **changes).build(parts), parts.fake


def characters(message):
    def texts(value):
        if isinstance(value, dict):
            return sum(texts(one) for one in value.values())
        if isinstance(value, list):
            return sum(map(texts, value))
        return len(value) if isinstance(value, str) else 0

    return texts(message)


def test_slack_message_has_text_and_says_where_it_began():
    sink, poster = slack(page_mention="<!here>")

    sink.deliver([an_alert("slack", paged=True)], now=1000.0)

    url, body, _ = poster.requests[0]
    message = json.loads(body)
    assert url == ENVIRON["SLACK"]
    assert message["text"].startswith("CRITICAL: run r: NaN in blocks.3")
    assert "blocks.3.mlp activation rank 2" in body.decode()
    assert "<!here>" in body.decode()
    assert "<https://sentinel.example/incidents/i1?run=r|incident>" in body.decode()


@pytest.mark.parametrize("num_alerts", [1, 2, 60, 500])
def test_slack_messages_stay_within_its_limits(num_alerts):
    sink, poster = slack()
    alerts = [
        an_alert("slack", id=f"i{n}", title="<!channel> & " * 600, root_name="&" * 9000, evidence=("<" * 5000,) * 5)
        for n in range(num_alerts)
    ]

    sink.deliver(alerts, now=1000.0)

    message = json.loads(poster.requests[0][1])
    assert message["text"]
    assert len(message["blocks"]) <= MAX_BLOCKS
    assert characters(message["blocks"]) <= MAX_TOTAL + 1000
    for block in message["blocks"]:
        texts = [block["text"]] if "text" in block else block["elements"]
        for text in texts:
            assert len(text["text"]) <= (150 if text["type"] == "plain_text" else MAX_SECTION)
            assert text["type"] == "plain_text" or "<!channel>" not in text["text"]


def test_a_digest_names_the_worst_and_counts_the_rest():
    sink, _ = slack()
    alerts = [an_alert("slack", id=f"i{n}", severity=Severity.WARNING) for n in range(99)]
    alerts.append(an_alert("slack", id="page", title="the worst", paged=True))

    message = sink.form.digest(alerts)

    assert "100 alerts at once in run r, 1 of them pages" in message["text"]
    assert "the worst" in message["blocks"][1]["text"]["text"]
    assert message["blocks"][-1]["elements"][0]["text"] == "and 60 more"


def test_clip_never_cuts_an_escape_in_two():
    text = escape("<&>" * 20)

    for limit in range(10, len(text)):
        cut = clip(text, limit)
        assert len(cut) <= limit
        assert "&" not in cut.replace("&lt;", "").replace("&gt;", "").replace("&amp;", "")


@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [
        (200, None, ("sent", None)),
        (204, None, ("sent", None)),
        (429, "30", ("retry", 30.0)),
        (429, "Thu, 01 Jan 1970 00:17:40 GMT", ("retry", 60.0)),
        (429, "soon", ("retry", None)),
        (503, "999999", ("retry", 3600.0)),
        (500, None, ("retry", None)),
        (408, None, ("retry", None)),
        (400, None, ("failed", None)),
        (404, "30", ("failed", None)),
        (410, None, ("failed", None)),
        (302, None, ("failed", None)),
    ],
)
def test_answers_are_later_or_never(status, header, expected):
    delivery = judge_answer(status, {"Retry-After": header} if header else {}, "", "http://h", now=1000.0)

    assert (delivery.outcome, delivery.retry_after_s) == expected


def test_retry_after_of_the_past_is_now():
    assert retry_after("Thu, 01 Jan 1970 00:00:01 GMT", 1000.0) == 0.0
    assert retry_after("-5", 1000.0) == 0.0
    assert retry_after("nan", 1000.0) == 0.0


def test_webhook_carries_the_incident_and_what_a_person_reads():
    poster = FakePoster()
    sink = WebhookSink(WebhookConfig(url="http://localhost/x", secret_env="KEY"), poster, ENVIRON, WRITER)
    alert = an_alert("webhook")

    sink.deliver([msgspec.structs.replace(alert, repeated=True)], now=2000.0)

    ((_, body, headers),) = poster.requests
    (sent,) = json.loads(body)["alerts"]
    assert set(headers) == {"webhook-id", "webhook-timestamp", "webhook-signature"}
    assert (sent["key"], sent["repeated"]) == ("webhook:r:i1:1", True)
    assert sent["incident"]["root_name"] == "blocks.3.mlp activation rank 2"
    assert sent["text"] == "CRITICAL: run r: NaN in blocks.3, step 71 (repeated)"
    assert sent["facts"]["ranks"] == "2" and sent["url"] == "https://sentinel.example/incidents/i1?run=r"


def alertmanager_sink(**changes):
    poster = FakePoster(changes.pop("answers", ()))
    return AlertmanagerSink(AlertmanagerConfig(**changes), poster, {}), poster


def posted(poster, number=-1):
    return json.loads(poster.requests[number][1])


def test_alertmanager_labels_hold_nothing_that_changes_by_itself():
    sink, poster = alertmanager_sink(labels={"team": "pretraining"})

    sink.deliver([an_alert("am")], now=1000.0)
    sink.deliver([an_alert("am", revision=2, last_step=99, num_members=7, time=950.0)], now=1010.0)

    first, second = posted(poster, 0), posted(poster, 1)
    assert poster.requests[0][0] == "http://127.0.0.1:9093/api/v2/alerts"
    assert first[0]["labels"] == second[0]["labels"]
    assert first[0]["labels"] == {
        "team": "pretraining", "alertname": "SentinelIncident", "run": "r", "incident": "i1",
        "severity": "critical", "page": "no",
    }  # fmt: skip
    assert "71" in first[0]["annotations"]["steps"]


def test_alertmanager_hears_of_open_incidents_again_and_they_end_by_themselves():
    sink, poster = alertmanager_sink(resend_interval_s=10.0, resolve_after_s=40.0)
    sink.deliver([an_alert("am")], now=1000.0)

    assert sink.keep_alive(1005.0) == (None, 1010.0)
    delivery, due = sink.keep_alive(1010.0)

    assert (delivery.outcome, due) == ("sent", 1020.0)
    assert posted(poster)[0]["endsAt"] == "1970-01-01T00:17:30.000Z"


def test_an_absence_of_the_daemon_resolves_nothing_for_a_day():
    sink, poster = alertmanager_sink()

    sink.deliver([an_alert("am")], now=1000.0)

    assert posted(poster)[0]["endsAt"] == "1970-01-02T00:16:40.000Z"
    with pytest.raises(ConfigError, match="resolve_after_s must be at least 4 times resend_interval_s \\(240\\), got 239"):
        alertmanager_sink(resolve_after_s=239.0)


def test_what_is_open_in_a_run_that_another_daemon_serves_is_not_sent_again():
    sink, poster = alertmanager_sink()
    sink.restore([an_alert("am")])

    sink.release("r")

    assert sink.keep_alive(1.0) == (None, None) and not poster.requests


def test_alertmanager_is_told_of_the_end_and_then_no_more():
    sink, poster = alertmanager_sink()
    sink.deliver([an_alert("am")], now=1000.0)
    closed = an_alert("am", before=on_rank_2(), after=on_rank_2(revision=2, state="resolved"))

    sink.deliver([closed], now=1030.0)

    assert posted(poster)[0]["endsAt"] == "1970-01-01T00:17:10.000Z"
    assert posted(poster)[0]["annotations"]["resolution"] == "resolved"
    assert sink.keep_alive(5000.0) == (None, None)


def test_alertmanager_keeps_the_end_of_a_run_for_an_hour_and_nothing_keeps_it_alive():
    sink, poster = alertmanager_sink()
    died = an_alert("am", after=on_rank_2(state="ended", detectors=("RunEnded",)))

    sink.deliver([died], now=1000.0)

    (alert,) = posted(poster)
    assert alert["endsAt"] == "1970-01-01T01:16:40.000Z", "resolved at once, nobody would be told of it"
    assert "resolution" not in alert["annotations"]
    assert sink.keep_alive(5000.0) == (None, None)


def test_alertmanager_resolves_what_a_run_left_open_with_its_end():
    sink, poster = alertmanager_sink()
    sink.deliver([an_alert("am")], now=1000.0)

    sink.deliver([an_alert("am", before=on_rank_2(), after=on_rank_2(revision=2, state="ended"))], now=1030.0)

    assert posted(poster)[0]["endsAt"] == "1970-01-01T00:17:10.000Z"
    assert posted(poster)[0]["annotations"]["resolution"] == "ended"


def test_a_raised_severity_takes_the_old_labels_back():
    sink, poster = alertmanager_sink()
    mild = on_rank_2(severity=Severity.WARNING)
    sink.deliver([an_alert("am", after=mild)], now=1000.0)

    sink.deliver([an_alert("am", before=mild, after=on_rank_2(revision=2, paged=True))], now=1005.0)

    old, new = posted(poster)
    assert (old["labels"]["severity"], old["labels"]["page"], old["annotations"]["resolution"]) == (
        "warning", "no", "relabelled",
    )  # fmt: skip
    assert old["endsAt"] == "1970-01-01T00:16:45.000Z"
    assert (new["labels"]["severity"], new["labels"]["page"]) == ("critical", "yes")
    assert "resolution" not in new["annotations"]


def test_a_failed_keep_alive_is_tried_again_soon():
    sink, _ = alertmanager_sink(answers=[SENT, Delivery(outcome="retry")])
    sink.deliver([an_alert("am")], now=1000.0)

    delivery, due = sink.keep_alive(1060.0)

    assert (delivery.outcome, due) == ("retry", 1065.0)


def test_one_peer_that_answers_is_enough():
    sink, poster = alertmanager_sink(urls=("http://a:1", "http://b:2/prefix/"), answers=[Delivery(outcome="retry"), SENT])

    delivery = sink.deliver([an_alert("am")], now=1000.0)

    assert delivery.outcome == "sent"
    assert [url for url, _, _ in poster.requests] == ["http://a:1/api/v2/alerts", "http://b:2/prefix/api/v2/alerts"]


def test_after_a_restart_what_stands_is_sent_at_once():
    sink, poster = alertmanager_sink()

    sink.restore([an_alert("am")])
    delivery, _ = sink.keep_alive(1.0)

    assert delivery.outcome == "sent"
    assert posted(poster)[0]["labels"]["incident"] == "i1"


def test_the_console_prints_a_line_without_control_characters():
    stream = io.StringIO()

    ConsoleSink(ConsoleConfig(), stream).deliver([an_alert("console", title="a\x1b[2J\nb")], now=0.0)

    assert stream.getvalue().splitlines()[0] == r"sentinel: CRITICAL: run r: a\u001b[2J\nb, step 71"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{sinks: [{type: slack, url_env: NOPE}]}", "NOPE"),
        ("{sinks: [{type: slack}]}", "notify.sinks.slack.url: expected url_file or url_env"),
        ("{sinks: [{type: slack, url_env: SLACK, url_file: /x}]}", "got both"),
        ("{sinks: [{type: webhook, url: 'file:///etc/passwd'}]}", "notify.sinks.webhook.url"),
        ("{sinks: [{type: webhook, url: 'http://a'}, {type: webhook, url: 'http://b'}]}", "every name once"),
        ("{sinks: [{type: alertmanager, labels: {run: x}}]}", "must not set run"),
        ("{sinks: [{type: alertmanager, resend_interval_s: 0.1}]}", r"\[1, 3600\], got 0.1"),
        ("{sinks: [{type: console}], retry_s: 0}", "notify.retry_s"),
        ("{sinks: [{type: webhook, url: 'http://a', rate_per_s: 0}]}", "rate_per_s must be above 0 and finite, got 0"),
    ],
)
def test_nonsense_is_refused_by_its_path(text, message):
    with pytest.raises((ConfigError, msgspec.ValidationError), match=message):
        build_sinks(msgspec.yaml.decode(text, type=NotifyConfig), ENVIRON, io.StringIO())


@pytest.mark.parametrize("text", ["{sinkz: []}", "{sinks: [{type: slack, url: 'http://a'}]}", "{sinks: [{type: smoke}]}"])
def test_unknown_keys_are_refused(text):
    with pytest.raises(msgspec.ValidationError):
        msgspec.yaml.decode(text, type=NotifyConfig)


def test_all_sinks_are_built_from_yaml(tmp_path):
    (tmp_path / "url").write_text("https://hooks.slack.example/x\n")
    text = f"""
    external_url: https://sentinel.example
    sinks:
      - {{type: slack, url_file: {tmp_path}/url}}
      - {{type: alertmanager, urls: ["http://127.0.0.1:9093"]}}
      - {{type: webhook, url: "http://127.0.0.1:1/hook", secret_env: KEY}}
      - {{type: console, route: {{min_severity: info}}}}
    """

    notify = msgspec.yaml.decode(text, type=NotifyConfig)

    assert [sink.name for sink in build_sinks(notify, ENVIRON, io.StringIO())] == [
        "slack", "alertmanager", "webhook", "console",
    ]  # fmt: skip
    assert [route.min_severity for _, route in notify.routes()] == [
        Severity.CRITICAL, Severity.WARNING, Severity.WARNING, Severity.INFO,
    ]  # fmt: skip
