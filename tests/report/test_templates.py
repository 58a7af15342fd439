"""Texts of the user's own: what they may say, what is refused and where, and that none takes long or loses a message."""

from __future__ import annotations

import io
import json
import logging
import time

import msgspec
import pytest

from sentinel.daemon.config_check import check_daemon_config
from sentinel.errors import ConfigError
from sentinel.report.message import message_of
from sentinel.report.sample_alert import sample_alert
from sentinel.report.sinks.delivery import SinkParts
from sentinel.report.sinks.slack import SlackConfig
from sentinel.report.sinks.slack_blocks import escape
from sentinel.report.templates import MAX_TEXT, NAMES, CompiledTemplates, MessageTemplates, TemplateFailure

ALERT = sample_alert("s", 1_780_000_000.0)
ALL = "{% for f in fields %}{{ f.name }}={{ f.text }}\n{% endfor %}" + " ".join(f"{{{{ {name} }}}}" for name in NAMES)


def filled(body="", headline="", alert=ALERT, escaped=str):
    compiled = CompiledTemplates(MessageTemplates(headline=headline, body=body), "notify.sinks.s", escaped)
    return compiled.applied(message_of(alert), alert)


def test_every_name_has_a_value_and_the_text_is_what_is_told():
    message = filled(ALL, "{{ severity|upper }} {{ run }}\n on {{ host }}")

    assert message.headline(100) == message.summary(100) == "CRITICAL notify-test on node17"
    assert "what to do=nothing, this is a test" in message.body
    assert message.fields_under(message.headline()) == message.fields


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("a\n{{ runn }}", 'line 2 of the template: unknown name "runn"; did you mean "run"?'),
        ("{{ run|uper }}", 'line 1 of the template: unknown filter "uper"; did you mean "upper"?'),
        ("{{ what" + "|replace('N', 'NN')" * 300 + " }}", "it nests too deep"),
        ("{{ " + "(" * 3000 + "run" + ")" * 3000 + " }}", "it nests too deep"),
        ("{% if run %}", "line 1 of the template: Unexpected end of template"),
        ("{{ run.upper() }}", "line 1 of the template: call is not allowed; there are names, filters, if and for"),
        ("{% for n in range(9) %}{% endfor %}", "a loop goes over one of runs, ranks, detectors, reasons, machines, fields"),
        ("{{ 'a' * 10000000000 }}", "line 1 of the template: mul is not allowed"),
        ("{{ 9**9**9 }}", "pow is not allowed"),
        ("{{ '%1000000000d' % 1 }}", "mod is not allowed"),
        ("{% set a = run ~ run %}", "assign is not allowed"),
        ("{% macro m() %}{{ m() }}{% endmacro %}", "macro is not allowed"),
        ("{% include '/etc/passwd' %}", "include is not allowed"),
        (
            "{% for a in ranks %}{% for b in ranks %}{% for c in ranks %}{% endfor %}{% endfor %}{% endfor %}",
            "at most 2 loops",
        ),
        ("{% for a in ranks recursive %}{% endfor %}", "at most 2 loops"),
        ("{% for c in what %}{% endfor %}", "a loop goes over one of"),
        ("x" * 8193, "expected at most 8192 characters, got 8193"),
    ],
)
def test_what_is_no_message_is_refused_where_it_stands(body, said):
    with pytest.raises(ConfigError) as error:
        filled(body)

    assert str(error.value).startswith("notify.sinks.s.templates.body: ") and said in str(error.value)


@pytest.mark.parametrize(
    "body", ["{{ run.__class__.__mro__ }}", "{{ ranks.append }}{{ labels._x }}", "{{ labels.nothing }}"]
)
def test_nothing_of_python_is_reached(body):
    try:
        text = filled(body).body
    except TemplateFailure as error:
        text = str(error)

    assert "<class" not in text and "0x" not in text


def test_what_may_be_missing_can_be_said_to_be():
    assert filled('{{ labels.cluster|default("-") }}').body == "-"
    with pytest.raises(TemplateFailure, match='where it may be missing write \\|default\\(""\\)'):
        filled("{{ labels.cluster }}")


def test_no_template_takes_long_or_says_more_than_a_message():
    doubling = "{{ what" + "|replace('N', 'NN')" * 30 + " }}"
    loops = "{% for a in fields %}{% for b in fields %}{{ a.text }}{{ b.text }}{% endfor %}{% endfor %}"
    began = time.process_time()

    assert len(filled(doubling).body) <= MAX_TEXT and len(filled(loops).body) <= MAX_TEXT
    assert time.process_time() - began < 20.0, "without bounds neither would end"


def test_values_are_escaped_and_what_the_template_says_is_not():
    evil = msgspec.structs.replace(ALERT, incident=msgspec.structs.replace(ALERT.incident, title="<!channel>\x1b[2J"))
    body = filled("<!here> *{{ what }}*", alert=evil, escaped=escape).body

    assert body.startswith(r"<!here> *&lt;!channel&gt;\u001b[2J")


def test_a_template_that_fails_on_the_day_loses_no_message(caplog):
    config = SlackConfig(url_env="U", templates=MessageTemplates(body="{{ labels.cluster }}"))
    sink = config.build(SinkParts(environ={"U": "https://h"}, stream=io.StringIO()))

    with caplog.at_level(logging.WARNING, "sentinel.notify"):
        text = json.dumps(sink.form.message(ALERT))

    assert "what to do" in text
    assert "notify.sinks.slack.templates.body" in caplog.text and "the usual text is sent" in caplog.text


def test_check_config_names_the_line_of_a_template(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text(
        "notify:\n  sinks:\n  - type: console\n    templates:\n      body: |\n        {{ run }}\n        {{ detektors }}\n"
        "  - type: console\n    name: other\n    templates:\n      headline: '{{ labels.cluster }}'\n"
    )

    found = check_daemon_config(path, {}, ())

    ((line, message),) = [(one.line, one.message) for one in found.problems]
    assert line == 5 and message.startswith("notify.sinks.console.templates.body: line 2 of the template: ")
    assert message.endswith('unknown name "detektors"; did you mean "detectors"?')
    ((line, message),) = [(one.line, one.message) for one in found.warnings]
    assert line == 11 and message.startswith("notify.sinks.other.templates.headline: ") and "default" in message
