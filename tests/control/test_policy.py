import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.control.commands import RunCommands
from sentinel.control.policy import DUMP, ControlConfig, Escalator, Proposal, blast_radius, first_step, propose
from sentinel.errors import ConfigError
from sentinel.messages import Ack
from sentinel.place import Place

from ..support.anomalies import a_nan

ACTIONS = {"loss-spike": ("notify", "escalate"), "nan": ("escalate",), "norm": ("notify",)}


def places(pp_size, dp_size, vpp_size=1, schedule="1f1b"):
    """Ranks with the pipeline outermost, as Megatron lays them out."""
    world = pp_size * dp_size
    return {
        rank: Place(
            rank=rank, world_size=world, dp_rank=rank % dp_size, dp_size=dp_size, pp_rank=rank // dp_size,
            pp_size=pp_size, vpp_size=vpp_size, schedule=schedule,
        )
        for rank in range(world)
    }  # fmt: skip


def on_stage_1(kind="activation", name="blocks.3", **changes):
    """A NaN of stage 1 of 4, unless said."""
    usual = {"id": "a1", "rank": 2, "micro_step": 1, "pp_stage": 1, "pp_size": 4, "call_id": 7, "segment": "blocks.3"}
    return a_nan(kind, name, 40, **(usual | changes))


LOSS = on_stage_1("scalar", "loss", id="a2", rule="loss-spike", rank=None, pp_stage=0, segment="")


def test_the_blast_radius_is_the_suspected_stage_on_all_its_replicas():
    proposal = propose([on_stage_1(), LOSS], ACTIONS, places(4, 2))

    assert proposal.ranks == (2, 3)
    assert proposal.targets == ()
    assert "suspected in blocks.3" in proposal.reason
    assert Proposal.read(proposal.body) == proposal


@pytest.mark.parametrize(
    ("suspect", "expected"),
    [
        (on_stage_1(segment=""), (0, 1, 2, 3, 4, 5)),
        (on_stage_1(pp_stage=3), (6, 7)),
        (on_stage_1(pp_stage=3, segment=""), (4, 5, 6, 7)),
        (on_stage_1(pp_stage=0), (0, 1)),
    ],
)
def test_without_a_segment_the_neighbours_are_suspected_too(suspect, expected):
    assert blast_radius([suspect], places(4, 2)) == expected


def test_neighbours_are_neighbours_in_depth_where_the_pipeline_folds():
    v_shaped = places(2, 1, vpp_size=2, schedule="zbv")

    # Depths run 0, 1 up and 2, 3 back down: rank 1 holds depths 1 and 2, rank 0 holds 0 and 3.
    assert blast_radius([on_stage_1(pp_size=2, pp_stage=1, vpp_stage=0)], v_shaped) == (1,)
    assert blast_radius([on_stage_1(pp_size=2, pp_stage=0, vpp_stage=1)], v_shaped) == (0,)


def test_a_bad_loss_alone_suspects_everything():
    assert propose([LOSS], ACTIONS, places(4, 2)).ranks == ()


def test_all_ranks_are_said_as_none():
    assert blast_radius([on_stage_1(pp_size=1, pp_stage=0)], places(1, 4)) == ()


def test_first_causes_decide_whom_to_suspect():
    first, victim = on_stage_1(), on_stage_1(id="a9", pp_stage=3, rule="norm")

    assert propose([victim, first, LOSS], ACTIONS, places(4, 2), first_causes={"a1"}).ranks == (2, 3)


@pytest.mark.parametrize("quiet", [on_stage_1(rule="norm"), on_stage_1(event="end"), on_stage_1(rule="unknown")])
def test_only_onsets_of_rules_that_ask_escalate(quiet):
    assert propose([quiet], ACTIONS, places(4, 2)) is None
    assert propose([], ACTIONS, places(4, 2)) is None


@pytest.mark.parametrize(
    ("step_time_s", "latency_s", "expected"), [(10.0, 0.15, 102), (0.1, 0.15, 103), (0.05, 0.25, 106), (None, 0.1, 102)]
)
def test_the_first_step_leaves_time_to_read_the_command(step_time_s, latency_s, expected):
    assert first_step(100, step_time_s, latency_s) == expected


