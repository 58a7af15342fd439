"""The one mechanism: what config, code and commands want of a step, together; and which hooks are there for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import sentinel
from sentinel.collect.monitor import Monitor
from sentinel.collect.rows.tensor_table import TensorEntry
from sentinel.collect.schedule.config_edits import ConfigEdits
from sentinel.collect.schedule.plan import Plan
from sentinel.collect.schedule.wishes import unmatched
from sentinel.command import ChangeConfig, DisableMonitoring, EnableMonitoring, WithdrawCommand
from sentinel.config_file import STABLE_S
from sentinel.messages import Ack
from sentinel.monitor_config import Measurement, MonitorConfig, ProbeSchedule, as_reported, read_source
from sentinel.record import Kind

from ...support.nets import TinyModel, loss_of
from ...support.spools import Said

NUM_STEPS = 12


def measured(plan: Plan, first: int, num_steps: int, kind: Kind = Kind.PARAM) -> list[int]:
    found = []
    for step in range(first, first + num_steps):
        plan.requests.expire(step)
        plan.begin(step)
        if plan.takes(kind):
            found.append(step)
    return found


def wish(**keys: Any) -> Measurement:
    return Measurement(kinds=("param",), **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, list(range(12))),
        ({"enabled": False}, []),
        ({"ranks": (3,)}, list(range(12))),
        ({"ranks": (0, 1)}, []),
        ({"start_step": 5}, list(range(5, 12))),
        ({"start_step": 5, "step_interval": 3}, [5, 8, 11]),
        ({"start_step": 5, "step_interval": 3, "collect_times": 2}, [5, 8]),
        ({"collect_times": 4}, [0, 1, 2, 3]),
    ],
)
def test_a_config_says_which_steps_are_its_own(keys: dict[str, Any], expected: list[int]) -> None:
    plan = Plan(wish(**keys), rank=lambda: 3)

    assert measured(plan, 0, NUM_STEPS) == expected


def test_collect_times_count_measured_steps_also_when_they_come_again() -> None:
    plan = Plan(wish(collect_times=5))

    # The trainer went back to an older checkpoint after step 2.
    assert measured(plan, 0, 3) + measured(plan, 1, 9) == [0, 1, 2, 1, 2]


def test_an_edit_counts_anew_and_leaves_requests_alone() -> None:
    plan = Plan(wish(collect_times=2))
    plan.requests.enable(["wgrad"], None, per_micro_step=False, for_steps=6, first_step=0)

    assert measured(plan, 0, 3) == [0, 1]
    plan.change(wish(collect_times=2, start_step=4), "hash")
    assert measured(plan, 3, 2, Kind.WGRAD) == [3, 4]
    assert measured(plan, 5, 5) == [5]
    assert not plan.requests.all
    assert plan.config.is_exhausted


def test_a_request_measures_every_step_whatever_the_configs_interval() -> None:
    plan = Plan(wish(step_interval=5))
    plan.requests.enable(["activation"], ["a"], per_micro_step=False, for_steps=3, first_step=1)
    seen = []
    for step in range(7):
        plan.requests.expire(step)
        plan.begin(step)
        seen.append((plan.takes(Kind.ACTIVATION), plan.takes(Kind.PARAM), plan.is_due))

    on, both, off = (True, False, True), (True, True, True), (False, False, False)
    assert seen == [both, on, on, on, off, (False, True, True), off]


def test_a_command_switches_off_nothing_that_the_config_wants() -> None:
    plan = Plan(wish())
    plan.requests.enable(["param", "wgrad"], None, per_micro_step=False, for_steps=None, first_step=0)

    plan.disable(frozenset(Kind), (), from_code=False)

    assert measured(plan, 0, 2) == [0, 1]
    assert not plan.takes(Kind.WGRAD)
    plan.disable(frozenset(Kind), (), from_code=True)
    assert measured(plan, 2, 2) == []
    # The newest wish counts: the file was edited after code had switched off.
    plan.change(wish(), "")
    assert measured(plan, 4, 2) == [4, 5]


def entry_of(name: str, kind: Kind, site_pos: int = 64) -> TensorEntry:
    entry = TensorEntry(0, name, kind, 0)
    entry.site_pos = site_pos
    return entry


def test_hooks_of_the_config_wait_between_its_steps_and_measure_nothing_for_a_request() -> None:
    plan = Plan(Measurement(kinds=("activation",), step_interval=4))
    ours, theirs = entry_of("b", Kind.ACTIVATION), entry_of("a", Kind.DGRAD)
    plan.begin(0)
    assert plan.wanted("a") and plan.wanted("b")
    assert plan.measures(ours)
    assert not plan.begin(1)
    assert plan.wanted("b") and not plan.measures(ours)
    plan.requests.enable(["dgrad"], ["a"], per_micro_step=False, for_steps=None, first_step=1)
    assert (plan.wanted("a"), plan.wanted("b")) == ({Kind.DGRAD, Kind.ACTIVATION}, {Kind.ACTIVATION})
    assert plan.measures(theirs) and not plan.measures(ours)
    assert not plan.begin(4)
    assert plan.measures(theirs) and plan.measures(ours)


def test_each_probe_has_its_own_schedule_and_targets() -> None:
    probes = {
        "exp_avg": ProbeSchedule(step_interval=3),
        "activation": ProbeSchedule(start_step=2, collect_times=2, targets=("a",)),
        "wgrad": ProbeSchedule(targets=("a.weight",)),
    }
    plan = Plan(Measurement(kinds=("param",), probes=probes))
    seen = {
        kind: measured(Plan(Measurement(kinds=("param",), probes=probes)), 0, 8, Kind.of(kind))
        for kind in (*probes, "param")
    }

    assert seen == {"exp_avg": [0, 3, 6], "activation": [2, 3], "wgrad": [*range(8)], "param": [*range(8)]}
    plan.begin(2)
    assert plan.measures(entry_of("a.fc", Kind.ACTIVATION)) and not plan.measures(entry_of("ab", Kind.ACTIVATION))
    assert plan.measures(entry_of("a.weight", Kind.WGRAD)) and not plan.measures(entry_of("a.bias", Kind.WGRAD))
    assert plan.measures(entry_of("a.bias", Kind.PARAM))
    # Hooks go once nothing of a kind can become due by itself.
    assert plan.wanted("a") == {Kind.ACTIVATION}
    plan.begin(3)
    assert plan.begin(4)
    assert plan.wanted("a") == frozenset()


def test_staggered_tensors_take_turns_and_none_is_left_out() -> None:
    plan = Plan(Measurement(kinds=("activation",), stagger=8, step_interval=2))
    entries = [entry_of(f"m{at}", Kind.ACTIVATION, 64 * (at + 1)) for at in range(200)]
    turns: dict[str, list[int]] = {}
    sizes = []
    for step in range(32):
        plan.begin(step)
        now = [entry.name for entry in entries if plan.measures(entry)]
        sizes.append(len(now))
        for name in now:
            turns.setdefault(name, []).append(step)

    assert sizes[1::2] == [0] * 16
    assert set(turns) == {entry.name for entry in entries}
    assert all(len(steps) == 2 and steps[1] - steps[0] == 16 for steps in turns.values())
    assert max(sizes[::2]) <= 1.4 * 200 / 8


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("layers.1", {"layers.1", "layers.1.mlp"}),
        ("layers.*.mlp", {"layers.1.mlp", "layers.10.mlp"}),
        ("re:layers\\.1\\d(\\..*)?", {"layers.10", "layers.10.mlp", "layers.11"}),
        ("*", {"layers.1", "layers.1.mlp", "layers.10", "layers.10.mlp", "layers.11"}),
    ],
)
def test_targets_are_names_globs_and_regular_expressions(target: str, meant: set[str]) -> None:
    names = ["layers.1", "layers.1.mlp", "layers.10", "layers.10.mlp", "layers.11"]
    plan = Plan(Measurement(kinds=("activation",), targets=(target,)))
    plan.begin(0)

    assert {name for name in names if plan.measures(entry_of(name, Kind.ACTIVATION))} == meant
    assert {name for name in names if plan.wanted(name)} == meant


def test_an_index_picks_one_output() -> None:
    plan = Plan(Measurement(kinds=("activation",), targets=("lstm:1",)))
    plan.begin(0)

    assert [name for name in ("lstm:0", "lstm:1", "lstm:2") if plan.measures(entry_of(name, Kind.ACTIVATION))] == ["lstm:1"]
    # The only output of a module is its output 0.
    one = Plan(Measurement(kinds=("activation",), targets=("fc:0",)))
    one.begin(0)
    assert one.measures(entry_of("fc", Kind.ACTIVATION)) and not one.measures(entry_of("fc:1", Kind.ACTIVATION))


def test_a_target_that_means_nothing_is_named_with_its_neighbours() -> None:
    plan = Plan(
        Measurement(
            kinds=("activation",),
            targets=("layers.1.atn", "layers.0"),
            probes={"param": ProbeSchedule(targets=("head.wieght",))},
        )
    )
    modules, parameters = ["", "layers.0", "layers.1", "layers.1.attn"], ["head.weight", "layers.1.attn.q"]

    said = unmatched(plan.wishes, modules, parameters)

    assert len(said) == 2
    assert "layers.1.atn" in said[0] and "layers.1.attn" in said[0]
    assert "head.wieght" in said[1] and "head.weight" in said[1]


# In a trainer.


def num_hooks(model: nn.Module) -> dict[str, int]:
    """Hooks on every module that has any."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    counts = {name: sum(len(getattr(one, table)) for table in tables) for name, one in model.named_modules()}
    return {name: count for name, count in counts.items() if count}


