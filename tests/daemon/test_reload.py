"""A new configuration for a daemon that runs: a good one takes over whole, a broken one changes nothing."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sentinel.daemon.config import read_config
from sentinel.daemon.daemon import Daemon, ServeOptions
from sentinel.testing import Nan, SyntheticRun

from ..support.servers import Receiver
from ..support.waiting import wait_for


@contextmanager
def reloadable(tmp_path: Path, config: str, *, is_dry_run: bool = False) -> Iterator[tuple[Daemon, Path]]:
    """Yield a daemon of a run that had a NaN, and its configuration's file."""
    run_dir, path = tmp_path / "it", tmp_path / "daemon.yaml"
    source = SyntheticRun(run_dir, layers=2, d_model=8, elements=8).plant(Nan(step=12, module="layers.1"))
    source.write(20)
    run_dir.chmod(0o700)
    path.write_text(config)
    read = functools.partial(read_config, path)
    options = ServeOptions(
        directory=run_dir, http=None, drain_s=2.0, config=read(), config_file=path, read_config=read, is_dry_run=is_dry_run
    )
    one = Daemon(options, {}, io.StringIO())
    thread = threading.Thread(target=one.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentinel.daemon.loop_requests.signal.signal", lambda number, handler: None)
        thread.start()
        try:
            yield one, path
        finally:
            one.stop()
            thread.join(30)
    assert not thread.is_alive()


def webhook(url: str, more: str = "") -> str:
    return f"notify: {{retry_s: 0.05, max_retry_s: 0.1, sinks: [{{type: webhook, name: hook, url: '{url}/'}}]}}\n{more}"


def keys(receiver: Receiver) -> list[str]:
    return [str(headers["webhook-id"]) for headers, _ in receiver.received]


def test_what_waits_for_a_sink_is_sent_once_to_the_one_that_takes_its_place(tmp_path: Path) -> None:
    with Receiver([(503, {})] * 1000).running() as broken, Receiver().running() as whole:
        with reloadable(tmp_path, webhook(broken.url)) as (daemon, path):
            wait_for(lambda: broken.bodies() and daemon.api.health()["problems"], "the first try")
            path.write_text(webhook(whole.url))

            assert daemon.api.reload()["outcome"] == "ok"
            wait_for(lambda: whole.bodies(), "the message")
            num_tries = len(broken.bodies())
            wait_for(lambda: not any(daemon.api._notifying.notifier.pending().values()), "the outbox")
            assert daemon.api.health()["status"] == "ok"

        assert len(keys(whole)) == len(set(keys(whole)))
        assert len(broken.bodies()) == num_tries


BROKEN = {
    "no YAML": ("notify: [", "daemon.yaml:"),
    "an unknown key": ("notiffy: {}", 'did you mean "notify"?'),
    "out of range": ("judging: {late_after_steps: -1}", "daemon.yaml:1: judging.late_after_steps must be at least 0"),
    "a secret that is not there": (
        "notify:\n  sinks:\n  - {type: slack, url_file: /nowhere/secret}\n",
        "notify.sinks.slack.url",
    ),
    "a heartbeat without its secret": ("heartbeat: {url_env: NOT_SET}", "heartbeat.url"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "what"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_configuration_changes_nothing_and_is_said(tmp_path: Path, broken: str, what: str) -> None:
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, path):
        wait_for(lambda: receiver.bodies(), "the message")
        before = daemon.api.health()["config_hash"]
        path.write_text(broken)

        outcome = daemon.api.reload()

        assert outcome["outcome"] == "failed" and what in outcome["problem"]
        health = daemon.api.health()
        assert health["status"] == "degraded" and health["config_hash"] == before
        [problem] = health["problems"]
        assert problem.startswith("config: the former one is in force: ")
        assert b'sentinel_last_reload_successful{what="config"} 0.0' in daemon.api.metrics("text/plain")[0]
        path.write_text(webhook(receiver.url))
        assert daemon.api.reload()["outcome"] == "ok"
        assert daemon.api.health()["status"] == "ok"


def test_limits_routes_and_policies_are_those_of_the_new_file_at_once(tmp_path: Path) -> None:
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, path):
        wait_for(lambda: receiver.bodies(), "the message")
        [run] = daemon._runs
        sink = f"{{type: webhook, name: hook, url: '{receiver.url}/', route: {{min_severity: critical}}}}"
        path.write_text(
            f"notify: {{sinks: [{sink}]}}\n"
            "judging: {late_after_steps: 5, late_after_s: 7.0, max_anomalies_per_step: 9, snapshot_interval_s: 3.0}\n"
            "control: {expires_s: 11.0}\n"
        )

        assert daemon.api.reload()["outcome"] == "ok"

        assert [route.min_severity.value for _, route in run._alerts.routes] == ["critical"]
        closing = run._stages.assembler._closing
        assert (closing._late_after_steps, closing._late_after_s) == (5, 7.0)
        assert (run._stages.judge.max_anomalies, run._snapshots.interval_s) == (9, 3.0)
        assert run.commanding._escalator.config.expires_s == run.commanding._commands.expires_s == 11.0
        [entry] = [one for one in daemon.api.audit(None, limit=5) if "config_hash" in one["details"]]
        assert entry["details"]["config_hash"] == daemon.api.health()["config_hash"]


def test_a_reload_that_changes_nothing_sends_nothing_again(tmp_path: Path) -> None:
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, _):
        wait_for(lambda: receiver.bodies(), "the message")
        wait_for(lambda: not any(daemon.api._notifying.notifier.pending().values()), "the outbox")

        assert [daemon.api.reload()["outcome"] for _ in range(3)] == ["ok"] * 3

    assert len(keys(receiver)) == len(set(keys(receiver)))


