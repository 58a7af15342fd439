"""A sink of another package, by entry point: configured, checked and used like ours; a broken one harms who named it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.cli.main import CLEAN, FOUND, run_cli
from sentinel.daemon.config import load_config
from sentinel.errors import ConfigError
from sentinel.report.sample_alert import sample_alert
from sentinel.report.sinks.sink_table import build_sink, build_sinks

pytestmark = pytest.mark.slow  # Packages of others are first imported by a process of their own.

FILE_SINK = """
import msgspec
from sentinel.report.alert import RouteConfig
from sentinel.report.message import headline
from sentinel.report.sinks.delivery import SENT

class FileConfig(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    name: str = "file"
    levels: list[int] = []
    route: RouteConfig = RouteConfig()

    def build(self, parts):
        if self.path == "boom":
            raise OSError("no such disk")
        return FileSink(self)

class FileSink:
    digest_after, max_batch = 0, 1

    def __init__(self, config):
        self.name, self.path = config.name, config.path

    def deliver(self, alerts, now):
        with open(self.path, "a") as file:
            file.writelines(headline(one) + "\\n" for one in alerts)
        return SENT
"""

Offer = Callable[[str], None]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Return what installs a package whose module `file_sink_in_question` offers `FileConfig` as `file`."""

    def install(body: str) -> None:
        info = tmp_path / "packages" / "file_sink-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-sink\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[sentinel.sinks]\nfile = file_sink_in_question:FileConfig\nslack = file_sink_in_question:FileConfig\n"
        )
        (tmp_path / "packages" / "file_sink_in_question.py").write_text(body)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))
        monkeypatch.delitem(sys.modules, "file_sink_in_question", raising=False)

    return install


def config_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)
    return path


