import json
import os
import stat

import msgspec
import pytest

from sentinel.command import Command, EnableMonitoring, WithdrawCommand
from sentinel.control import known_commands
from sentinel.control.command_status import STATES
from sentinel.control.commands import RunCommands
from sentinel.errors import StoreError
from sentinel.messages import Ack
from sentinel.report.metrics import COMMAND_STATES


class Ranks:
    """Ranks that read command files and answer as a trainer does, without one."""

    def __init__(self, run_dir, steps):
        self.directory = run_dir / "control"
        self.steps = dict(steps)
        self.read = dict.fromkeys(steps, 0)
        self.armed = {rank: {} for rank in steps}
        self.obeyed = {}

    def poll(self, run_commands, now, only=None):
        for rank in self.steps if only is None else only:
            for path in sorted(self.directory.glob("[0-9]*.json")):
                if int(path.stem) <= self.read[rank]:
                    continue
                self.read[rank] = int(path.stem)
                command = msgspec.json.decode(path.read_bytes(), type=Command)
                if isinstance(command, WithdrawCommand):
                    self.armed[rank].pop(command.withdraws, None)
                    run_commands.acknowledge(rank, self.ack(command.withdraws, "withdrawn", rank), now)
                elif not command.ranks or rank in command.ranks:
                    is_late = command.at_step <= self.steps[rank]
                    if not is_late:
                        self.armed[rank][command.id] = command
                    run_commands.acknowledge(rank, self.ack(command.id, "missed" if is_late else "armed", rank), now)

    def step(self, run_commands, now):
        for rank in self.steps:
            self.steps[rank] += 1
            for command in self.armed[rank].values():
                if command.at_step == self.steps[rank]:
                    self.obeyed.setdefault(command.id, {})[rank] = self.steps[rank]
                    run_commands.acknowledge(rank, self.ack(command.id, "applied", rank), now)

    def ack(self, command, state, rank):
        return Ack(command=command, state=state, step=self.steps[rank])

    def ended(self):
        """Steps that were spoken for: the one before the current one."""
        return {rank: step - 1 for rank, step in self.steps.items()}


def states(run_commands):
    return {status.command.id: status.state for status in run_commands.known.statuses()}


def test_command_obeyed_at_one_step(tmp_path):
    run_commands, now = RunCommands(tmp_path), 100.0
    ranks = Ranks(tmp_path, dict.fromkeys(range(4), 10))

    command = run_commands.enable(at_step=13, for_steps=5, now=now)
    ranks.poll(run_commands, now)
    run_commands.tick(ranks.ended(), now)
    assert states(run_commands)[command.id] == "armed"
    for _ in range(4):
        ranks.step(run_commands, now)
        run_commands.tick(ranks.ended(), now)

    assert ranks.obeyed == {command.id: dict.fromkeys(range(4), 13)}
    assert states(run_commands)[command.id] == "applied"
    assert run_commands.known.is_on(14)
    assert run_commands.monitoring_acked_step == 13
    for _ in range(5):
        ranks.step(run_commands, now)
        run_commands.tick(ranks.ended(), now)
    assert states(run_commands)[command.id] == "ended"
    assert not run_commands.known.is_on(19)
    assert [run_commands.audit.counts[state] for state in ("issued", "armed", "applied", "ended")] == [1, 1, 1, 1]


def test_late_command_is_withdrawn(tmp_path):
    run_commands, now = RunCommands(tmp_path), 100.0
    ranks = Ranks(tmp_path, {0: 10, 1: 14})

    command = run_commands.enable(at_step=13, now=now)
    ranks.poll(run_commands, now)
    changed = run_commands.tick(ranks.ended(), now)
    ranks.poll(run_commands, now)
    for _ in range(5):
        ranks.step(run_commands, now)
        run_commands.tick(ranks.ended(), now)

    assert [(status.state, status.is_late) for status in changed] == [("withdrawn", True)]
    assert "too late on rank 1" in changed[0].reason
    assert ranks.obeyed == {}
    written = json.loads((tmp_path / "control" / "000002.json").read_bytes())
    assert (written["type"], written["withdraws"]) == ("WithdrawCommand", command.id)


def test_a_rank_that_never_reads_makes_a_command_late(tmp_path):
    run_commands = RunCommands(tmp_path)
    command = run_commands.enable(at_step=13, now=0.0)

    run_commands.tick({0: 12, 1: 12}, 0.0)
    assert states(run_commands)[command.id] == "issued"
    run_commands.tick({0: 13, 1: 13}, 0.0)

    assert states(run_commands)[command.id] == "withdrawn"


def test_where_some_obey_already_the_command_is_partial(tmp_path):
    run_commands = RunCommands(tmp_path)
    ranks = Ranks(tmp_path, {0: 10, 1: 10})
    command = run_commands.enable(at_step=12, for_steps=3, now=0.0)
    ranks.poll(run_commands, 0.0, only=[0])
    ranks.step(run_commands, 0.0)
    ranks.step(run_commands, 0.0)
    ranks.poll(run_commands, 0.0)

    changed = run_commands.tick(ranks.ended(), 0.0)

    assert [(status.state, status.reason) for status in changed] == [("partial", "too late on rank 1")]
    assert run_commands.known.is_on(12)
    assert len(list((tmp_path / "control").iterdir())) == 1
    for _ in range(4):
        ranks.step(run_commands, 0.0)
    run_commands.tick(ranks.ended(), 0.0)
    assert states(run_commands)[command.id] == "ended"


