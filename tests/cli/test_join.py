"""`sentinel join`: what it refuses before it asks any broker, in the words of its own options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sentinel.cli.join import join
from sentinel.cli.main import run_cli
from sentinel.cli.serve import serve
from sentinel.daemon.daemon import ServeOptions
from sentinel.errors import ConfigError
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease

from ..support.serving import small_run

NOWHERE = "nats://127.0.0.1:9"


def test_a_run_is_no_directory_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    run.write(1)
    before = sorted(path.name for path in run.directory.rglob("*"))

    assert run_cli(["join", str(run.directory), "--server", NOWHERE]) != 0
    assert "expected a directory of runs, got a run" in capsys.readouterr().err
    assert sorted(path.name for path in run.directory.rglob("*")) == before


def test_a_join_takes_what_serve_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[ServeOptions]()

    def begin(options: ServeOptions, *_: object) -> None:
        begun.append(options)
        raise ConfigError("begun")

    monkeypatch.setattr("sentinel.daemon.daemon.Daemon", begin)
    assert {one.name for one in serve.params} - {one.name for one in join.params} == {"owned"}

    options = ["--dry-run-notifications", "--late-after", "7", "--late-after-s", "9", "--no-http"]
    assert run_cli(["join", str(tmp_path), "--server", NOWHERE, *options]) != 0
    (one,) = begun
    assert one.is_dry_run and one.http is None
    assert (one.config.judging.late_after_steps, one.config.judging.late_after_s) == (7, 9.0)


def test_what_is_wrong_with_certificates_is_said_in_the_names_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        BrokerConfig(server=NOWHERE, ca_file="none.pem").tls()
    assert run_cli(["join", str(tmp_path), "--server", NOWHERE, "--client-cert", "a.pem"]) != 0

    known = {word for one in join.params for word in one.opts}
    said = re.findall(r"--[a-z-]+", capsys.readouterr().err + str(refused.value))
    assert {"--client-cert", "--client-key", "--tls-ca"} <= set(said) <= known


def test_who_waits_for_a_broker_names_no_join_that_it_has_not_heard_of(tmp_path: Path) -> None:
    intake = JoinIntake(CopiedRuns(tmp_path, "j1"), BrokerConfig(server=NOWHERE), JoinLease("j1"))

    assert intake.standby_of == "unknown (no broker is reached yet)"
    health = intake.health()
    assert (health.is_active, health.is_connected) == (False, False)
    assert health.problems == (f"broker {NOWHERE}: no broker is reached yet",)