def test_a_sink_that_is_new_is_told_of_what_is_open_and_the_others_of_nothing(tmp_path: Path) -> None:
    two = Receiver().running()
    with Receiver().running() as first, two as second, reloadable(tmp_path, webhook(first.url)) as (daemon, path):
        wait_for(lambda: first.bodies(), "the message")
        wait_for(lambda: not any(daemon.api._notifying.notifier.pending().values()), "the outbox")
        before = keys(first)
        path.write_text(webhook(first.url).replace("}]}", f"}}, {{type: webhook, name: new, url: '{second.url}/'}}]}}"))

        assert daemon.api.reload()["outcome"] == "ok"
        wait_for(lambda: second.bodies(), "the message to the new one")
        wait_for(lambda: not any(daemon.api._notifying.notifier.pending().values()), "the outbox")
        assert daemon.api.reload()["outcome"] == "ok"

    assert keys(first) == before and len(keys(second)) == 1

    def incidents(receiver):
        return [alert["incident"]["id"] for body in receiver.bodies() for alert in body["alerts"]]

    assert incidents(second) == incidents(first)[:1]


def test_a_dry_run_decides_everything_and_sends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url), is_dry_run=True) as (daemon, _):
        wait_for(lambda: "dry run: sink hook would be sent: run it: opened, critical" in caplog.text, "the log")
        assert daemon.api.health()["is_dry_run"] is True
        assert daemon.api.reload()["outcome"] == "ok"

    assert receiver.bodies() == []


def test_the_log_names_incidents_deliveries_and_reloads_by_their_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Receiver().running() as receiver, reloadable(tmp_path, webhook(receiver.url)) as (daemon, _):
        wait_for(lambda: receiver.bodies(), "the message")
        assert daemon.api.reload()["outcome"] == "ok"

    events = [fields for record in caplog.records if (fields := getattr(record, "fields", None))]
    by_name = {fields["event"]: fields for fields in events}
    assert {"incident.opened", "alert.sent", "config.reload", "rules.reload"} <= by_name.keys()
    assert by_name["alert.sent"]["incident"] == by_name["incident.opened"]["incident"]
    assert by_name["alert.sent"]["sink"] == "hook" and by_name["alert.sent"]["key"]


def test_a_policy_that_names_no_rule_is_said_at_the_start_and_at_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = "control: {{policies: [{{name: p, rules: [{rule}], action: nothing}}]}}\n"
    words = 'control.policies[0].rules[0]: no rule is called "{}"; did you mean "loss-spike"?'
    with reloadable(tmp_path, policy.format(rule="loss-spik")) as (daemon, path):
        wait_for(lambda: list(daemon._runs), "the run")
        assert words.format("loss-spik") in caplog.messages
        path.write_text(policy.format(rule="loss-spike"))
        assert daemon.api.reload()["outcome"] == "ok"
        caplog.clear()
        assert daemon.api.reload()["outcome"] == "ok"

        assert not [one for one in caplog.messages if "no rule is called" in one]