class Bench:
    def __init__(self, tmp_path, **config):
        self.entries = []
        self.run_commands = RunCommands(tmp_path, audit=self.note)
        self.escalator = Escalator(ControlConfig(**config), self.run_commands, self.note)
        self.now = 1000.0

    def note(self, time, actor, action, details):
        self.entries.append((action, details))

    def consider(self, number=1, newest_step=40, ranks=()):
        proposal = Proposal(key=f"k{number}", run="r", attempt=0, step=newest_step, ranks=ranks, reason="why")
        return self.escalator.consider(proposal, newest_step=newest_step, step_time_s=0.1, now=self.now)

    def answer(self, command, state, rank=0):
        self.run_commands.acknowledge(rank, Ack(command=command.id, state=state, step=0), self.now)

    def tick(self, ended):
        changed = self.run_commands.tick(ended, self.now)
        return self.escalator.follow(changed, newest_step=max(ended.values()), step_time_s=0.1, now=self.now)

    def why_not(self):
        return [details["why"] for action, details in self.entries if action == "not_escalated"]


def test_an_escalation_is_a_command_on_paper(tmp_path):
    bench = Bench(tmp_path)

    command = bench.consider(ranks=(2, 3))

    assert command.at_step == 43
    assert command.kinds == ("activation", "activation_in", "dgrad", "dgrad_in")
    assert (command.ranks, command.for_steps, command.per_micro_step) == ((2, 3), 20, True)
    assert (tmp_path / "control" / "000001.json").exists()


def test_a_proposal_repeated_by_a_crash_is_one_command(tmp_path):
    bench = Bench(tmp_path)

    assert bench.consider(1) is not None
    assert bench.consider(1) is None
    after = Bench(tmp_path)
    after.run_commands.load(bench.run_commands.dump())
    assert after.consider(1) is None

    assert len(list((tmp_path / "control").iterdir())) == 1


def test_while_monitoring_is_on_there_the_same_is_not_asked_again(tmp_path):
    bench = Bench(tmp_path)
    bench.consider(1, ranks=(2, 3))

    assert bench.consider(2, newest_step=45, ranks=(2,)) is None
    assert bench.why_not() == ["monitoring is on"]
    assert bench.consider(3, newest_step=45, ranks=(4,)) is not None


def test_a_fault_that_comes_back_after_the_end_is_looked_for_again_and_longer(tmp_path):
    bench = Bench(tmp_path, cooldown_s=10.0)
    first = bench.consider(1)
    bench.answer(first, "armed")
    bench.tick({0: 40})
    bench.answer(first, "applied")
    bench.tick({0: 43})
    bench.tick({0: 63})

    assert bench.consider(2, newest_step=70) is None
    assert bench.why_not() == ["cooling down"]
    bench.now += 10.1
    second = bench.consider(3, newest_step=80)

    assert second.for_steps == 40


def test_a_command_that_came_too_late_is_issued_anew_with_more_time(tmp_path):
    bench = Bench(tmp_path)
    first = bench.consider()
    bench.answer(first, "missed")

    issued = bench.tick({0: 45})

    assert [command.at_step for command in issued] == [first_step(45, 0.1, 0.3)]
    assert bench.escalator.latency_s == 0.3
    bench.answer(issued[0], "armed")
    assert bench.tick({0: 46}) == []
    assert bench.run_commands.counts["withdrawn"] == 1


def test_reissues_end(tmp_path):
    bench = Bench(tmp_path)
    command = bench.consider()
    num_issued = 1
    for step in range(50, 500, 50):
        bench.answer(command, "missed")
        issued = bench.tick({0: step})
        if not issued:
            break
        command, num_issued = issued[0], num_issued + 1

    assert num_issued == 4


def test_escalations_are_limited_by_the_hour(tmp_path):
    bench = Bench(tmp_path, max_per_hour=2, cooldown_s=0.0)
    asked = [bench.consider(number, newest_step=40 + 1000 * number) for number in range(4)]

    assert [command is not None for command in asked] == [True, True, False, False]
    assert bench.why_not() == ["2 escalations in the last hour"]
    bench.now += 3601.0
    assert bench.consider(9, newest_step=9000) is not None


def test_a_dry_run_writes_no_command(tmp_path):
    bench = Bench(tmp_path, dry_run=True)

    assert bench.consider() is None
    assert not (tmp_path / "control").exists()
    assert bench.run_commands.counts["dry_run"] == 1
    assert [action for action, _ in bench.entries] == ["command.dry_run"]


