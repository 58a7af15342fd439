"""`sentinel status` says what became of the newest edit of the trainer's config."""

import json

import pytest

from sentinel.cli.main import CLEAN, run_cli
from sentinel.control.edits import EditState
from sentinel.daemon.commanding import EDITS_FACT
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths


@pytest.mark.parametrize("problem", ["", 'monitor.yaml:2: unknown key "kindz"'])
def test_an_edit_that_is_not_in_force_is_said(tmp_path, capsys, problem):
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    paths = RunPaths.of(run)
    journal = Journal(paths.journal)
    state = EditState(path="/etc/monitor.yaml", edit=3, problem=problem)
    journal.values.put(EDITS_FACT, json.dumps({name: getattr(state, name) for name in state.__struct_fields__}))
    journal.close()

    assert run_cli(["status", str(run)]) == CLEAN
    text = capsys.readouterr().out
    assert ("config: the newest edit is not in force" in text) == bool(problem)
    assert problem in text
    assert run_cli(["status", str(run), "--json"]) == CLEAN
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["path"], config["edit"], config["problem"]) == ("/etc/monitor.yaml", 3, problem)
