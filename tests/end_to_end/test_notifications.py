"""Notifications over real HTTP, to a receiver that misbehaves, through a real Alertmanager, and across kill -9."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from sentinel.anomaly import Severity
from sentinel.report.alert import RouteConfig, alerts_for
from sentinel.report.backoff import RetryPolicy
from sentinel.report.notifier import Notifier
from sentinel.report.outbox import MemoryOutbox
from sentinel.report.pipeline import SinkWorker
from sentinel.report.sinks.alertmanager import AlertmanagerConfig, AlertmanagerSink
from sentinel.report.sinks.delivery import HttpPoster
from sentinel.report.sinks.webhook import WebhookConfig, WebhookSink
from sentinel.store.journal import Commit, Journal
from sentinel.store.outbox_table import Outgoing

from ..support.anomalies import an_incident
from ..support.ports import free_port
from ..support.servers import Receiver, alertmanager, get_json, need
from ..support.waiting import wait_for


def paging(**changes):
    """A critical incident of now that somebody is paged for, unless said."""
    usual = {
        "opened_step": 71, "last_step": 72, "severity": Severity.CRITICAL, "root": "a", "root_name": "blocks.3.mlp",
        "paged": True, "time": time.time(),
    }  # fmt: skip
    return an_incident(**(usual | changes))


def alerts(sink, *history):
    return [
        alert
        for before, after in zip([None, *history], history, strict=False)
        for alert in alerts_for(before, after, [(sink, RouteConfig())], time.time())
    ]


@pytest.fixture
def poster():
    return HttpPoster(timeout_s=3.0)


@pytest.mark.parametrize(
    ("answer", "outcome", "is_unknown"),
    [
        ((200, {}), "sent", False),
        ((202, {}), "sent", False),
        ((429, {"Retry-After": "7"}), "retry", False),
        ((500, {}), "retry", False),
        ((404, {}), "failed", False),
        ((301, {"Location": "http://127.0.0.1:1/"}), "failed", False),
        ("hang", "retry", True),
        ("hang up", "retry", True),
    ],
)
def test_every_way_to_answer(poster, answer, outcome, is_unknown):
    with Receiver([answer]).running() as receiver:
        delivery = poster.post(f"{receiver.url}/secret-path", b"{}", {}, time.time())

        assert (delivery.outcome, delivery.is_unknown) == (outcome, is_unknown)
        assert len(receiver.received) == 1
        assert "secret-path" not in delivery.detail
        assert delivery.retry_after_s == (7.0 if answer[0] == 429 else None)


def test_nobody_listens(poster):
    delivery = poster.post(f"http://127.0.0.1:{free_port()}/secret-path", b"{}", {}, time.time())

    assert (delivery.outcome, delivery.is_unknown) == ("retry", False)
    assert "refused" in delivery.detail
    assert "secret-path" not in delivery.detail


def test_a_host_that_does_not_exist(poster):
    delivery = poster.post("http://no-such-host.invalid/x", b"{}", {}, time.time())

    assert (delivery.outcome, delivery.is_unknown) == ("retry", False)


def test_a_sink_that_misbehaves_hears_each_alert_in_the_end():
    answers = [(500, {}), (429, {"Retry-After": "0.2"}), "hang up", (200, {})]
    with Receiver(answers).running() as receiver:
        outbox = MemoryOutbox()
        sink = WebhookSink(WebhookConfig(url=receiver.url), HttpPoster(timeout_s=30.0), {})
        notifier = Notifier(outbox, [sink], RetryPolicy(retry_s=0.05), clock=time.time)
        notifier.start()
        outbox.add(alerts("webhook", paging()))
        notifier.wake()

        wait_for(lambda: notifier.pending() == {"webhook": 0})
        assert notifier.close()

        assert [body["alerts"][0]["repeated"] for body in receiver.bodies()] == [False, False, False, True]
        assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
        assert notifier.counts()["webhook", "retried"] == 3
        assert notifier.problems() == {}


def test_a_sink_that_hangs_delays_no_other_and_no_judging():
    with Receiver(["hang"] * 10).running() as slow, Receiver().running() as quick:
        outbox = MemoryOutbox()
        sinks = [
            WebhookSink(WebhookConfig(name=name, url=receiver.url), HttpPoster(timeout_s=30.0), {})
            for name, receiver in (("slow", slow), ("quick", quick))
        ]
        notifier = Notifier(outbox, sinks, RetryPolicy(), clock=time.time)
        notifier.start()
        start = time.monotonic()
        outbox.add([*alerts("slow", paging()), *alerts("quick", paging())])
        notifier.wake()
        waking_s = time.monotonic() - start
        wait_for(lambda: quick.received, interval_s=0.002)
        hearing_s = time.monotonic() - start

        assert waking_s < hearing_s < 15.0  # Half of what the other is waited for.
        wait_for(lambda: slow.received, interval_s=0.002)  # Whoever has not begun has nothing to wait for.
        assert not notifier.close(timeout_s=0.2)


CHILD = """
import sys, time
from pathlib import Path
from sentinel.report.notifier import Notifier
from sentinel.report.backoff import RetryPolicy
from sentinel.report.sinks.delivery import HttpPoster
from sentinel.report.sinks.webhook import WebhookConfig, WebhookSink
from sentinel.store.journal import Journal