class Training:
    """A tiny model in training, commands handed over as the writer thread hands them."""

    def __init__(self, run: Path, config: Any) -> None:
        self.run, self.model = run, TinyModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        monitor = sentinel.attach(self.model, self.optimizer, config)
        assert isinstance(monitor, Monitor)
        self.monitor = monitor
        self.step = 0

    def train(self, num_steps: int) -> list[int]:
        """Return how many modules inside the model carry hooks in each step."""
        inside = []
        for _ in range(num_steps):
            loss_of(self.model, self.step).backward()
            inside.append(sum(name != "" for name in num_hooks(self.model)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.rest()
        return inside

    def rest(self) -> None:
        """Let the writer catch up, so that no row is dropped on a busy machine."""
        assert self.monitor.session.handover.flush(60.0)

    def order(self, kind: Any, **keys: Any) -> Ack | None:
        answer = self.monitor.planning.inbox.receive(kind(seq=1, **keys))
        assert answer is None or isinstance(answer, Ack)
        return answer

    def change(self, at_step: int, name: str = "c", **keys: Any) -> Ack | None:
        settings = as_reported(MonitorConfig(**keys).measurement)
        return self.order(ChangeConfig, id=name, at_step=at_step, settings=settings, text_hash=name)

    def end(self) -> Said:
        self.monitor.detach()
        return Said(self.run)


def steps_of(said: Said, kind: str) -> list[int]:
    return [step for step in sorted(said.rows) if said.of(step, kind)]


def test_monitoring_that_is_off_has_no_hooks_installed(run: Path) -> None:
    off = Training(run, {"enabled": False, "black_box": False})
    bare = num_hooks(TinyModel())
    assert off.train(2) == [0, 0]
    # The chunk's own two hooks find the steps; nothing else is there.
    assert (bare, num_hooks(off.model)) == ({}, {"": 2})
    assert off.change(4, kinds=("activation", "dgrad"), collect_times=3, black_box=False) is not None

    counts = off.train(8)
    said = off.end()

    assert [count > 0 for count in counts] == [False, False, True, True, True, False, False, False]
    assert num_hooks(off.model) == {}
    assert steps_of(said, "activation") == steps_of(said, "dgrad") == [4, 5, 6]
    assert steps_of(said, "param") == []


def test_the_black_box_has_a_switch_of_its_own(run: Path) -> None:
    one = Training(run, {"enabled": False})
    assert one.train(2)[0] > 0
    one.change(3, "off", enabled=False, black_box=False)
    one.change(5, "on", enabled=False)

    counts = one.train(6)
    said = one.end()

    assert [count > 0 for count in counts] == [True, False, False, True, True, True]
    assert steps_of(said, "activation") == [0, 1, 2, 5, 6, 7]


def test_code_commands_and_config_meet_in_one_plan(run: Path) -> None:
    one = Training(run, {"kinds": ["param"], "black_box": False})
    one.train(2)
    one.monitor.enable(["dgrad"], for_steps=6)  # steps 2 to 7, while the config changes at 4 and a command comes at 5
    one.change(4, kinds=("wgrad",), black_box=False)
    one.order(EnableMonitoring, id="e", at_step=5, kinds=("activation",), for_steps=20)
    one.order(DisableMonitoring, id="d", at_step=7)

    one.train(8)
    said = one.end()

    assert steps_of(said, "param") == [0, 1, 2, 3]
    assert steps_of(said, "wgrad") == [4, 5, 6, 7, 8, 9]
    assert steps_of(said, "activation") == [5, 6]
    assert steps_of(said, "dgrad") == [2, 3, 4, 5, 6]  # a command to disable ends what was switched on, by whomever


def test_a_change_that_is_withdrawn_is_changed_back(run: Path) -> None:
    one = Training(run, {"kinds": ["param"], "black_box": False})
    one.change(2, kinds=("wgrad",), black_box=False)
    one.train(4)
    one.order(WithdrawCommand, id="w", withdraws="c")
    one.train(3)
    said = one.end()

    assert (steps_of(said, "param"), steps_of(said, "wgrad")) == ([0, 1, 4, 5, 6], [2, 3])


def test_what_is_in_force_is_said_in_the_descriptor(run: Path, tmp_path: Path) -> None:
    (tmp_path / "monitor.yaml").write_text("kinds: [param]\n")
    one = Training(run, tmp_path / "monitor.yaml")
    one.train(1)
    one.change(2, "edited", kinds=("wgrad",), collect_times=7)
    one.train(3)
    said = one.end()

    reported = said.descriptor
    assert reported is not None
    assert (reported.config_path, reported.config_hash) == (str(tmp_path / "monitor.yaml"), "edited")
    assert (reported.settings["kinds"], reported.settings["collect_times"]) == (["wgrad"], 7)
    assert msgspec.convert(reported.settings, MonitorConfig).max_rows == 65536


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"settings": {"kinds": ["nonsense"]}}, "unknown kind 'nonsense'"),
        ({"settings": {"kindz": []}}, 'unknown key "kindz"'),
        ({"settings": {"run": "other"}}, 'unknown key "run"'),
        ({"settings": {"step_interval": 0}}, "step_interval must be at least 1"),
    ],
)
def test_settings_that_nobody_can_obey_are_refused(run: Path, keys: dict[str, Any], reason: str) -> None:
    one = Training(run, None)
    answer = one.order(ChangeConfig, id="c", at_step=9, **keys)

    assert answer is not None
    assert answer.state == "refused"
    assert reason in answer.reason
    assert one.monitor.planning.plan.config.measurement.kinds == ("param", "wgrad")
    one.end()


