"""The trainer's config, the daemon's, rule packs and rule tests: one reader, and one kind of error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.control.config import ControlConfig
from sentinel.daemon.config import DaemonConfig
from sentinel.daemon.config import load_config as load_daemon_config
from sentinel.document import BrokenDocument, Located, parse, parse_bytes
from sentinel.errors import ConfigError
from sentinel.file_keys import DAEMON, KEYS, RULE_TESTS, RULES, TRAINER
from sentinel.judge.config import JudgingConfig
from sentinel.monitor_config import MonitorConfig, SpoolConfig, load_config, parse_config
from sentinel.report.sinks.sink_table import NotifyConfig
from sentinel.report.sinks.slack import SlackConfig
from sentinel.rules.language.loader import read_pack
from sentinel.rules.language.rule_test_file import read_rule_tests
from sentinel.typed_document import locate, read_struct


def trainer(path: Path) -> str:
    return str(load_config(path))


def daemon(path: Path) -> str:
    return str(load_daemon_config(path))


def pack(path: Path) -> str:
    return "\n".join(map(str, read_pack([path])[1]))


def rule_tests(path: Path) -> str:
    return "\n".join(map(str, read_rule_tests(path)[1]))


READERS = (trainer, daemon, pack, rule_tests)


def said(reader: Callable[[Path], str], path: Path) -> str:
    try:
        return reader(path)
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", 3, 'key "a" is there twice, first on line 1'),
        (b"a: {b: 1,\n b: 2}\n", 2, 'key "b" is there twice, first on line 1'),
        (b"a:\n  - " + b"[" * 3000, 2, "nested too deeply: expected at most 32 levels"),
        (b"a: " + b"{a: " * 3000, 1, "nested too deeply: expected at most 32 levels"),
        (b"\n".join(b" " * at + b"a:" for at in range(900)), 33, "nested too deeply"),
        (b"a: &a [*a]\n", 1, "nested too deeply"),
        (b"# fine\na: \xff\n", 2, "not UTF-8"),
        (b"a:\n\tb: 1\n", 2, "not YAML: found a tab; indent with spaces"),
        (b"a: 1\n--- \nb: 2\n", 2, "not YAML: found a second document behind ---"),
        (b"? [a, b]\n: 1\n", 1, "a key must be text"),
        (b"a: 2026-05-45\n", 1, 'cannot read "2026-05-45" as timestamp'),
        (b"a: \x00\n", 1, "not YAML"),
    ],
)
def test_what_is_no_document_is_told_alike_whoever_reads_it(
    reader: Callable[[Path], str], text: bytes, line: int, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(text)

    assert f"{path}:{line}: {message}" in said(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_there_is_told_alike(reader: Callable[[Path], str], tmp_path: Path) -> None:
    assert str(tmp_path / "no.yaml") in said(reader, tmp_path / "no.yaml")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("key", "kind", "where"),
    [
        ("kinds", TRAINER, "the trainer's config"),
        ("black_box", TRAINER, "the trainer's config"),
        ("notify", DAEMON, "the daemon's configuration"),
        ("rules", RULES, "a rule pack"),
        ("tests", RULE_TESTS, "a file of rule tests"),
        ("late_after_s", "", "the daemon's configuration"),
    ],
)
def test_a_key_of_another_file_is_told_which(
    reader: Callable[[Path], str], key: str, kind: str, where: str, tmp_path: Path
) -> None:
    own = {trainer: (TRAINER,), daemon: (DAEMON, ""), pack: (RULES,), rule_tests: (RULES, RULE_TESTS)}[reader]
    path = tmp_path / "f.yaml"
    path.write_text(f"# comment\n{key}: []\n")

    message = said(reader, path)

    if kind not in own:
        assert f'{path}:2: unknown key "{key}"' in message and f"is a key of {where}" in message
    else:
        assert "is a key of" not in message


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("zero_eps: .nan\nmax_overhead: .inf\n", ["1: zero_eps: expected a finite number, got .nan",
                                                  "2: max_overhead: expected a finite number, got .inf"]),
        ("step_interval: -.inf\n", ["1: step_interval: expected a whole number, got -.inf"]),
        (f"zero_eps: 1{'0' * 400}\n", ["1: zero_eps: expected a finite number, got a number of hundreds of digits"]),
        ("run: 12\n", ["1: run: expected text, got 12; write it in quotes"]),
        ("run: 2026-05-01\n", ["1: run: expected text, got date; write it in quotes"]),
        ("checksum: 'true'\n", ['1: checksum: expected true or false, got "true"; write it without quotes']),
        ("max_rows: '2048'\n", ['1: max_rows: expected a whole number, got "2048"; write it without quotes']),
        ("max_rows:\n", ["1: max_rows: expected a whole number, got nothing"]),
        ("max_rows: true\n", ["1: max_rows: expected a whole number, got true"]),
        ("kinds: {param: 1}\n", ["1: kinds: expected a list, got a mapping"]),
        ("kinds:\n- param\n- 3\n", ["3: kinds[1]: expected text, got 3; write it in quotes"]),
        ("spool: 3\n", ["1: spool: expected a mapping of keys, got 3"]),
        ("spool:\n  max_byte: 3\n", ['2: spool: unknown key "max_byte"; did you mean "max_bytes"?']),
        ("max_bytes: 3\n", ['1: unknown key "max_bytes"; it belongs under "spool"']),
        ("probes:\n  wgrad:\n    step_interval: 0\n", ["3: probes.wgrad.step_interval must be at least 1, got 0"]),
        ("site_placements:\n  a.b:\n    tp: over\n", ["3: site_placements.a.b.tp must be one of"]),
        ("name_map:\n  a: 3\n", ["2: name_map.a: expected text, got 3; write it in quotes"]),
        ("kindz: [a]\nrun: []\nnotify: {}\n", ["1: unknown key", "2: run: expected text", "3: unknown key"]),
    ],
)  # fmt: skip
def test_a_wrong_value_of_the_trainers_config_is_told_where_it_stands(text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text.encode(), "f.yaml")

    lines = str(error.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(f"f.yaml:{message}")


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("judging:\n  late_after_s: .inf\n  late_after_steps: .nan\n",
         ["2: judging.late_after_s: expected a finite number, got .inf",
          "3: judging.late_after_steps: expected a whole number, got .nan"]),
        ("judging:\n\n  late_after_steps: -1\n", ["3: judging.late_after_steps must be at least 0, got -1"]),
        ("late_after_s: 3\n", ['1: unknown key "late_after_s"; it belongs under "judging"']),
        ("control:\n  escalat: true\n", ['2: control: unknown key "escalat"; did you mean "escalate"?']),
        ("control:\n  kinds: wgrad\n", ['2: control.kinds: expected a list, got "wgrad"; write [wgrad]']),
        ("control:\n  kinds: [wgrat]\n", ["2: control.kinds must be among"]),
        ("control:\n  dump_kinds: [a]\n", ["2: control.dump_kinds must be among"]),
        ("notify:\n", ["1: notify: expected a mapping of keys, got nothing"]),
        ("notify:\n  sinks: slack\n", ['2: notify.sinks: expected a list, got "slack"']),
        ("notify:\n  sinks:\n  - slack\n", ['3: notify.sinks[0]: expected a mapping with "type", got "slack"']),
        ("notify:\n  sinks:\n  - name: a\n", ['3: notify.sinks[0]: "type" is missing; expected one of slack, slack-bot,']),
        ("notify:\n  sinks:\n  - name: a\n    type: slak\n",
         ['4: notify.sinks[0].type: expected one of slack, slack-bot, alertmanager, pagerduty,']),
        ("notify:\n  sinks:\n  - type: slack\n    url: x\n",
         ['4: notify.sinks[0]: unknown key "url"; did you mean "url_env"?']),
        ("notify:\n  sinks:\n  - type: slack\n    route: {min_severity: criticl}\n",
         ["4: notify.sinks[0].route.min_severity: expected one of info, warning, critical, got \"criticl\"; did you mean"]),
        ("notify:\n  sinks:\n  - type: console\n    route:\n      changes: [opned]\n",
         ["5: notify.sinks.route.changes must be among"]),
        ("notify:\n  sinks:\n  - type: console\n  - type: webhook\n    name: team.a\n    timeout_s: 0\n",
         ["6: notify.sinks.team.a.timeout_s must be above 0 and finite, got 0"]),
        ("notify:\n  sinks:\n  - type: console\n  - type: console\n",
         ["2: notify.sinks: expected every name once, got 'console' 2 times"]),
    ],
)  # fmt: skip
def test_a_wrong_value_of_the_daemons_configuration_is_told_where_it_stands(
    text: str, messages: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "daemon.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as error:
        load_daemon_config(path)

    lines = str(error.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(f"{path}:{message}")


@pytest.mark.parametrize(("value", "got"), [(".nan", ".nan"), (".inf", ".inf"), ("-.inf", "-.inf"), ("[1, .nan]", ".nan")])
def test_a_rule_with_an_argument_that_is_no_number_is_told_where_it_stands(value: str, got: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(f"rules:\n- name: loss-spike\n  args:\n    threshold: {value}\n")

    assert f'{path}:4: rule "loss-spike": args.threshold: expected a finite number, got {got}\n' in pack(path) + "\n"


def test_the_tables_of_keys_are_those_of_the_structs() -> None:
    sections = {TRAINER: MonitorConfig, DAEMON: DaemonConfig}

    for kind, struct in sections.items():
        assert {key for key in KEYS[kind] if "." not in key} == set(struct.__struct_fields__)
        for dotted in (key for key in KEYS[kind] if "." in key):
            section, _, key = dotted.partition(".")
            assert key in getattr(struct(), section).__struct_fields__, dotted
    for section in DaemonConfig.__struct_fields__:
        own = {key.partition(".")[2] for key in KEYS[DAEMON] if key.startswith(f"{section}.")}
        shared = set(MonitorConfig.__struct_fields__) | {"dump"}
        assert set(getattr(getattr(DaemonConfig(), section), "__struct_fields__", ())) - shared == own


def test_values_from_code_are_read_alike_and_name_no_file() -> None:
    spool = SpoolConfig(file_bytes=2**20)

    assert load_config({"kinds": ("param",), "ranks": [0], "spool": spool, "max_overhead": 0}).spool is spool
    with pytest.raises(ConfigError, match=r'^spool\.max_bytes: expected a whole number, got "x"'):
        load_config({"spool": {"max_bytes": "x"}})
    with pytest.raises(ConfigError, match=r"^max_overhead: expected a finite number, got \.nan"):
        load_config({"max_overhead": float("nan")})


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "{}\n"])
def test_a_document_that_says_nothing_is_the_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(text)

    assert load_config(path) == MonitorConfig()
    assert load_daemon_config(path) == DaemonConfig()


def test_numbers_as_people_write_them_are_numbers() -> None:
    document = parse("judging: {late_after_s: 1e1, snapshot_interval_s: 3}\n")

    assert read_struct(document, DaemonConfig, name="f", kind=DAEMON).judging.late_after_s == 10.0


def test_a_dotted_path_finds_its_value() -> None:
    document = parse("a:\n  b.c:\n  - name: x.y\n    d: 1\n  - 5\n")
    assert document is not None

    for dotted, line, is_whole in [
        ("a", 1, True), ("a.b.c", 2, True), ("a.b.c[1]", 5, True), ("a.b.c.x.y.d", 4, True), ("a.b.c.z", 2, False),
        ("e", 1, False), ("a.b.c[9].d", 2, False), ("a.b.c[0].name.further", 3, False),
    ]:  # fmt: skip
        found, whole = locate(document, dotted)
        assert (found.where, whole) == (line, is_whole), dotted


def test_32_levels_are_read_and_33_are_not() -> None:
    assert parse("[" * 33 + "]" * 33) is not None
    with pytest.raises(BrokenDocument, match="nested too deeply"):
        parse("[" * 34 + "]" * 34)
    assert isinstance(parse_bytes(b"a: 1"), Located)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_from_code_too(value: float) -> None:
    structs: list[tuple[type[Any], str]] = [
        (JudgingConfig, "late_after_s"), (JudgingConfig, "snapshot_interval_s"), (NotifyConfig, "max_retry_s"),
        (NotifyConfig, "give_up_after_s"), (ControlConfig, "cooldown_s"), (ControlConfig, "expires_s"),
        (ControlConfig, "latency_s"), (MonitorConfig, "zero_eps"), (MonitorConfig, "max_overhead"),
        (MonitorConfig, "gradient_divisor"),
    ]  # fmt: skip
    for struct, field in structs:
        with pytest.raises(ConfigError, match=field):
            struct(**{field: value})
    with pytest.raises(ConfigError, match=r"slack\.timeout_s"):
        NotifyConfig(sinks=(SlackConfig(timeout_s=value),))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("control: {kinds: [wgrat]}", "wgrad"),
        ("control: {dump_kinds: [parm]}", "param"),
        ("notify: {sinks: [{type: console, route: {changes: [opned]}}]}", "opened"),
    ],
)
def test_the_nearest_known_word_is_told(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(text)

    with pytest.raises(ConfigError, match=f'; did you mean "{word}"'):
        load_daemon_config(tmp_path / "f.yaml")
