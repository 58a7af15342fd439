"""Desk and policy against the trainer's own code that reads and obeys commands, without training anything."""

import pytest

from sentinel.anomaly import Anomaly, Severity
from sentinel.collect.schedule.command_inbox import CommandInbox
from sentinel.collect.schedule.plan import Plan
from sentinel.control.commands import RunCommands
from sentinel.control.config import ControlConfig
from sentinel.control.policy import MAX_REISSUES, Escalator
from sentinel.control.proposal import Proposal, RuleAlarm, propose
from sentinel.monitor_config import MonitorConfig
from sentinel.place import Place
from sentinel.record import Kind
from sentinel.wire.control_folder import ControlFolder


class Rank:
    """What a monitor does with commands: the writer thread's look, and the training thread's step."""

    def __init__(self, run_dir, place, step):
        self.place, self.current_step = place, step
        self.plan = Plan(MonitorConfig())
        self.refused, self.answers = [], []
        self.folder = ControlFolder(run_dir / "control", self.refused.append)
        self.orders = CommandInbox(
            ("EnableMonitoring", "DisableMonitoring"),
            self.plan,
            step=lambda: self.current_step,
            rank=lambda: place.rank,
            acknowledge=self.answers.append,
        )
        self.measured = []
        self.num_looks = 0

    def look(self):
        self.num_looks += 1
        for command in self.folder.poll(10**18 + self.num_looks * 10**10):
            answer = self.orders.receive(command)
            if answer is not None:
                self.answers.append(answer)

    def step(self):
        self.current_step += 1
        self.plan.requests.expire(self.current_step)
        self.orders.apply(self.current_step)
        if self.plan.takes(Kind.ACTIVATION):
            self.measured.append(self.current_step)


class Run:
    def __init__(self, run_dir, steps, step_time_s=0.1):
        self.places = {
            rank: Place(rank=rank, world_size=4, pp_rank=rank // 2, pp_size=2, dp_rank=rank % 2, dp_size=2)
            for rank in range(4)
        }
        self.ranks = [Rank(run_dir, self.places[rank], step) for rank, step in enumerate(steps)]
        self.audit = []
        self.run_commands = RunCommands(run_dir, audit=lambda *entry: self.audit.append(entry))
        self.escalator = Escalator(ControlConfig(latency_s=0.15), self.run_commands, lambda *entry: self.audit.append(entry))
        self.step_time_s, self.now = step_time_s, 1000.0

    def newest(self):
        return max(rank.current_step for rank in self.ranks) - 1

    def escalate(self):
        anomaly = Anomaly(
            id="a1", run="r", attempt=0, rank=3, step=self.newest(), micro_step=0, pp_stage=1, vpp_stage=0, call_id=1,
            tag_name="blocks.1", kind="activation", statistic="nans", rule="nan", detector="AnomalyNan",
            severity=Severity.CRITICAL, value=1.0, segment="blocks.1", pp_size=2,
        )  # fmt: skip
        proposal = propose([anomaly], {"nan": ("escalate",)}, self.places)
        [command] = self.escalator.consider(proposal, newest_step=self.newest(), step_time_s=self.step_time_s, now=self.now)
        return command

    def turn(self):
        """The daemon reads the spools, and acts."""
        for number, rank in enumerate(self.ranks):
            for ack in rank.answers:
                self.run_commands.acknowledge(number, ack, self.now)
            rank.answers.clear()
        ended = {number: rank.current_step - 1 for number, rank in enumerate(self.ranks)}
        changed = self.run_commands.tick(ended, self.now)
        self.escalator.follow(changed, newest_step=self.newest(), step_time_s=self.step_time_s, now=self.now)

    def train(self, num_steps, deaf=()):
        for _ in range(num_steps):
            self.now += self.step_time_s
            for number, rank in enumerate(self.ranks):
                if number not in deaf:
                    rank.look()
            self.turn()
            for rank in self.ranks:
                rank.step()
            self.turn()


@pytest.mark.parametrize("skew", [(0, 0, 0, 0), (1, 0, 1, 0)])
def test_command_obeyed_at_one_step(tmp_path, skew):
    run = Run(tmp_path, [50 + one for one in skew])

    command = run.escalate()
    run.train(40)

    assert command.ranks == (2, 3)
    steps = list(range(command.at_step, command.at_step + 20))
    assert [rank.measured for rank in run.ranks] == [[], [], steps, steps]
    assert run.run_commands.audit.counts["ended"] == 1
    assert [rank.refused for rank in run.ranks] == [[], [], [], []]


def test_late_command_is_withdrawn_and_its_successor_is_obeyed_at_one_step(tmp_path):
    run = Run(tmp_path, [50, 50, 50, 50])
    run.ranks[2].current_step = 80  # A rank that is far ahead of what the daemon knew.
    asking = RuleAlarm(rule="nan", detector="AnomalyNan", severity=Severity.CRITICAL, actions=("escalate",))
    [first] = run.escalator.consider(
        Proposal(key="k", run="r", attempt=0, step=50, ranks=(2, 3), alarms=(asking,)),
        newest_step=50,
        step_time_s=run.step_time_s,
        now=run.now,
    )
    run.ranks[3].current_step = 51

    run.train(1)
    run.ranks[3].current_step = run.ranks[2].current_step
    run.train(40)

    states = {status.command.id: status.state for status in run.run_commands.known.statuses()}
    assert states[first.id] == "withdrawn"
    second = run.run_commands.known.find("k:again1").command
    steps = list(range(second.at_step, second.at_step + 20))
    assert [rank.measured for rank in run.ranks[2:]] == [steps, steps]
    assert run.escalator.latency_s == pytest.approx(0.3)


def test_a_rank_that_is_deaf_leaves_a_partial_command_and_is_not_asked_for_ever(tmp_path):
    run = Run(tmp_path, [50, 50, 50, 50])

    command = run.escalate()
    run.train(200, deaf=(3,))

    assert run.run_commands.audit.counts["partial"] == 1 + MAX_REISSUES
    measured = run.ranks[2].measured
    assert measured[:20] == list(range(command.at_step, command.at_step + 20))
    assert len(set(measured)) <= 20 * (1 + MAX_REISSUES)
    assert run.ranks[3].measured == []


def test_a_rank_that_was_deaf_for_a_while_is_measured_as_soon_as_it_hears(tmp_path):
    run = Run(tmp_path, [50, 50, 50, 50])

    command = run.escalate()
    run.train(10, deaf=(3,))
    run.train(60)

    [first, *_] = run.ranks[3].measured
    assert command.at_step < first < command.at_step + 30
    assert run.ranks[3].measured == list(range(first, first + 20))
    assert set(range(command.at_step, first + 20)) == set(run.ranks[2].measured)


def test_a_fault_that_comes_back_is_seen_with_monitoring_on(tmp_path):
    run = Run(tmp_path, [50, 50, 50, 50])

    command = run.escalate()
    run.train(5)
    # The fault comes back every few steps: within the window, and sooner than it closes.
    assert command.at_step <= 53
    assert all(step in run.ranks[3].measured for step in range(command.at_step, 56))
    assert run.run_commands.known.is_on(run.newest())
