"""The daemon's log: one line an event, whatever names are in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from sentinel.cli.log_lines import begin_log

HOSTILE = "a\x1b[31m\r\u202eb\nERROR forged"


@pytest.fixture(autouse=True)
def _former_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_has_the_fields_of_an_event_and_one_line_an_event() -> None:
    stream = io.StringIO()
    begin_log(stream, "json", "info")

    logging.getLogger("sentinel.daemon").info("run %s: x", HOSTILE, extra={"fields": {"event": "run.x", "run": HOSTILE}})
    logging.getLogger("sentinel.daemon").debug("not this")

    [line] = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["level"], event["logger"], event["event"]) == ("info", "sentinel.daemon", "run.x")
    assert event["run"].isprintable() and event["message"] == f"run {event['run']}: x"
    assert event["time"].endswith("+00:00")


def test_json_has_the_text_of_an_exception() -> None:
    stream = io.StringIO()
    begin_log(stream, "json", "warning")

    try:
        raise ValueError("never seen")
    except ValueError:
        logging.getLogger("sentinel").exception("it failed")

    [line] = stream.getvalue().splitlines()
    assert "ValueError: never seen" in json.loads(line)["exception"]


def test_the_console_shows_no_control_character() -> None:
    stream = io.StringIO()
    begin_log(stream, "console", "error")

    logging.getLogger("sentinel").error("run %s", "a\x1b[31m\rb")
    logging.getLogger("sentinel").warning("not this")

    assert stream.getvalue().endswith("ERROR sentinel: run a\\u001b[31m\\rb\n")
