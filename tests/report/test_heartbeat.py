import pytest

from sentinel.errors import ConfigError
from sentinel.report.heartbeat import HeartbeatConfig, HeartbeatSender
from sentinel.report.sinks.delivery import SENT, Delivery, HttpPoster

from ..support.servers import Receiver
from ..support.waiting import wait_for


class ScriptedPoster:
    def __init__(self, *answers):
        self.answers, self.urls = list(answers), []

    def post(self, url, body, headers, now):
        self.urls.append(url)
        return self.answers.pop(0)


def test_a_call_that_is_taken_is_counted_and_no_problem():
    beat = HeartbeatSender("http://h/secret", 60.0, ScriptedPoster(SENT), lambda: True)

    beat.beat(5.0)

    assert (beat.counts, beat.problem, beat.last_taken) == ({"sent": 1, "failed": 0}, "", 5.0)


def test_a_call_that_fails_is_a_problem_until_one_is_taken():
    poster = ScriptedPoster(Delivery(outcome="retry", detail="http://h: connection refused"), SENT)
    beat = HeartbeatSender("http://h/secret", 60.0, poster, lambda: True)

    beat.beat(5.0)
    failed = beat.problem
    beat.beat(6.0)

    assert failed == "http://h: connection refused"
    assert (beat.counts, beat.problem, beat.last_taken) == ({"sent": 1, "failed": 1}, "", 6.0)


def test_a_daemon_that_does_not_do_its_work_is_silent():
    poster = ScriptedPoster()
    beat = HeartbeatSender("http://h", 60.0, poster, lambda: False)

    beat.beat(5.0)

    assert poster.urls == [] and beat.counts == {"sent": 0, "failed": 0}


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_real_server_is_called_by_the_method_that_is_configured(method):
    called = []

    def page():
        called.append("GET")
        return b"", "text/plain"

    with Receiver(page=page).running() as receiver:
        beat = HeartbeatSender(receiver.url, 3600.0, HttpPoster(method=method), lambda: True)
        beat.beat(1.0)

    assert (called, len(receiver.received)) == ((["GET"], 0) if method == "GET" else ([], 1))
    assert beat.counts["sent"] == 1, beat.problem


def test_the_thread_calls_at_once_and_ends():
    poster = ScriptedPoster(SENT)
    beat = HeartbeatSender("http://h", 3600.0, poster, lambda: True)

    beat.start()
    wait_for(lambda: beat.counts["sent"] == 1)
    beat.close()

    wait_for(lambda: not beat._thread.is_alive())


def test_nothing_is_called_without_an_address():
    assert HeartbeatConfig().address({}) == ""
    assert HeartbeatConfig(url_env="BEAT").address({"BEAT": "https://h/x"}) == "https://h/x"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "PUT"}, "heartbeat.method must be POST or GET, got 'PUT'"),
        ({"interval_s": 0.5}, "heartbeat.interval_s must be at least 1"),
        ({"interval_s": float("nan")}, "heartbeat.interval_s must be"),
        ({"timeout_s": 0}, "heartbeat.timeout_s must be above 0"),
        ({"url": "http://h", "url_env": "X"}, "heartbeat.url must be given once"),
    ],
)
def test_nonsense_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        HeartbeatConfig(**fields)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (HeartbeatConfig(url="healthchecks"), "heartbeat.url must be an http or https address"),
        (HeartbeatConfig(url_env="GONE"), "heartbeat.url_env: expected the environment variable GONE"),
    ],
)
def test_an_address_that_is_none_is_an_error_at_the_start(config, words):
    with pytest.raises(ConfigError, match=words):
        config.address({})
