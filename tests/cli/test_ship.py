"""`sentinel ship` and `sentinel node`: what they refuse before they ask any broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from sentinel.cli.main import BAD_USAGE, run_cli


@pytest.mark.parametrize("verb", ["ship", "node"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--drain-s", "-3", "--drain-s: expected 0 s at least, got -3; with 0 nothing is waited for"),
        ("--drain-s", "nan", "--drain-s: expected 0 s at least, got nan"),
        ("--node", "", '--node: expected a name, got ""; without --node it is the host name'),
        ("--node", " ", '--node: expected a name, got " "'),
    ],
)
def test_a_time_below_zero_and_a_name_that_is_none_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, option: str, value: str, said: str
) -> None:
    assert run_cli([verb, str(tmp_path), "--server", "nats://127.0.0.1:9", option, value]) == BAD_USAGE
    assert said in capsys.readouterr().err