def test_a_rank_whose_spool_lags_is_waited_for_a_moment(tmp_path):
    run_commands = RunCommands(tmp_path)
    command = run_commands.enable(at_step=5, now=0.0)
    run_commands.acknowledge(0, Ack(command=command.id, state="armed", step=3), 0.0)

    run_commands.tick({0: 6, 1: 3}, 0.0)
    assert states(run_commands)[command.id] == "issued"
    run_commands.tick({0: 6, 1: 3}, 1.9)
    assert states(run_commands)[command.id] == "issued"
    run_commands.tick({0: 6, 1: 3}, 2.1)

    assert states(run_commands)[command.id] == "partial"


def test_ranks_that_are_not_meant_need_not_answer(tmp_path):
    run_commands = RunCommands(tmp_path)
    ranks = Ranks(tmp_path, dict.fromkeys(range(4), 1))
    command = run_commands.enable(at_step=3, ranks=(2, 3), now=0.0)

    ranks.poll(run_commands, 0.0)
    run_commands.tick(ranks.ended(), 0.0)

    assert states(run_commands)[command.id] == "armed"


def test_dead_ranks_need_not_answer(tmp_path):
    run_commands = RunCommands(tmp_path)
    command = run_commands.enable(at_step=3, now=0.0)
    run_commands.acknowledge(0, Ack(command=command.id, state="armed", step=1), 0.0)

    run_commands.tick({0: 0}, 0.0)

    assert states(run_commands)[command.id] == "armed"


def test_refused_by_all_and_by_some(tmp_path):
    run_commands = RunCommands(tmp_path)
    by_all, by_some = run_commands.enable(at_step=9, now=0.0), run_commands.enable(at_step=9, now=1.0)
    for rank, state in ((0, "refused"), (1, "armed")):
        run_commands.acknowledge(rank, Ack(command=by_all.id, state="refused", step=1, reason="not allowed"), 0.0)
        run_commands.acknowledge(rank, Ack(command=by_some.id, state=state, step=1), 0.0)

    run_commands.tick({0: 0, 1: 0}, 1.0)

    assert states(run_commands)[by_all.id] == "refused"
    assert states(run_commands)[by_some.id] == "withdrawn"
    assert not run_commands.known.find("") and not [status for status in run_commands.known.statuses() if status.is_late]


def test_a_command_nobody_answers_expires(tmp_path):
    run_commands = RunCommands(tmp_path, expires_s=60.0)
    command = run_commands.enable(at_step=9, now=100.0)

    run_commands.tick({}, 159.0)
    assert states(run_commands)[command.id] == "issued"
    run_commands.tick({}, 161.0)

    assert states(run_commands)[command.id] == "expired"
    assert (run_commands.audit.counts["expired"], run_commands.audit.counts["withdrawn"]) == (1, 0)
    assert (tmp_path / "control" / "000002.json").exists()


def test_disable_ends_what_was_enabled(tmp_path):
    run_commands = RunCommands(tmp_path)
    ranks = Ranks(tmp_path, {0: 1})
    enable = run_commands.enable(at_step=3, now=0.0)
    ranks.poll(run_commands, 0.0)
    ranks.step(run_commands, 0.0)
    ranks.step(run_commands, 0.0)
    run_commands.tick(ranks.ended(), 0.0)
    run_commands.tick(ranks.ended(), 0.0)
    assert run_commands.known.is_on(3)

    disable = run_commands.disable(at_step=5, now=1.0)
    ranks.poll(run_commands, 1.0)
    for _ in range(3):
        ranks.step(run_commands, 1.0)
        run_commands.tick(ranks.ended(), 1.0)

    assert states(run_commands) == {enable.id: "ended", disable.id: "ended"}
    assert not run_commands.known.is_on(6)


def test_a_disable_that_is_late_somewhere_still_holds_elsewhere(tmp_path):
    run_commands = RunCommands(tmp_path)
    disable = run_commands.disable(at_step=5, now=0.0)
    run_commands.acknowledge(0, Ack(command=disable.id, state="missed", step=6), 0.0)

    run_commands.tick({0: 5, 1: 3}, 0.0)

    assert run_commands.audit.counts["partial"] == 1
    assert len(run_commands.known.statuses()) == 1


def test_files_are_whole_private_and_numbered(tmp_path):
    run_commands = RunCommands(tmp_path)

    for step in range(3):
        run_commands.enable(at_step=step, now=0.0)

    names = sorted(path.name for path in (tmp_path / "control").iterdir())
    assert names == ["000001.json", "000002.json", "000003.json"]
    assert stat.S_IMODE((tmp_path / "control").stat().st_mode) == 0o700
    for number, name in enumerate(names, 1):
        path = tmp_path / "control" / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert msgspec.json.decode(path.read_bytes(), type=EnableMonitoring).seq == number


