import re

import msgspec
import pytest

from sentinel.control.policy import ControlConfig
from sentinel.report.alert import CHANGES, RouteConfig
from sentinel.report.metrics import OUTCOMES
from sentinel.report.sinks.alertmanager import AlertmanagerConfig
from sentinel.report.sinks.console import ConsoleConfig
from sentinel.report.sinks.slack import SlackConfig
from sentinel.report.sinks.table import NotifyConfig
from sentinel.report.sinks.webhook import WebhookConfig


@pytest.fixture
def text(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize(
    "config",
    [NotifyConfig, RouteConfig, SlackConfig, AlertmanagerConfig, WebhookConfig, ConsoleConfig, ControlConfig],
)
def test_every_field_is_in_the_docs(text, config):
    named = set(re.findall(r"`(\w+)`", text))

    assert [field for field in config.__struct_fields__ if field not in named] == []


def test_every_word_that_counts_is_in_the_docs(text):
    named = set(re.findall(r"`(\w+)`", text))

    assert set(CHANGES) | set(OUTCOMES) <= named


def test_the_example_is_a_configuration(text):
    (block,) = re.findall(r"```yaml\n(notify:.*?)```", text, re.DOTALL)

    notify = msgspec.convert(msgspec.yaml.decode(block)["notify"], NotifyConfig)

    assert [sink.name for sink in notify.sinks] == ["slack", "alertmanager", "webhook", "console"]
