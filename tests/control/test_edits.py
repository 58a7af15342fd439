"""Edits of the trainer's config file against the trainer's own code: a real file, the commands, ranks without a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel.collect.schedule.command_inbox import CommandInbox
from sentinel.collect.schedule.plan import Plan
from sentinel.control.commands import RunCommands
from sentinel.control.config import ControlConfig
from sentinel.control.edits import MAX_TRIES, ConfigFileEdits, ConfigInUse
from sentinel.messages import Ack
from sentinel.monitor_config import ConfigSource, as_reported, read_source
from sentinel.place import Place
from sentinel.record import Kind
from sentinel.wire.control_folder import ControlFolder

STEP_S = 0.1


class Rank:
    """What a monitor does with commands: the writer thread's look, and the training thread's step."""

    def __init__(self, run_dir: Path, source: ConfigSource, number: int, step: int, attempt: int) -> None:
        self.place, self.current_step = Place(rank=number, world_size=4), step
        self.source = source
        self.plan = Plan(source.config.measurement, source.text_hash, lambda: number)
        self.folder = ControlFolder(run_dir / "control", lambda why: None)
        self.answers: list[Ack] = []
        self.orders = CommandInbox(
            source.config.allow_commands,
            self.plan,
            step=lambda: self.current_step,
            rank=lambda: number,
            acknowledge=self.answers.append,
            attempt=attempt,
        )
        self.descriptor = self.describe()
        self.collected: dict[str, list[int]] = {}
        self.num_looks = 0

    def describe(self) -> ConfigInUse:
        return ConfigInUse(
            path=self.source.path,
            text_hash=self.plan.config.text_hash,
            settings={**as_reported(self.source.config), **as_reported(self.plan.config.measurement)},
            host="here",
            ended=self.current_step - 1,
        )

    def look(self) -> None:
        self.num_looks += 1
        for command in self.folder.poll(10**18 + self.num_looks * 10**10):
            answer = self.orders.receive(command)
            if answer is not None:
                self.answers.append(answer)

    def step(self) -> None:
        self.current_step += 1
        self.plan.requests.expire(self.current_step)
        self.orders.apply(self.current_step)
        self.plan.begin(self.current_step)
        for kind in (Kind.PARAM, Kind.WGRAD, Kind.ACTIVATION):
            if self.plan.takes(kind):
                self.collected.setdefault(kind.label, []).append(self.current_step)


class Run:
    """A trainer of four ranks and its daemon, step by step; each step takes 0.1 s."""

    def __init__(self, tmp_path: Path, text: str, config: ControlConfig | None = None) -> None:
        self.dir, self.file = tmp_path / "run", tmp_path / "monitor.yaml"
        self.file.write_text(text)
        self.config = config or ControlConfig()
        self.audit: list[tuple[Any, ...]] = []
        self.now = 1000.0
        self.attempt = -1
        self.start()
        self.start_daemon()

    def start(self, step: int = 10) -> None:
        self.attempt += 1
        source = read_source(self.file)
        self.ranks = [Rank(self.dir, source, number, step, self.attempt) for number in range(4)]

    def start_daemon(self, kept: tuple[bytes, bytes] | None = None, host: str = "here") -> None:
        self.run_commands = RunCommands(self.dir, audit=lambda *entry: self.audit.append(entry))
        self.edits = ConfigFileEdits(self.config, self.run_commands, lambda *entry: self.audit.append(entry), host)
        if kept is not None:
            self.run_commands.load(kept[0])
            self.edits.load(kept[1])

    def kill_daemon(self) -> tuple[bytes, bytes]:
        return self.run_commands.dump(), self.edits.dump()

    def turn(self) -> None:
        self.run_commands.attempt = self.attempt
        for number, rank in enumerate(self.ranks):
            for ack in rank.answers:
                self.run_commands.acknowledge(number, ack, self.now)
            rank.answers.clear()
            rank.descriptor = rank.describe()
        newest = max(rank.current_step for rank in self.ranks)
        self.run_commands.tick({number: rank.current_step - 1 for number, rank in enumerate(self.ranks)}, self.now)
        self.edits.turn(
            lambda: {number: rank.descriptor for number, rank in enumerate(self.ranks)},
            newest_step=newest, step_time_s=STEP_S, now=self.now, mono=self.now,
        )  # fmt: skip

    def train(self, num_steps: int, deaf: tuple[int, ...] = ()) -> None:
        for _ in range(num_steps):
            self.now += STEP_S
            for number, rank in enumerate(self.ranks):
                if number not in deaf:
                    rank.look()
            self.turn()
            for rank in self.ranks:
                rank.step()
            self.turn()

    def commands(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(one.command) | {"state": one.state} for one in self.run_commands.known.statuses()]

    def first(self, kind: str) -> list[int]:
        return [rank.collected[kind][0] for rank in self.ranks]


def test_an_edit_is_one_command_obeyed_by_all_at_one_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [param, activation]\n")
    run.train(30)

    [command] = run.commands()
    assert (command["type"], command["state"], command["changed"]) == ("ChangeConfig", "ended", ("kinds",))
    assert run.first("activation") == [command["at_step"]] * 4
    assert run.edits.counts["ordered"] == 1
    assert run.edits.state.problem == ""
    assert {rank.plan.config.text_hash for rank in run.ranks} == {command["text_hash"]}


def test_nothing_is_ordered_while_nobody_edits(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(40)
    os.utime(run.file)
    run.train(20)

    assert run.commands() == []
    run.file.write_text("kinds: [param, wgrad]\n")
    run.train(20)
    assert len(run.commands()) == 1


def test_a_step_that_the_file_names_is_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\nat_step: 77\n")
    run.train(80)

    assert run.first("activation") == [77] * 4
    assert all(rank.collected["param"][-1] == 76 for rank in run.ranks)
    run.file.write_text("kinds: [param]\nat_step: 77\n")
    run.train(40)
    # A step that is over means: as soon as all can.
    assert len({rank.plan.config.text_hash for rank in run.ranks}) == 1
    assert run.ranks[0].collected["param"][-1] == run.ranks[0].current_step


def test_a_broken_edit_keeps_the_old_config_and_says_so_once(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [param]\nblack_bocks: true\n")
    run.train(20)

    assert run.commands() == []
    assert 'monitor.yaml:2: unknown key "black_bocks"; did you mean "black_box"?' in run.edits.state.problem
    assert [entry[2] for entry in run.audit] == ["config.broken"]
    assert run.edits.counts["broken"] == 1
    assert run.ranks[0].collected["param"] == list(range(11, 41))
    run.file.write_text("kinds: [param, wgrad]\n")
    run.train(20)
    assert run.edits.state.problem == ""
    assert len(run.commands()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kinds: [param]\nrun: other\n", 'monitor.yaml:2: run cannot change while the run trains: it is "first", the file'),
        ("kinds: [param]\n", "run cannot change while the run trains"),
        ("run: first\nkinds: [param, wgrad]\nspool:\n  file_bytes: 100000\n", "monitor.yaml:3: spool cannot change"),
        ("run: first\nallow_commands: []\n", "monitor.yaml:2: allow_commands cannot change"),
        ("", "the file is empty"),
        ("run: first\nkinds: [parm]\n", "monitor.yaml:2: kinds[0]: unknown kind 'parm'; did you mean \"param\"?"),
        ("run: first\ncollect_times: 0\n", "monitor.yaml:2: collect_times must be at least 1"),
        ("run: first\nkinds: [param", "monitor.yaml:2: not YAML: expected"),
        ("run: first\nkinds: " + "[" * 3000, "monitor.yaml:2: nested too deeply"),
        ("run: first\nrun: second\n", 'monitor.yaml:2: key "run" is there twice, first on line 1'),
        ("run: first\nmax_overhead: .nan\n", "monitor.yaml:2: max_overhead: expected a finite number, got .nan"),
        ("run: first\nnotify: {}\n", 'monitor.yaml:2: unknown key "notify"; it is a key of the daemon'),
        ("run: first\nkindz: []\nstep_interval: x\n", '"kinds"?; '),
        ("---\n", "the file is empty"),
    ],
)
def test_what_cannot_be_followed_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    run = Run(tmp_path, "run: first\nkinds: [param]\n")
    run.train(10)
    run.file.write_text(text)
    run.train(20)

    assert said in run.edits.state.problem
    if "cannot change" in said:
        assert "may change: enabled, kinds" in run.edits.state.problem
    assert run.commands() == []
    assert {rank.plan.config.measurement.kinds for rank in run.ranks} == {("param",)}


def test_a_torn_edit_counts_when_it_stands_still(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    for cut in range(1, 40, 3):  # Faster than it could stand still: some of these cuts are valid YAML.
        run.file.write_text("kinds:\n- param\n- activation\n- wgrad\nstep_interval: 2\n"[: cut + 10])
        run.train(2)
    run.file.write_text("kinds:\n- param\n- activation\n- wgrad\nstep_interval: 2\n")
    run.train(30)

    [command] = run.commands()
    assert command["settings"]["kinds"] == ["param", "activation", "wgrad"]
    assert run.edits.counts["broken"] == 0


def test_an_edit_back_to_the_old_text_is_an_edit(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.train(30)
    run.file.write_text("kinds: [param]\n")
    run.train(30)

    assert [one["state"] for one in run.commands()] == ["ended", "ended"]
    steps = run.ranks[3].collected
    assert steps["activation"][-1] + 1 == run.commands()[1]["at_step"]
    assert all(rank.collected == steps for rank in run.ranks)


def test_an_edit_taken_back_before_its_step_is_withdrawn(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\nat_step: 500\n")
    run.train(20)
    assert [one["state"] for one in run.commands()] == ["armed"]
    run.file.write_text("kinds: [param]\n")
    run.train(30)

    assert run.commands()[0]["state"] == "withdrawn"
    assert [one["type"] for one in run.commands()] == ["ChangeConfig", "WithdrawCommand"]
    for rank in run.ranks:
        rank.current_step = 498
    run.train(5)
    assert not any("activation" in rank.collected for rank in run.ranks)


def test_a_file_that_is_deleted_and_made_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.unlink()
    run.train(30)
    assert "cannot be read: No such file" in run.edits.state.problem
    assert [entry[2] for entry in run.audit] == ["config.unreadable"]

    run.file.write_text("kinds: [param]\n")
    run.train(10)
    assert (run.edits.state.problem, run.commands()) == ("", [])
    run.file.unlink()
    run.train(2)
    run.file.write_text("kinds: [wgrad]\n")
    run.train(20)
    assert len(run.commands()) == 1
    assert {rank.plan.config.measurement.kinds for rank in run.ranks} == {("wgrad",)}


def test_a_swapped_link_is_an_edit(tmp_path: Path) -> None:
    # As Kubernetes does with a ConfigMap: config -> ..data/config, ..data -> a folder that is swapped whole.
    for name, text in (("v1", "kinds: [param]\n"), ("v2", "kinds: [wgrad]\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "monitor.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "linked.yaml").symlink_to("..data/monitor.yaml")
    run = Run(tmp_path, "")
    run.file = tmp_path / "linked.yaml"
    run.start()
    run.train(10)
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    run.train(20)

    assert len(run.commands()) == 1
    assert run.first("wgrad") == [run.commands()[0]["at_step"]] * 4


def test_a_restarted_trainer_reads_the_file_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.train(30)
    former = run.commands()
    run.start(step=5)
    run.train(100)

    assert run.commands() == former
    assert [list(rank.collected) for rank in run.ranks] == [["activation"]] * 4
    # The command of the former attempt named a step that comes again; it is not obeyed again.
    assert all(rank.plan.config.num_collected == 100 for rank in run.ranks)


def test_what_the_file_said_before_the_trainer_was_restarted_is_no_edit(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")  # Edited while nobody trains; the daemon last read another text.
    run.start(step=5)
    run.train(50)

    assert run.commands() == []
    assert [list(rank.collected) for rank in run.ranks] == [["activation"]] * 4


def test_a_restarted_daemon_neither_loses_nor_repeats_an_edit(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [wgrad]\n")
    for _ in range(40):  # Killed at every step of the way.
        run.start_daemon(run.kill_daemon())
        run.turn()
        run.now += 0.5
        run.train(1)
    assert [one["state"] for one in run.commands()] == ["ended"]
    run.start_daemon()  # Even its memory is gone.
    run.train(20)
    assert len(run.commands()) == 1

    kept = run.kill_daemon()
    run.file.write_text("kinds: [activation]\n")
    run.start_daemon(kept)
    run.train(30)
    assert [rank.plan.config.measurement.kinds for rank in run.ranks] == [("activation",)] * 4
    assert len(run.commands()) == 2


def test_an_edit_that_came_too_late_for_one_rank_is_withdrawn_for_all_and_ordered_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    while not run.commands():
        run.train(1, deaf=(2,))
    run.train(20, deaf=(2,))
    assert not any("activation" in rank.collected for rank in run.ranks[2:3])
    run.train(60)

    states = [one["state"] for one in run.commands() if one["type"] == "ChangeConfig"]
    assert states[-1] == "ended"
    last = [one for one in run.commands() if one["type"] == "ChangeConfig"][-1]
    # From the last order on all of them measure alike, whatever the first one did to some.
    after = [[step for step in rank.collected["activation"] if step >= last["at_step"]] for rank in run.ranks]
    assert after == [list(range(last["at_step"], run.ranks[0].current_step + 1))] * 4
    assert {rank.plan.config.num_collected for rank in run.ranks} == {len(after[0])}


def test_a_rank_that_never_obeys_is_given_up_and_said(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.train(600, deaf=(2,))

    assert sum(one["type"] == "ChangeConfig" for one in run.commands()) == MAX_TRIES
    assert f"ordered {MAX_TRIES} times, not in force everywhere" in run.edits.state.problem
    assert run.edits.counts["given_up"] == 1


def test_a_trainer_that_allows_no_changes_refuses_them(tmp_path: Path) -> None:
    text = "allow_commands: [EnableMonitoring]\n"
    run = Run(tmp_path, text)
    run.train(10)
    run.file.write_text(text + "kinds: [activation]\n")
    run.train(60)

    assert sum(one["type"] == "ChangeConfig" for one in run.commands()) == 1
    assert "the edit was refused" in run.edits.state.problem
    assert not any("activation" in rank.collected for rank in run.ranks)


def test_collect_times_end_and_an_edit_begins_them_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\ncollect_times: 5\nstep_interval: 2\n")
    run.train(30)
    assert run.ranks[0].collected["param"] == [12, 14, 16, 18, 20]
    run.file.write_text("# again\nkinds: [param]\ncollect_times: 5\nstep_interval: 2\n")
    run.train(40)

    [command] = run.commands()
    assert command["changed"] == ()
    first = command["at_step"] + command["at_step"] % 2
    assert [rank.collected["param"][5:] for rank in run.ranks] == [list(range(first, first + 10, 2))] * 4


def test_a_file_of_another_host_is_not_taken_for_the_trainers(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.file.write_text("kinds: [wgrad]\n")  # What lies under this name where the daemon runs.
    run.start_daemon(host="elsewhere")
    run.train(20)
    assert run.commands() == []
    assert "on another host" in run.audit[-1][3]["problem"]

    run.file.write_text("kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.train(20)
    assert len(run.commands()) == 1


def test_ranks_with_config_files_of_their_own_are_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    (tmp_path / "other.yaml").write_text("kinds: [wgrad]\n")
    run.ranks[1] = Rank(run.dir, read_source(tmp_path / "other.yaml"), 1, 10, 0)
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.train(20)

    assert run.commands() == []
    assert "the ranks read 2 config files" in run.audit[-1][3]["problem"]


@pytest.mark.parametrize(("mode", "said"), [(0o646, "everybody may write"), (0o000, "Permission denied")])
def test_a_file_that_strangers_may_write_is_not_followed(tmp_path: Path, mode: int, said: str) -> None:
    run = Run(tmp_path, "kinds: [param]\n")
    run.train(10)
    run.file.write_text("kinds: [activation]\n")
    run.file.chmod(mode)
    if mode == 0 and os.access(run.file, os.R_OK):
        pytest.skip("root may read everything")
    run.train(40)

    assert run.commands() == []
    assert said in run.edits.state.problem


def test_switches_of_the_daemon(tmp_path: Path) -> None:
    dry = Run(tmp_path, "kinds: [param]\n", ControlConfig(dry_run=True))
    dry.train(10)
    dry.file.write_text("kinds: [activation]\n")
    dry.train(30)
    assert dry.commands() == []
    assert dry.run_commands.audit.counts["dry_run"] == 1

    deaf = Run(tmp_path, "kinds: [param]\n", ControlConfig(follow_config=False))
    deaf.train(10)
    deaf.file.write_text("kinds: [activation]\n")
    deaf.train(30)
    assert (deaf.commands(), deaf.edits.state.problem) == ([], "")


def test_edits_are_rate_limited_and_the_newest_waits(tmp_path: Path) -> None:
    run = Run(tmp_path, "kinds: [param]\n", ControlConfig(max_edits_per_hour=2))
    run.train(10)
    for number in range(4):
        run.file.write_text(f"kinds: [wgrad]\nstart_step: {number}\n")
        run.train(25)
    assert len(run.commands()) == 2
    assert "2 edits in the last hour" in run.edits.state.problem
    run.now += 3600
    run.train(25)

    assert len(run.commands()) == 3
    assert {rank.plan.config.measurement.start_step for rank in run.ranks} == {3}
