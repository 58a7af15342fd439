"""The trainer's config as a text: where an error is, what may change while training, where a config came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.errors import ConfigError
from sentinel.monitor_config import (
    FIXED,
    MAY_CHANGE,
    ConfigSource,
    Measurement,
    MonitorConfig,
    as_reported,
    hash_of,
    load_config,
    measurement_of,
    parse_config,
    read_source,
    refuse_fixed,
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kindz: [param]\n", 'f.yaml:1: unknown key "kindz"; did you mean "kinds"?'),
        ("\nkinds:\n- param\n- parm\n", "f.yaml:4: kinds[1]: unknown kind 'parm'; did you mean \"param\"?"),
        ("run: a\nblack_box: perhaps\n", 'f.yaml:2: black_box: expected true or false, got "perhaps"'),
        ("spool:\n  max_bytes: much\n", 'f.yaml:2: spool.max_bytes: expected a whole number, got "much"'),
        ("spool:\n\n  file_bytes: 3\n", "f.yaml:3: spool.file_bytes must be at least 65536, got 3"),
        ("collect_times: 0\n", "f.yaml:1: collect_times must be at least 1, got 0; to measure nothing: enabled: false"),
        ("ranks: [0, -3]\n", "f.yaml:1: ranks[1] must be at least 0, got -3"),
        ("run: a\nlabels: {1x: b}\n", "f.yaml:2: labels: expected a name of at most 63 letters, digits, '_', '.', '-'"),
        ("labels: {team: 3}\n", "f.yaml:1: labels.team: expected text, got 3"),
        ("at_step: -1\n", "f.yaml:1: at_step must be at least 0, got -1"),
        ("kinds: [param]\nrun: a\nkinds: []\n", 'f.yaml:3: key "kinds" is there twice, first on line 1'),
        ("kinds: [param\n", "f.yaml:2: not YAML: expected"),
        ("- param\n", "f.yaml:1: expected a mapping of keys, got a list"),
        ("run: ../up\n", "f.yaml:1: run must be a plain folder name"),
        ("\xff", "f.yaml:1: not UTF-8"),
    ],
)
def test_errors_name_file_line_and_the_nearest_word(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text.encode("latin-1"), "f.yaml")

    assert said in str(error.value)


def test_every_key_either_may_change_or_is_fixed() -> None:
    assert {*MAY_CHANGE, *FIXED} == set(MonitorConfig.__struct_fields__)
    assert not set(MAY_CHANGE) & set(FIXED)
    # What decides where things lie, and whom the trainer obeys, is not for an edit.
    assert {"directory", "run", "spool", "allow_commands"} <= set(FIXED)


@pytest.mark.parametrize("key", FIXED)
def test_a_fixed_key_cannot_change_and_is_named(key: str) -> None:
    other = {
        "directory": "elsewhere", "run": "other", "blocks": "[a]", "zero_eps": "0.5", "checksum": "false",
        "allow_commands": "[]", "layer_offset": "3", "name_map": "{a: b}", "max_rows": "2048", "gradient_divisor": "1",
        "outside_probes": "[a]", "spool": "{max_bytes: 999999999}", "site_placements": "{a: {tp: shard}}",
        "dump": "{kinds: [param]}", "trace": "{ring_bytes: 2000000}", "struct": "true", "labels": "{team: nlp}",
    }[key]  # fmt: skip
    text = f"# comment\n{key}: {other}\n".encode()

    with pytest.raises(ConfigError) as error:
        refuse_fixed(text, "f.yaml", as_reported(MonitorConfig()))

    assert f"f.yaml:2: {key} cannot change while the run trains" in str(error.value)
    assert f"may change: {', '.join(MAY_CHANGE)}" in str(error.value)
    refuse_fixed(text, "f.yaml", as_reported(parse_config(text, "f.yaml")))


def test_what_may_change_is_let_through() -> None:
    text = b"enabled: false\nkinds: activation\ntargets: layers.1\nblack_box: false\nper_micro_step: true\nstart_step: 3\n"
    text += b"step_interval: 2\ncollect_times: 9\nranks: [0]\nat_step: 77\n"

    refuse_fixed(text, "f.yaml", as_reported(MonitorConfig()))

    wish = parse_config(text, "f.yaml").measurement
    assert wish == Measurement(
        enabled=False, kinds=("activation",), targets=("layers.1",), black_box=False, per_micro_step=True, start_step=3,
        step_interval=2, collect_times=9, ranks=(0,),
    )  # fmt: skip
    assert measurement_of(as_reported(wish)) == wish


def test_a_source_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "monitor.yaml").write_text("kinds: [param]\n")

    for given in ("monitor.yaml", Path("monitor.yaml"), tmp_path / "monitor.yaml"):
        source = read_source(given)
        assert (source.path, source.text_hash) == (str(tmp_path / "monitor.yaml"), hash_of(b"kinds: [param]\n"))
        assert read_source(source) is source
    for other in (None, {"kinds": ["param"]}, MonitorConfig()):
        assert read_source(other).path == ""
    assert load_config({"kinds": "param"}).kinds == ("param",)


def test_a_run_named_by_the_trainer_is_no_change_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "monitor.yaml").write_text("kinds: [param]\n")
    source = read_source(tmp_path / "monitor.yaml").with_run("first").with_run("second")

    assert (source.config.run, source.as_read.run) == ("second", None)
    refuse_fixed(b"kinds: [wgrad]\n", "f.yaml", as_reported(source.as_read))
    assert ConfigSource().as_read == MonitorConfig()