def test_a_sink_of_another_package_is_configured_checked_and_used_like_ours(
    offer: Offer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(FILE_SINK)
    path = config_file(
        tmp_path,
        f"notify:\n  sinks:\n  - type: file\n    path: {tmp_path / 'told'}\n    levels: [1, 2]\n"
        "    route: {min_severity: critical}\n  - type: console\n",
    )
    notify = load_config(path).notify

    file, console = build_sinks(notify, {}, io.StringIO())
    assert (file.name, console.name) == ("file", "console")
    assert [name for name, _ in notify.routes()] == ["file", "console"]
    assert file.deliver([sample_alert("file", 0.0)], 0.0).outcome == "sent"
    assert run_cli(["check-config", str(path)]) == CLEAN
    assert run_cli(["notify", "test", "--config", str(path), "--sink", "file"]) == CLEAN
    assert "file: sent" in capsys.readouterr().out
    assert len((tmp_path / "told").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("- type: file\n    paht: x\n", '4: notify.sinks[0]: unknown key "paht"; did you mean "path"?'),
        ("- type: file\n    path: 3\n", "4: notify.sinks[0].path: expected text, got 3; write it in quotes"),
        ("- type: file\n    path: a\n    levels: [a]\n", "5: notify.sinks[0].levels: expected `int`, got `str`"),
        ("- type: fil\n    path: x\n", '3: notify.sinks[0].type: expected one of slack, slack-bot, '),
    ],
)  # fmt: skip
def test_its_keys_are_told_of_like_ours(lines: str, message: str, offer: Offer, tmp_path: Path) -> None:
    offer(FILE_SINK)
    path = config_file(tmp_path, f"notify:\n  sinks:\n  {lines}")

    with pytest.raises(ConfigError, match=re.escape(f"{path}:{message}")):
        load_config(path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise RuntimeError('no')", "cannot be loaded: RuntimeError: no"),
        ("import sys; sys.exit(4)", "cannot be loaded: SystemExit: 4"),
        ("import os; os._exit(3)", "cannot be loaded: its import ends the process that imports it, with exit code 3"),
        ("FileConfig = 3", "is no configuration of a sink: expected a msgspec.Struct, got 3"),
        ("import msgspec\nclass FileConfig(msgspec.Struct):\n    name: str = 'a'", "it has no field route"),
        (
            "import msgspec\nclass FileConfig(msgspec.Struct):\n    name: str = 'a'\n    route: int = 0",
            "it has no method build",
        ),
    ],
)
def test_a_broken_package_is_an_error_of_the_line_that_names_it_alone(
    body: str, says: str, offer: Offer, tmp_path: Path
) -> None:
    offer(body)

    assert load_config(config_file(tmp_path, "notify:\n  sinks:\n  - type: console\n")).notify.sinks
    assert "file_sink_in_question" not in sys.modules
    path = config_file(tmp_path, "notify:\n  sinks:\n  - type: console\n  - type: file\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)

    where = f'{path}:4: notify.sinks[1].type: entry point "file" of sentinel.sinks (file_sink_in_question:FileConfig'
    assert str(error.value).startswith(where) and says in str(error.value)


def test_a_sink_that_cannot_be_built_is_told_by_its_name(
    offer: Offer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(FILE_SINK)
    path = config_file(tmp_path, "notify:\n  sinks:\n  - type: file\n    path: boom\n")
    notify = load_config(path).notify

    with pytest.raises(ConfigError, match=r"notify\.sinks\.file cannot be built: OSError: no such disk"):
        build_sink(notify.sinks[0], notify, {}, io.StringIO())
    assert run_cli(["check-config", str(path)]) == FOUND
    assert f"{path}:3: notify.sinks.file cannot be built" in capsys.readouterr().out


def test_no_package_takes_the_name_of_a_sink_of_ours(offer: Offer, tmp_path: Path) -> None:
    offer("raise RuntimeError('no')")

    assert load_config(config_file(tmp_path, "notify: {sinks: [{type: slack, url_env: A}]}")).notify.sinks[0].name == "slack"


def test_the_example_in_the_docs_is_a_sink(offer: Offer, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "configuration.md").read_text()
    (body,) = re.findall(r'```python\n("""my_package/pager.py.*?)```', text, re.DOTALL)
    offer(body.replace("PagerConfig", "FileConfig"))
    notify = load_config(config_file(tmp_path, "notify: {sinks: [{type: file, name: night, url_env: PAGER}]}")).notify

    (sink,) = build_sinks(notify, {"PAGER": "http://127.0.0.1:9/x"}, io.StringIO())

    assert sink.name == "night"
    with pytest.raises(ConfigError, match=r"notify\.sinks\.night\.url_env"):
        build_sinks(notify, {}, io.StringIO())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "return FileSink(self)",
            "FileSink(self)",
            "build() gave NoneType, which is no sink: it has no name and no",
        ),
        (
            "digest_after, max_batch = 0, 1",
            "",
            "build() gave FileSink, which is no sink: it has no digest_after and no",
        ),
        ("alerts, now", "alerts", "which is no sink: deliver(alerts, now) is called, and it takes (alerts)"),
    ],
)
def test_what_is_built_and_is_no_sink_is_told_before_there_is_an_alert(
    old: str, new: str, says: str, offer: Offer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(FILE_SINK.replace(old, new))
    path = config_file(tmp_path, "notify:\n  sinks:\n  - type: file\n    path: x\n")

    assert run_cli(["check-config", str(path)]) == FOUND
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("raise OSError('printer on fire')", "file: failed: OSError: printer on fire ({file}:27)"),
        (
            "return None",
            "file: failed: TypeError: deliver() gave NoneType, expected a sentinel.report.sinks.delivery.",
        ),
    ],
)
def test_a_sink_that_fails_is_an_outcome_of_the_test_message_and_the_next_one_is_tried(
    new: str, says: str, offer: Offer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(FILE_SINK.replace("return SENT", new))
    path = config_file(tmp_path, f"notify:\n  sinks:\n  - type: file\n    path: {tmp_path / 'told'}\n  - type: console\n")

    assert run_cli(["notify", "test", "--config", str(path)]) == FOUND
    out = capsys.readouterr().out
    assert says.format(file=tmp_path / "packages" / "file_sink_in_question.py") in out and "console: sent" in out