def test_numbers_go_on_after_a_restart_and_beside_another_writer(tmp_path):
    daemon, shell = RunCommands(tmp_path), RunCommands(tmp_path)

    seqs = [run_commands.enable(at_step=9, now=0.0).seq for run_commands in (daemon, shell, shell, daemon)]
    seqs.append(RunCommands(tmp_path).enable(at_step=9, now=0.0).seq)

    assert seqs == [1, 2, 3, 4, 5]


def test_a_number_taken_at_the_same_instant_is_not_overwritten(tmp_path, monkeypatch):
    run_commands, other = RunCommands(tmp_path), RunCommands(tmp_path)
    run_commands.enable(at_step=1, now=0.0)
    link = os.link

    def take_first(source, target):
        if target.name == "000002.json" and not target.exists():
            monkeypatch.setattr(os, "link", link)
            other.enable(at_step=7, now=0.0)
        link(source, target)

    monkeypatch.setattr(os, "link", take_first)

    command = run_commands.enable(at_step=8, now=0.0)

    assert command.seq == 3
    assert [json.loads(path.read_bytes())["at_step"] for path in sorted((tmp_path / "control").iterdir())] == [1, 7, 8]


def test_a_daemon_follows_what_a_shell_ordered(tmp_path):
    daemon, shell = RunCommands(tmp_path), RunCommands(tmp_path)
    command = shell.enable(at_step=9, now=0.0)

    daemon.acknowledge(0, Ack(command=command.id, state="armed", step=1), 0.0)
    daemon.tick({0: 0}, 0.0)

    assert states(daemon) == {command.id: "armed"}


def test_a_restart_keeps_answers(tmp_path):
    run_commands = RunCommands(tmp_path)
    command = run_commands.enable(at_step=9, now=0.0, key="k")
    run_commands.acknowledge(0, Ack(command=command.id, state="armed", step=1), 0.0)

    after = RunCommands(tmp_path)
    after.load(run_commands.dump())
    after.tick({0: 9}, 0.0)

    assert states(after) == {command.id: "applied"}
    assert after.enable(at_step=50, now=1.0, key="k") == command


@pytest.mark.parametrize("body", [b"", b"{", b'{"type":"Nonsense"}', b"\xff" * 10])
def test_foreign_files_are_counted_and_left_alone(tmp_path, body):
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "000007.json").write_bytes(body)
    (tmp_path / "control" / "readme.txt").write_bytes(b"")
    run_commands = RunCommands(tmp_path)

    command = run_commands.enable(at_step=1, now=0.0)

    assert command.seq == 8
    assert run_commands.num_foreign == 1


def test_a_link_in_place_of_a_file_is_foreign(tmp_path):
    (tmp_path / "elsewhere.json").write_bytes(msgspec.json.encode(EnableMonitoring(id="x", seq=1, at_step=3)))
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "000001.json").symlink_to(tmp_path / "elsewhere.json")
    run_commands = RunCommands(tmp_path)

    run_commands.tick({0: 1}, 0.0)

    assert (run_commands.num_foreign, run_commands.known.statuses()) == (1, [])


def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "control").write_text("in the way")

    with pytest.raises(StoreError, match="cannot write a command"):
        RunCommands(tmp_path).enable(at_step=1, now=0.0)


def test_a_new_attempt_withdraws_what_stands(tmp_path):
    run_commands = RunCommands(tmp_path)
    command = run_commands.enable(at_step=9, now=0.0)

    run_commands.begin_attempt(1.0)

    assert states(run_commands)[command.id] == "withdrawn"


def test_every_change_is_audited(tmp_path):
    entries = []
    run_commands = RunCommands(tmp_path, audit=lambda *entry: entries.append(entry))
    command = run_commands.enable(at_step=9, now=5.0, source="policy")
    run_commands.acknowledge(3, Ack(command=command.id, state="armed", step=1), 6.0)
    run_commands.tick({3: 0}, 7.0)
    run_commands.acknowledge(3, Ack(command=command.id, state="missed", step=9), 8.0)
    run_commands.acknowledge(3, Ack(command=command.id, state="missed", step=9), 8.5)
    run_commands.tick({3: 9}, 9.0)

    assert [entry[:3] for entry in entries] == [
        (5.0, "policy", "command.issued"), (7.0, "commands", "command.armed"), (8.0, "rank 3", "ack"),
        (9.0, "commands", "command.partial"), (9.0, "commands", "command.ended"),
    ]  # fmt: skip
    assert entries[1][3]["answers"] == {"armed": 1}
    json.dumps([entry[3] for entry in entries], allow_nan=False)


def test_what_is_remembered_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(known_commands, "MAX_REMEMBERED", 5)
    run_commands = RunCommands(tmp_path)
    for number in range(10):
        run_commands.withdraw(f"c{number}", now=0.0)

    run_commands.tick({}, 0.0)

    assert len(run_commands.known.statuses()) == 5


def test_metrics_know_every_state():
    assert COMMAND_STATES == STATES
