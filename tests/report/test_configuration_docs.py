"""docs/configuration.md says which changes are told and what becomes of a notification; its example is a configuration."""

import re

import msgspec
import pytest

from sentinel.report.alert import CHANGES
from sentinel.report.metrics import OUTCOMES
from sentinel.report.sinks.sink_table import NotifyConfig
from sentinel.report.templates import FILTERS, NAMES, CompiledTemplates


@pytest.fixture
def text(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "configuration.md").read_text()


def test_every_word_that_counts_is_in_the_docs(text):
    named = set(re.findall(r"`(\w+)`", text))

    assert set(CHANGES) | set(OUTCOMES) <= named


def test_the_example_is_a_configuration(text):
    (block,) = re.findall(r"```yaml\n(notify:.*?)```", text, re.DOTALL)

    notify = msgspec.convert(msgspec.yaml.decode(block)["notify"], NotifyConfig)

    assert [sink.name for sink in notify.sinks] == ["slack", "alertmanager", "webhook", "console"]


def test_the_names_and_filters_of_templates_are_in_the_docs_and_their_examples_are_configurations(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "notifications.md").read_text()

    for name, meaning in NAMES.items():
        assert f"| `{name}` | {meaning} |" in text
    assert all(f"`{one}`" in text for one in FILTERS)
    for block in re.findall(r"```yaml\n(notify:.*?)```", text, re.DOTALL):
        for sink in msgspec.convert(msgspec.yaml.decode(block)["notify"], NotifyConfig).sinks:
            CompiledTemplates(sink.templates, "p", str)
            assert f"`{sink.__struct_config__.tag}`" in text