def test_commands_of_another_attempt_are_not_for_us(run: Path) -> None:
    Training(run, None).end()
    second = Training(run, {"black_box": False})

    assert second.order(EnableMonitoring, id="old", at_step=3, kinds=("activation",), attempt=0) is None
    answer = second.order(EnableMonitoring, id="new", at_step=3, kinds=("dgrad",), attempt=1)
    assert answer is not None and answer.state == "armed"
    second.train(5)
    said = second.end()
    assert (steps_of(said, "activation"), steps_of(said, "dgrad")) == ([], [3, 4])


def test_allow_commands_can_leave_edits_out(run: Path) -> None:
    one = Training(run, {"allow_commands": ["EnableMonitoring"]})

    answer = one.change(5)

    assert answer is not None
    assert (answer.state, answer.reason) == ("refused", "ChangeConfig is not in allow_commands")
    one.end()


# Without a daemon.


class Alone:
    """A trainer whose file is looked at by hand."""

    def __init__(self, run: Path, tmp_path: Path, text: str) -> None:
        self.file = tmp_path / "monitor.yaml"
        self.file.write_text(text)
        self.training = Training(run, self.file)
        self.reported: list[tuple[str, str]] = []
        monitor = self.training.monitor
        self.edits = ConfigEdits(
            read_source(self.file), monitor.planning.inbox, lambda code, why, site: self.reported.append((code, why))
        )
        monitor.session.edits.stop()
        self.mono = 0.0

    def edit(self, **keys: Any) -> None:
        self.file.write_text(json.dumps(keys))
        self.look(3)

    def look(self, times: int) -> None:
        for _ in range(times):
            self.edits.turn(self.mono)
            self.mono += STABLE_S


