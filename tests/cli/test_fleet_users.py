"""`sentinel fleet users` and `rights`: who may do what at a broker, in files that a server takes, and for people."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from sentinel.cli.fleet import fleet
from sentinel.cli.join import join
from sentinel.cli.main import run_cli
from sentinel.cli.node import node
from sentinel.cli.ship import ship
from sentinel.cli.worker import worker
from sentinel.fleet.broker_users import node_user, user_of
from sentinel.fleet.users_conf import users_in

ROOT = Path(__file__).parents[2]
SERVER = ("--server", "nats://127.0.0.1:9")


def test_logins_of_a_run_are_written_beside_those_of_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("gpu-1", "gpu-2"), ("gpu-1", "--run", "A"), ("gpu-2", "--run", "B"), ("--run", "B")):
        assert run_cli(["fleet", "users", str(tmp_path), *arguments]) == 0

    said = capsys.readouterr().out
    assert f"{tmp_path}/users.conf: include it" in said and f"{tmp_path}/run-credentials: hand each node" in said
    assert users_in((tmp_path / "users.conf").read_text()) == ["gpu-1", "gpu-2", "gpu-1@A"]
    assert sorted(path.name for path in (tmp_path / "credentials").iterdir()) == [
        "gpu-1",
        "gpu-2",
        "join",
        "status",
        "worker",
    ]
    assert sorted(path.name for path in (tmp_path / "run-credentials").iterdir()) == ["gpu-1@A", "gpu-2@B"]


def test_nobody_named_is_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["fleet", "users", str(tmp_path)]) != 0

    assert "expected a NODE, got none" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("user", "run"), [("gpu-1", None), ("gpu-1", "my run"), ("join", None), ("worker", None), ("status", None)]
)
def test_rights_are_those_that_a_user_is_given(user: str, run: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    expected = user_of(user, run)
    arguments = ["fleet", "rights", user, *(("--run", run) if run else ())]

    assert run_cli(arguments) == 0
    lines = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["user", expected.name]
    assert tuple(subject for verb, subject in lines if verb == "publish") == expected.publish
    assert tuple(subject for verb, subject in lines if verb == "subscribe") == expected.subscribe

    assert run_cli([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": expected.name, "publish": list(expected.publish), "subscribe": list(expected.subscribe),
    }  # fmt: skip

    assert run_cli([*arguments, "--format", "nsc"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["nsc", "add", "user", "--name", expected.name]
    publish = ["--allow-pub", ",".join(expected.publish)] if expected.publish else ["--deny-pub", ">"]
    assert words[5:] == [*publish, "--allow-sub", ",".join(expected.subscribe)]


def test_the_rights_of_a_node_are_those_of_its_manual() -> None:
    (row,) = re.findall(r"^\| a node, `NODE` \| (.*) \| (.*) \|$", (ROOT / "docs" / "fleet.md").read_text(), re.MULTILINE)
    user = node_user("NODE")

    def shown(subjects: Iterable[str]) -> list[str]:
        return [re.sub(r"\.\d+\.", ".K.", one) for one in subjects]

    assert [re.findall(r"`([^`]+)`", cell) for cell in row] == [shown(user.publish), shown(user.subscribe)]


def test_a_run_has_no_join_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["fleet", "rights", "join", "--run", "A"]) != 0

    assert "join: expected a node where a run is named" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["ship", "node", "worker", "join", "fleet status"])
def test_each_verb_that_speaks_with_the_broker_takes_credentials(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = {"ship": ship, "node": node, "worker": worker, "join": join, "fleet status": fleet.commands["status"]}[verb]
    where = [] if verb == "fleet status" else [str(tmp_path)]
    assert {"--login", "--creds"} <= {word for one in command.params for word in one.opts}

    assert run_cli([*verb.split(), *where, *SERVER, "--login", "a", "--creds", "b"]) != 0
    assert "--login and --creds: expected one or none, got both" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["fleet status", "join"])
def test_credentials_that_are_none_are_said(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    creds = tmp_path / "creds"
    creds.write_text("none")
    creds.chmod(0o600)

    where = [] if verb == "fleet status" else [str(tmp_path)]
    assert run_cli([*verb.split(), *where, *SERVER, "--creds", str(creds)]) == 2

    assert f"{creds}: expected a user's JWT and the seed of its nkey" in capsys.readouterr().err
