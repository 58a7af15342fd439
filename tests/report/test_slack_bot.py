"""Slack by a bot's token: one message an incident, whatever happens to it, and a thread of what changed."""

from __future__ import annotations

import io

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.daemon.run_notes import MAX_NOTES, RunNotes
from sentinel.errors import ConfigError
from sentinel.report.alert import RouteConfig, alerts_for
from sentinel.report.sinks.delivery import NotesInMemory, SinkParts
from sentinel.report.sinks.slack_bot import SlackBotConfig, SlackBotSink
from sentinel.store.journal import Journal

from ..support.anomalies import an_incident
from ..support.slack_server import TOKEN, FakeSlack

CONFIG = SlackBotConfig(token_env="T", channel="#oncall", page_mention="<!here>")
HISTORY = [
    an_incident(severity=Severity.CRITICAL),
    an_incident(revision=2, severity=Severity.CRITICAL, paged=True),
    an_incident(revision=3, severity=Severity.CRITICAL, paged=True, module="blocks.3.mlp"),
    an_incident(revision=4, severity=Severity.CRITICAL, paged=True, module="blocks.3.mlp", state="resolved"),
]


def alerts_of(*history):
    pairs = zip([None, *history], history, strict=False)
    return [one for before, after in pairs for one in alerts_for(before, after, [("slack-bot", RouteConfig())], 9.0)]


def a_bot(slack, notes=None, config=CONFIG):
    sink = config.build(SinkParts(environ={"T": TOKEN}, stream=io.StringIO()))
    assert isinstance(sink, SlackBotSink)
    sink._poster, sink._notes = slack, notes or NotesInMemory()
    return sink


def texts_of(slack):
    return [one["text"] for one in slack.messages.values()]


def test_an_incident_is_one_message_that_is_edited_and_a_thread_says_what_changed():
    slack = FakeSlack()
    bot = a_bot(slack)

    for alert in alerts_of(*HISTORY):
        assert bot.deliver([alert], 9.0).outcome == "sent"

    assert texts_of(slack) == ["CRITICAL resolved: run r: NaN in blocks.3, step 7"]
    raised, refined, resolved = slack.replies
    assert raised["text"].startswith("<!here> \nnow CRITICAL: run r") and raised["reply_broadcast"]
    assert "*module*  blocks.3.mlp" in refined["text"] and not refined["reply_broadcast"]
    assert "*now*  resolved" in resolved["text"] and "module" not in resolved["text"], "only what changed"


def test_a_restart_edits_the_same_message(tmp_path):
    slack, alerts = FakeSlack(), alerts_of(*HISTORY)
    for alert in alerts:
        journal = Journal(tmp_path / "journal.sqlite")
        a_bot(slack, RunNotes(lambda run, journal=journal: journal.values)).deliver([alert], 9.0)
        journal.close()

    assert len(slack.messages) == 1 and len(slack.replies) == len(alerts) - 1


def test_what_came_once_already_is_not_said_twice_in_the_thread():
    slack, (opened, raised, *_) = FakeSlack(), alerts_of(*HISTORY)
    bot = a_bot(slack)

    for alert in (opened, opened, raised, msgspec.structs.replace(raised, repeated=True)):
        assert bot.deliver([alert], 9.0).outcome == "sent"

    assert len(slack.messages) == len(slack.replies) == 1


@pytest.mark.parametrize("error", ["message_not_found", "cant_update_message", "edit_window_closed"])
def test_a_message_that_somebody_deleted_is_posted_anew(error):
    slack, (opened, raised, *_) = FakeSlack(), alerts_of(*HISTORY)
    bot = a_bot(slack)
    bot.deliver([opened], 9.0)
    slack.errors = [error]

    assert bot.deliver([raised], 9.0).outcome == "sent"
    assert len(slack.messages) == 2 and texts_of(slack)[-1].startswith("now CRITICAL")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [("ratelimited", "retry"), ("internal_error", "retry"), ("not_in_channel", "failed"), ("token_revoked", "failed")],
)
def test_errors_that_slack_answers_with_200_are_told(error, outcome):
    slack = FakeSlack()
    slack.errors = [error]

    delivery = a_bot(slack).deliver([alerts_of(*HISTORY)[0]], 9.0)

    assert (delivery.outcome, delivery.detail) == (outcome, f"https://slack.com: chat.postMessage: {error}")


def test_a_thread_that_failed_is_tried_again_and_the_edit_with_it():
    slack, (opened, raised, *_) = FakeSlack(), alerts_of(*HISTORY)
    bot = a_bot(slack)
    bot.deliver([opened], 9.0)
    slack.errors = ["", "ratelimited"]

    assert bot.deliver([raised], 9.0).outcome == "retry"
    assert bot.deliver([raised], 9.0).outcome == "sent"
    assert len(slack.messages) == len(slack.replies) == 1


def test_news_of_an_incident_of_a_digest_is_said_in_the_thread_of_the_digest():
    slack = FakeSlack()
    bot = a_bot(slack)
    many = [alerts_of(an_incident(n, severity=Severity.CRITICAL))[0] for n in range(8)]
    bot.deliver(many, 9.0)
    over = an_incident(3, revision=2, severity=Severity.CRITICAL, state="resolved")

    bot.deliver([alerts_of(many[3].incident, over)[-1]], 9.0)

    assert texts_of(slack) == ["8 alerts at once in run r"], "it is not edited into one of them"
    assert [one["text"].splitlines()[0] for one in slack.replies] == ["CRITICAL resolved: run r: NaN in blocks.3, step 7"]


def test_a_message_says_what_a_digest_said_of_its_incident():
    slack = FakeSlack()
    bot = a_bot(slack)
    alerts = [alerts_of(an_incident(n, severity=Severity.CRITICAL))[0] for n in range(8)]
    bot.deliver(alerts[:1], 9.0)
    over = alerts_of(alerts[0].incident, an_incident(0, revision=2, severity=Severity.CRITICAL, state="resolved"))[-1]

    assert bot.deliver([over, *alerts[1:]], 9.0).outcome == "sent"

    assert texts_of(slack) == ["CRITICAL resolved: run r: NaN in blocks.3, step 7", "8 alerts at once in run r"]
    assert slack.replies == []


def test_notes_are_bounded_and_other_daemons_are_believed(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")
    notes = RunNotes(lambda run: journal.values)
    for number in range(MAX_NOTES + 5):
        notes._of("s", "r")[f"i{number}"] = "x"
    notes.write("s", "r", "new", "y")

    assert notes.read("s", "r", "i0") == "" and notes.read("s", "r", "new") == "y"
    RunNotes(lambda run: journal.values).write("s", "r", "new", "z")
    assert notes.read("s", "r", "new") == "y"
    notes.release("r")
    assert notes.read("s", "r", "new") == "z"
    journal.close()
    notes.write("s", "r", "new", "closed")
    assert notes.read("s", "r", "new") == "closed", "what cannot be kept is known until a restart"


def test_what_a_bot_needs_is_asked_for_by_its_path():
    for config, said in [
        (SlackBotConfig(token_env="T"), "notify.sinks.slack-bot.channel: expected the id of a channel"),
        (SlackBotConfig(channel="C1"), "notify.sinks.slack-bot.token: expected token_file or token_env"),
    ]:
        with pytest.raises(ConfigError, match=said):
            config.build(SinkParts(environ={"T": TOKEN}, stream=io.StringIO()))