def test_an_edit_that_names_a_future_step_needs_no_daemon(run: Path, tmp_path: Path) -> None:
    one = Alone(run, tmp_path, "kinds: [param]\nblack_box: false\n")
    one.training.train(2)
    one.edit(kinds=["wgrad"], black_box=False, at_step=4)
    one.training.train(4)
    one.look(5)
    said = one.training.end()

    assert (steps_of(said, "param"), steps_of(said, "wgrad")) == ([0, 1, 2, 3], [4, 5])
    assert one.reported == []


def test_an_edit_that_was_read_too_late_is_said(run: Path, tmp_path: Path) -> None:
    one = Alone(run, tmp_path, "kinds: [param]\nblack_box: false\n")
    one.training.train(5)
    one.edit(kinds=["wgrad"], black_box=False, at_step=4)
    one.training.train(2)
    said = one.training.end()

    assert [code for code, _ in one.reported] == ["config_missed"]
    assert "rank 0 read the edit" in one.reported[0][1]
    assert steps_of(said, "wgrad") == []


def test_an_edit_taken_back_before_its_step_is_forgotten(run: Path, tmp_path: Path) -> None:
    one = Alone(run, tmp_path, "kinds: [param]\nblack_box: false\n")
    one.training.train(2)
    one.edit(kinds=["wgrad"], black_box=False, at_step=4)
    one.edit(kindz=[])  # Broken: what was asked before stands.
    one.edit(kinds=["wgrad"], black_box=False, at_step=6)
    one.training.train(3)
    one.file.write_text("kinds: [param]\nblack_box: false\n")  # As it was at the start.
    one.look(3)
    one.training.train(3)
    said = one.training.end()

    assert (steps_of(said, "param"), steps_of(said, "wgrad")) == (list(range(8)), [])


