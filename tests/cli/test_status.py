"""`sentinel status` says what became of the newest edit of the trainer's config, and which ranks are not there."""

import json

import pytest

from sentinel.cli.main import CLEAN, run_cli
from sentinel.control.edits import EditState
from sentinel.daemon.commanding import EDITS_FACT
from sentinel.store.journal import Journal
from sentinel.store.run_paths import RunPaths

from ..support.serving import NOW, catch_up, served, small_run


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


def test_who_is_missing_and_what_was_judged_without_whom_is_said(tmp_path, capsys, monkeypatch):
    run = small_run(tmp_path / "run")
    run.write(4)
    serving = served(run.directory)
    catch_up(serving)

    assert run_cli(["status", str(run.directory)]) == CLEAN
    healthy = capsys.readouterr().out
    assert not any(word in healthy for word in ("missing:", "judged in part:", "left out:"))

    run.hold(3)
    for _ in range(4):
        run.write()
        catch_up(serving)
    monkeypatch.setattr(serving._command_turns, "turn", lambda *_, **__: {0: 7, 1: 7, 2: 7})
    serving.turn(NOW)
    assert run_cli(["status", str(run.directory)]) == CLEAN
    text = capsys.readouterr().out
    assert "missing: 1 of 4 ranks is not heard: rank 3 (node0, silent since 2027-01-15 08:00:0" in text
    assert "judged in part: 2 steps (4 to 5) without rank 3 (node0, late)\n" in text

    run.release(3)
    catch_up(serving)
    serving.close()
    again = served(run.directory)
    catch_up(again)
    again.close()
    assert run_cli(["status", str(run.directory), "--json"]) == CLEAN
    state = json.loads(capsys.readouterr().out)
    assert state["missing_ranks"] is None, "nobody listens any more"
    assert state["partial_steps"]["num_steps"] == 2
    assert run_cli(["status", str(run.directory)]) == CLEAN
    assert f"left out: {2 * run.num_rows(3)} rows that came after their step was judged: of rank 3 (node0, " in (
        capsys.readouterr().out
    )
