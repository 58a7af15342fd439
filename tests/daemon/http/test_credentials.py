"""Tokens: what each opens, and that they are exchanged without a restart."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sentinel.daemon.http.config import HttpConfig
from sentinel.daemon.http.credentials import Credentials
from sentinel.daemon.http.tokens import Scope, Tokens
from sentinel.errors import ConfigError

OLD, NEW, OTHER = "o" * 20, "n" * 20, "x" * 20


def write_tokens(directory: Path, **tokens: Any) -> None:
    path = directory / "new.json"
    path.write_text(json.dumps(tokens))
    path.chmod(0o600)
    path.replace(directory / "tokens.json")


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(b"anyone:" + password.encode()).decode()


def test_a_token_is_rotated_without_a_restart(tmp_path: Path) -> None:
    write_tokens(tmp_path, read=OLD, control=OTHER)
    credentials = Credentials(tmp_path, HttpConfig())
    assert credentials.tokens.scope(f"Bearer {NEW}") is Scope.NOTHING

    write_tokens(tmp_path, read=[OLD, NEW], control=OTHER)
    credentials.refresh()
    assert [credentials.tokens.scope(f"Bearer {one}") for one in (OLD, NEW)] == [Scope.READ, Scope.READ]

    write_tokens(tmp_path, read=NEW, control=OTHER)
    credentials.refresh()
    assert [credentials.tokens.scope(f"Bearer {one}") for one in (OLD, NEW)] == [Scope.NOTHING, Scope.READ]
    assert credentials.problems() == []


@pytest.mark.parametrize("broken", ["gone", "open", "no json", "short", "fifo", "link"])
def test_a_broken_file_of_tokens_leaves_the_former_in_force_and_says_so(tmp_path: Path, broken: str) -> None:
    write_tokens(tmp_path, read=OLD, control=OTHER)
    credentials = Credentials(tmp_path, HttpConfig())
    path = tmp_path / "tokens.json"
    if broken in ("gone", "fifo", "link"):
        path.unlink()
    if broken == "fifo":
        os.mkfifo(path, 0o600)
    elif broken == "link":
        path.symlink_to("/etc/passwd")
    elif broken == "open":
        path.chmod(0o644)
    elif broken == "no json":
        path.write_text("{")
    elif broken == "short":
        write_tokens(tmp_path, read="short", control=OTHER)

    credentials.refresh()

    [problem] = credentials.problems()
    assert problem.startswith("tokens: the former ones are in use: ") and str(path) in problem
    assert OLD not in problem and OTHER not in problem
    assert credentials.tokens.scope(f"Bearer {OLD}") is Scope.READ
    if broken != "gone":
        path.unlink()
    write_tokens(tmp_path, read=OLD, control=OTHER)
    credentials.refresh()
    assert credentials.problems() == []


def test_each_scope_includes_the_smaller_ones() -> None:
    tokens = Tokens(read=OLD, silence=NEW, control=OTHER)

    assert [tokens.scope(f"Bearer {one}") for one in (OLD, NEW, OTHER)] == [Scope.READ, Scope.SILENCE, Scope.CONTROL]
    assert Scope.NOTHING < Scope.READ < Scope.SILENCE < Scope.CONTROL


def test_what_a_browser_sends_by_itself_opens_reads_alone() -> None:
    tokens = Tokens(read=OLD, silence=NEW, control=OTHER)

    assert [tokens.scope(basic(one)) for one in (OLD, NEW, OTHER)] == [Scope.READ] * 3
    for wrong in (basic("wrong"), "Basic", "Basic !!!", basic(""), "Digest " + OLD, f"Bearer {basic(OLD)}"):
        assert tokens.scope(wrong) is Scope.NOTHING


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        ({"read": "short", "control": OTHER}, "tokens.read must have at least 16"),
        ({"read": [OLD, "short"], "control": OTHER}, "tokens.read must have at least 16"),
        ({"read": OLD, "control": OLD}, "tokens.control must differ from tokens.read"),
        ({"read": OLD, "silence": [OTHER], "control": OTHER}, "tokens.control must differ from tokens.silence"),
        ({"read": OLD, "control": []}, "tokens.control must have a token"),
        ({"read": [f"{number:020}" for number in range(17)], "control": OTHER}, "tokens.read must have at most 16 tokens"),
    ],
)
def test_tokens_that_protect_nothing_are_refused(tokens: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace(".", r"\.")):
        Tokens(**tokens)