def test_what_the_daemon_asks_goes_before_what_the_rank_reads(run: Path, tmp_path: Path) -> None:
    one = Alone(run, tmp_path, "kinds: [param]\nblack_box: false\n")
    one.training.train(2)
    one.edit(kinds=["wgrad"], black_box=False, at_step=4)
    text_hash = read_source(one.file).text_hash
    one.training.change(6, text_hash, kinds=("wgrad",), black_box=False)
    one.training.train(6)
    one.look(3)
    said = one.training.end()

    assert steps_of(said, "wgrad") == [6, 7]


def test_broken_and_unread_edits_are_said_once(run: Path, tmp_path: Path) -> None:
    one = Alone(run, tmp_path, "kinds: [param]\n")
    one.edit(kindz=["wgrad"], at_step=9)
    one.look(3)
    assert [code for code, _ in one.reported] == ["config_broken"]
    one.edit(kinds=["wgrad"], max_rows=2048, at_step=9)
    assert "max_rows cannot change while the run trains" in one.reported[-1][1]
    one.edit(kinds=["wgrad"])
    one.look(60)

    assert [code for code, _ in one.reported] == ["config_broken", "config_broken", "config_unread"]
    one.training.end()


def test_training_is_bit_identical_while_its_config_changes(run: Path) -> None:
    def trained(one: Training | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = TinyModel() if one is None else one.model
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if one is None else one.optimizer
        losses = []
        for step in range(12):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if one is not None:
                one.rest()
        return losses, [param.detach() for param in model.parameters()]

    state = TinyModel().state_dict()
    bare = trained(None)
    changing = Training(run, {"enabled": False, "black_box": False})
    everything = ("param", "wgrad", "activation", "activation_in", "dgrad", "dgrad_in")
    changing.change(2, "on", kinds=everything, collect_times=3)
    changing.change(7, "micro", kinds=everything, per_micro_step=True, step_interval=2)
    changing.change(10, "off", enabled=False, black_box=False)
    watched = trained(changing)
    said = changing.end()

    assert steps_of(said, "dgrad") == [2, 3, 4, 5, 6, 7, 8, 9]  # at borders; at every module where due
    assert steps_of(said, "wgrad") == [2, 3, 4, 8]
    for one, other in zip(bare, watched, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