sink = WebhookSink(WebhookConfig(url=sys.argv[2]), HttpPoster(timeout_s=30.0), {})
Notifier(Journal(Path(sys.argv[1])).outbox, [sink], RetryPolicy(), clock=time.time).start()
time.sleep(60)
"""


def test_kill_9_between_request_and_answer_repeats_once_and_says_so(tmp_path):
    path = tmp_path / "state" / "journal.sqlite"
    journal = Journal(path)
    (alert,) = alerts("webhook", paging())
    journal.commit(Commit(judged=1, outbox=[Outgoing(key=alert.key, topic=alert.topic, body=alert.body)]))
    journal.close()
    with Receiver(["hang"]).running() as receiver:
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CHILD), str(path), receiver.url])
        wait_for(lambda: receiver.received)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()

        journal = Journal(path)
        sink = WebhookSink(WebhookConfig(url=receiver.url), HttpPoster(), {})
        for _ in range(3):
            SinkWorker(journal.outbox, sink, RetryPolicy(), rng=random.Random(0)).turn(time.time())

        assert [body["alerts"][0]["repeated"] for body in receiver.bodies()] == [False, True]
        assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
        assert journal.outbox.num_waiting(alert.topic) == 0
        journal.close()


@pytest.mark.server
def test_alertmanager_tells_once_what_it_hears_three_times_and_then_the_end(tmp_path):
    need("prometheus-alertmanager")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Receiver().running())
        url = stack.enter_context(alertmanager(tmp_path, receiver.url))
        sink = AlertmanagerSink(AlertmanagerConfig(urls=(url,)), HttpPoster(), {})
        grown = [paging(revision=n, last_step=70 + n, num_members=n, title="NaN in blocks.3") for n in (1, 2, 3)]

        for incident in grown:
            assert sink.deliver([alerts("am", incident)[0]], time.time()).outcome == "sent"
        (open_alerts,) = wait_for(lambda: get_json(f"{url}/api/v2/alerts"))
        wait_for(lambda: receiver.received)
        time.sleep(2.5)  # Two group intervals: a second notification would have come.
        assert [body["status"] for body in receiver.bodies()] == ["firing"]
        assert open_alerts["labels"]["incident"] == "i1"

        closed = alerts("am", paging(), paging(revision=4, state="settled"))[-1]
        assert sink.deliver([closed], time.time()).outcome == "sent"
        wait_for(lambda: len(receiver.received) == 2)

        resolved = receiver.bodies()[1]["alerts"]
        assert [(one["status"], one["annotations"]["resolution"]) for one in resolved] == [("resolved", "settled")]
        assert sink.keep_alive(time.time() + 1000.0) == (None, None)


@pytest.mark.server
def test_an_incident_that_gets_worse_is_one_alert_at_a_time(tmp_path):
    need("prometheus-alertmanager")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(Receiver().running())
        url = stack.enter_context(alertmanager(tmp_path, receiver.url))
        sink = AlertmanagerSink(AlertmanagerConfig(urls=(url,)), HttpPoster(), {})
        mild = paging(severity=Severity.WARNING, paged=False)

        for alert in alerts("am", mild, paging(revision=2)):
            assert sink.deliver([alert], time.time()).outcome == "sent"

        def active():
            found = get_json(f"{url}/api/v2/alerts?active=true")
            return [(one["labels"]["severity"], one["labels"]["page"]) for one in found]

        wait_for(lambda: active() == [("critical", "yes")])


@pytest.mark.server
def test_alertmanager_that_is_away_hears_it_when_it_is_back(tmp_path):
    need("prometheus-alertmanager")
    with Receiver().running() as receiver:
        outbox = MemoryOutbox()
        with alertmanager(tmp_path, receiver.url) as url:
            pass
        sink = AlertmanagerSink(AlertmanagerConfig(name="am", urls=(url,)), HttpPoster(timeout_s=1.0), {})
        worker = SinkWorker(outbox, sink, RetryPolicy(), rng=random.Random(0))
        outbox.add(alerts("am", paging()))
        worker.turn(time.time())
        assert worker.counts["retried"] == 1
        assert worker.num_waiting() == 1

        with alertmanager(tmp_path, receiver.url) as back:
            sink._urls = [f"{back}/api/v2/alerts"]
            worker.turn(time.time() + 100.0)
            wait_for(lambda: receiver.received)

        assert worker.counts["sent"] == 1