def test_switched_off_nothing_is_asked(tmp_path):
    bench = Bench(tmp_path, escalate=False)

    assert bench.consider() is None
    assert bench.why_not() == ["control.escalate is off"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ("activations",)}, "control.kinds"),
        ({"kinds": ()}, "control.kinds"),
        ({"for_steps": 0}, "control.for_steps must be at least 1, got 0"),
        ({"latency_s": 0.0}, "control.latency_s"),
        ({"expires_s": 0.0}, "control.expires_s"),
    ],
)
def test_nonsense_is_refused_by_its_path(change, message):
    with pytest.raises(ConfigError, match=message):
        ControlConfig(**change)


def test_lone_excursion_that_is_only_info_does_not_escalate():
    quiet = on_stage_1(severity=Severity.INFO)

    assert propose([on_stage_1()], ACTIONS, places(4, 2)) is not None
    assert propose([quiet], ACTIONS, places(4, 2)) is None


def a_dump(number=1, **changes):
    actions = {"nan": ("dump",)}
    made = propose([on_stage_1(**changes)], actions, places(4, 2), action=DUMP)
    return msgspec.structs.replace(made, key=f"{made.key}:{number}")


def test_a_rule_may_ask_for_raw_tensors_of_the_suspected_stage(tmp_path):
    bench = Bench(tmp_path, dump_kinds=("wgrad",), dump_first_n=8, dump_for_steps=2)
    proposal = a_dump()

    command = bench.escalator.consider(proposal, newest_step=40, step_time_s=0.1, now=bench.now)

    assert propose([on_stage_1()], {"nan": ("dump",)}, places(4, 2)) is None  # It asks for nothing else.
    assert Proposal.read(proposal.body) == proposal
    assert (command.kinds, command.first_n, command.for_steps, command.ranks) == (("wgrad",), 8, 2, (2, 3))
    assert command.at_step == 43
    assert bench.escalator.consider(proposal, newest_step=40, step_time_s=0.1, now=bench.now + 100) is None


def test_a_dump_that_came_too_late_is_ordered_anew_with_more_time_and_not_for_ever(tmp_path):
    bench = Bench(tmp_path)
    command = bench.escalator.consider(a_dump(), newest_step=40, step_time_s=0.1, now=bench.now)
    at_steps = [command.at_step]
    for step in range(50, 500, 50):
        bench.answer(command, "missed")
        issued = bench.tick({2: step, 3: step})
        if not issued:
            break
        command = issued[0]
        at_steps.append(command.at_step)

    assert at_steps == [43, first_step(50, 0.1, 0.3), first_step(100, 0.1, 0.6), first_step(150, 0.1, 1.2)]
    assert (command.kinds, command.ranks, command.for_steps) == (("param", "wgrad"), (2, 3), 1)


def test_a_dump_that_was_obeyed_is_not_repeated(tmp_path):
    bench = Bench(tmp_path)
    command = bench.escalator.consider(a_dump(), newest_step=40, step_time_s=0.1, now=bench.now)
    for state in ("armed", "applied", "ended"):
        for rank in (2, 3):
            bench.answer(command, state, rank)
        assert bench.tick({2: 44, 3: 44}) == []

    assert bench.run_commands.known.find(a_dump().key).state == "ended"


def test_dumps_are_few_and_never_in_the_way_of_monitoring(tmp_path):
    bench = Bench(tmp_path, max_dumps_per_hour=2, cooldown_s=10.0)
    issued = []
    for number in range(6):
        one = bench.escalator.consider(a_dump(number), newest_step=40, step_time_s=0.1, now=bench.now)
        issued.append(one is not None)
        bench.now += 6.0

    assert issued == [True, False, True, False, False, False]
    bench.tick({0: 100})
    assert bench.consider(7, newest_step=100) is not None  # Neither "monitoring is on" nor "cooling down".


@pytest.mark.parametrize("config", [{"dump": False}, {"dry_run": True}])
def test_dumps_may_be_forbidden(tmp_path, config):
    bench = Bench(tmp_path, **config)

    assert bench.escalator.consider(a_dump(), newest_step=40, step_time_s=0.1, now=bench.now) is None
    assert not list(tmp_path.glob("control/*.json"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"dump_kinds": ()}, "control.dump_kinds"), ({"dump_kinds": ("loss",)}, "control.dump_kinds"),
        ({"dump_for_steps": 0}, "control.dump_for_steps"), ({"dump_first_n": 0}, "control.dump_first_n"),
        ({"max_dumps_per_hour": -1}, "control.max_dumps_per_hour"),
    ],
)  # fmt: skip
def test_nonsense_about_dumps_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        ControlConfig(**config)
