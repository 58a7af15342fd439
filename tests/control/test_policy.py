import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.command import RequestAction
from sentinel.control.commands import RunCommands
from sentinel.control.config import ControlConfig, PolicyConfig
from sentinel.control.policy import MAX_REISSUES, Escalator, first_step
from sentinel.control.proposal import Proposal, RuleAlarm, blast_radius, neighbours, propose
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
    assert proposal.reason(proposal.alarms[1]) == "loss-spike: loss nans at step 40, suspected in blocks.3"
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
def test_only_onsets_of_rules_that_ask_escalate(tmp_path, quiet):
    proposal = propose([quiet], ACTIONS, places(4, 2))

    assert proposal is None or not Bench(tmp_path).escalator.takes(proposal)
    assert propose([], ACTIONS, places(4, 2)) is None


@pytest.mark.parametrize(
    ("step_time_s", "latency_s", "expected"), [(10.0, 0.15, 102), (0.1, 0.15, 103), (0.05, 0.25, 106), (None, 0.1, 102)]
)
def test_the_first_step_leaves_time_to_read_the_command(step_time_s, latency_s, expected):
    assert first_step(100, step_time_s, latency_s) == expected


ASKING = RuleAlarm(rule="nan", detector="AnomalyNan", severity=Severity.CRITICAL, actions=("escalate",), what="why")


@pytest.mark.parametrize(
    ("latency_s", "begun_s", "expected"),
    [(0.06, 0.01, 101), (0.09, 0.02, 102), (0.1, 0.0, 101), (0.15, 0.09, 103), (0.1, 5.0, 102), (0.001, 0.0, 101)],
)
def test_a_step_whose_beginning_is_known_is_counted_to_its_end(latency_s, begun_s, expected):
    assert first_step(100, 0.1, latency_s, begun_s) == expected


class Bench:
    def __init__(self, tmp_path, **config):
        self.entries = []
        self.run_commands = RunCommands(tmp_path, audit=self.note)
        self.escalator = Escalator(ControlConfig(**config), self.run_commands, self.note)
        self.now = 1000.0

    def note(self, time, actor, action, details):
        self.entries.append((action, details))

    def consider(self, number=1, newest_step=40, ranks=()):
        proposal = Proposal(key=f"k{number}", run="r", attempt=0, step=newest_step, ranks=ranks, alarms=(ASKING,))
        return self.order(proposal, newest_step)

    def order(self, proposal, newest_step=40):
        """What follows from a proposal: the command, None, or a list of several."""
        issued = self.escalator.consider(proposal, newest_step=newest_step, step_time_s=0.1, now=self.now)
        return issued if len(issued) > 1 else issued[0] if issued else None

    def answer(self, command, state, rank=0, given=None):
        self.run_commands.acknowledge(rank, Ack(command=command.id, state=state, step=0), self.now, given)

    def tick(self, ended):
        changed = self.run_commands.tick(ended, self.now)
        return self.escalator.follow(changed, newest_step=max(ended.values()), step_time_s=0.1, now=self.now)

    def why_not(self):
        return [details["why"] for action, details in self.entries if action == "not_escalated"]


def test_an_escalation_is_a_command_on_paper(tmp_path):
    bench = Bench(tmp_path)

    command = bench.consider(ranks=(2, 3))

    assert command.at_step == 42
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


@pytest.mark.parametrize(("given", "why"), [(988.0, []), (992.0, ["cooling down"]), (5000.0, ["cooling down"])])
def test_what_ended_while_nobody_looked_is_waited_for_from_its_end(tmp_path, given, why):
    # A daemon that was away reads within a moment that monitoring began, that it ended, and what came afterwards.
    bench = Bench(tmp_path, cooldown_s=10.0)
    first = bench.consider(1)
    bench.answer(first, "armed")
    bench.tick({0: 40})
    bench.answer(first, "ended", given=given)
    bench.tick({0: 170})

    assert (bench.consider(2, newest_step=170) is None) is bool(why)
    assert bench.why_not() == why


def test_a_command_that_came_too_late_is_issued_anew_with_more_time(tmp_path):
    bench = Bench(tmp_path)
    first = bench.consider()
    bench.answer(first, "missed")

    issued = bench.tick({0: 45})

    assert [command.at_step for command in issued] == [first_step(45, 0.1, 0.2)]
    assert bench.escalator.latency_s == pytest.approx(0.2)
    bench.answer(issued[0], "armed")
    assert bench.tick({0: 46}) == []
    assert bench.run_commands.audit.counts["withdrawn"] == 1


@pytest.mark.parametrize("first_answers", [("armed", "missed"), ("applied", "missed")])
def test_monitoring_that_one_rank_was_too_late_for_is_issued_anew_for_all(tmp_path, first_answers):
    """The rank that came too late may be the one that is ill, and nothing of it would be seen."""
    bench = Bench(tmp_path)
    first = bench.consider(ranks=(0, 1))
    for rank, answer in enumerate(first_answers):
        bench.answer(first, answer, rank)

    issued = bench.tick({0: 42, 1: 42})

    assert bench.run_commands.known.get(first.id).state == "partial"
    assert [(one.ranks, one.at_step) for one in issued] == [((0, 1), first_step(42, 0.1, 0.2))]
    for rank in (0, 1):
        bench.answer(issued[0], "armed", rank)
    for step in range(43, 70):
        assert bench.tick({0: step, 1: step}) == []
    assert bench.run_commands.known.get(issued[0].id).state in ("applied", "ended")


def test_what_a_trainer_is_asked_for_is_never_asked_twice(tmp_path):
    bench = Bench(tmp_path, policies=(PolicyConfig(name="save", action="checkpoint"),))
    first = bench.consider(ranks=(0, 1))
    assert isinstance(first, RequestAction)
    bench.answer(first, "applied", 0)
    bench.answer(first, "missed", 1)

    assert bench.tick({0: 42, 1: 42}) == []


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_alarm_that_counted_on_monitoring_which_never_began_has_its_own(tmp_path, is_begun):
    # A join that was away reads of a NaN, and in the same moment orders anew what it ordered for something else before.
    bench = Bench(tmp_path)
    first = command = bench.consider(1)
    step = 40
    for _ in range(MAX_REISSUES):
        bench.answer(command, "missed")
        step += 10
        (command,) = bench.tick({0: step})
    assert bench.consider(2, newest_step=step) is None and bench.why_not() == ["monitoring is on"]
    bench.answer(command, "armed" if is_begun else "missed")
    issued = bench.tick({0: step + 10})
    if is_begun:
        bench.tick({0: command.at_step + 40})
        assert not issued and not bench.tick({0: command.at_step + 50})
        return
    assert len(issued) == 1 and issued[0].id != first.id and issued[0].at_step > step + 10
    assert not bench.tick({0: step + 10})


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
    assert bench.run_commands.audit.counts["dry_run"] == 1
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
    made = propose([on_stage_1(**changes)], actions, places(4, 2))
    return msgspec.structs.replace(made, key=f"{made.key}:{number}")


def test_a_rule_may_ask_for_raw_tensors_of_the_suspected_stage(tmp_path):
    bench = Bench(tmp_path, dump_kinds=("wgrad",), dump_first_n=8, dump_for_steps=2)
    proposal = a_dump()

    command = bench.order(proposal)

    assert Proposal.read(proposal.body) == proposal
    assert (command.kinds, command.first_n, command.for_steps, command.ranks) == (("wgrad",), 8, 2, (2, 3))
    assert command.at_step == 42
    bench.now += 100
    assert bench.order(proposal) is None


def test_a_dump_that_came_too_late_is_ordered_anew_with_more_time_and_not_for_ever(tmp_path):
    bench = Bench(tmp_path)
    command = bench.order(a_dump())
    at_steps = [command.at_step]
    for step in range(50, 500, 50):
        bench.answer(command, "missed")
        issued = bench.tick({2: step, 3: step})
        if not issued:
            break
        command = issued[0]
        at_steps.append(command.at_step)

    assert at_steps == [42, first_step(50, 0.1, 0.2), first_step(100, 0.1, 0.4), first_step(150, 0.1, 0.8)]
    assert (command.kinds, command.ranks, command.for_steps) == (("param", "wgrad"), (2, 3), 1)


def test_a_dump_that_was_obeyed_is_not_repeated(tmp_path):
    bench = Bench(tmp_path)
    command = bench.order(a_dump())
    for state in ("armed", "applied", "ended"):
        for rank in (2, 3):
            bench.answer(command, state, rank)
        assert bench.tick({2: 44, 3: 44}) == []

    assert bench.run_commands.known.find(f"{a_dump().key}:dump").state == "ended"


def test_dumps_are_few_and_never_in_the_way_of_monitoring(tmp_path):
    bench = Bench(tmp_path, max_dumps_per_hour=2, cooldown_s=10.0)
    issued = []
    for number in range(6):
        one = bench.order(a_dump(number))
        issued.append(one is not None)
        bench.now += 6.0

    assert issued == [True, False, True, False, False, False]
    bench.tick({0: 100})
    assert bench.consider(7, newest_step=100) is not None  # Neither "monitoring is on" nor "cooling down".


@pytest.mark.parametrize("config", [{"dump": False}, {"dry_run": True}])
def test_dumps_may_be_forbidden(tmp_path, config):
    bench = Bench(tmp_path, **config)

    assert bench.order(a_dump()) is None
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


def alarm(rule="nan", detector="AnomalyNan", severity=Severity.CRITICAL, actions=()):
    return RuleAlarm(rule=rule, detector=detector, severity=severity, actions=actions, what=f"{rule} fired")


def a_proposal(*alarms, number=1, **changes):
    usual = {"ranks": (2, 3), "neighbours": ("blocks.2", "blocks.3", "blocks.4")}
    return Proposal(key=f"k{number}", run="r", attempt=0, step=40, alarms=alarms, **(usual | changes))


def with_policies(tmp_path, *policies, **config):
    return Bench(tmp_path, policies=tuple(PolicyConfig(**one) for one in policies), **config)


def test_the_first_policy_that_takes_an_alarm_counts_and_the_rules_own_actions_no_more(tmp_path):
    bench = with_policies(
        tmp_path,
        {"name": "spikes", "rules": ("loss-*",), "action": "dump", "kinds": ("wgrad",)},
        {"name": "rest", "kinds": ("activation",), "for_steps": 5, "per_micro_step": False},
    )

    dump = bench.order(a_proposal(alarm("loss-spike", "LossSpike", actions=("escalate",))))
    enable = bench.order(a_proposal(alarm(actions=("dump",)), number=2))

    assert (type(dump).__name__, dump.kinds, dump.for_steps) == ("DumpTensors", ("wgrad",), 1)
    assert (type(enable).__name__, enable.kinds, enable.for_steps) == ("EnableMonitoring", ("activation",), 5)
    assert enable.per_micro_step is False


def test_an_alarm_that_no_policy_takes_has_what_its_rule_asks_for(tmp_path):
    bench = with_policies(tmp_path, {"name": "spikes", "detectors": ("LossSpike",), "action": "nothing"})

    assert bench.escalator.takes(a_proposal(alarm(actions=("escalate",))))
    assert not bench.escalator.takes(a_proposal(alarm("loss-spike", "LossSpike", actions=("escalate",))))
    assert not bench.escalator.takes(a_proposal(alarm()))
    [enable, dump] = bench.order(a_proposal(alarm(actions=("escalate", "dump"))))
    assert (type(enable).__name__, type(dump).__name__) == ("EnableMonitoring", "DumpTensors")


@pytest.mark.parametrize(("severity", "is_taken"), [(Severity.WARNING, False), (Severity.CRITICAL, True)])
def test_a_policy_takes_alarms_of_its_severity_and_above(tmp_path, severity, is_taken):
    bench = with_policies(tmp_path, {"name": "bad", "min_severity": Severity.CRITICAL})

    assert bench.escalator.takes(a_proposal(alarm(severity=severity))) is is_taken


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        ("blast_radius", ((2, 3), ())),
        ("neighbours", ((), ("blocks.2", "blocks.3", "blocks.4"))),
        ("all", ((), ())),
    ],
)
def test_a_policy_says_where_it_is_obeyed(tmp_path, reach, expected):
    command = with_policies(tmp_path, {"name": "p", "reach": reach}).order(a_proposal(alarm()))

    assert (command.ranks, command.targets) == expected


def test_neighbours_that_are_not_known_are_the_blast_radius(tmp_path):
    bench = with_policies(tmp_path, {"name": "p", "reach": "neighbours"})

    assert bench.order(a_proposal(alarm(), neighbours=())).ranks == (2, 3)


def test_neighbours_are_the_blocks_beside_the_first_causes():
    assert neighbours([on_stage_1()]) == ("blocks.2", "blocks.3", "blocks.4")
    assert neighbours([on_stage_1(segment="", name="layers.0.mlp.up")]) == ("layers.0", "layers.1")
    assert neighbours([on_stage_1(), on_stage_1(segment="head", name="lm_head")]) == ()
    assert neighbours([on_stage_1(segment=f"blocks.{number}") for number in range(0, 300, 3)]) == ()


def test_while_neighbours_are_measured_the_same_ones_are_not_asked_for_again(tmp_path):
    bench = with_policies(tmp_path, {"name": "p", "reach": "neighbours"})
    bench.order(a_proposal(alarm()))

    assert bench.order(a_proposal(alarm(), number=2)) is None
    assert bench.why_not() == ["monitoring is on"]
    assert bench.order(a_proposal(alarm(), number=3, neighbours=("blocks.7",))) is not None


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"action": "checkpoint"}, ("checkpoint", 0, 0.0)),
        ({"action": "skip_batches", "num_batches": 7}, ("skip_batches", 7, 0.0)),
        ({"action": "pause", "for_s": 60.0}, ("pause", 0, 60.0)),
    ],
)
def test_a_policy_may_ask_the_trainer_itself_once_an_hour(tmp_path, policy, expected):
    bench = with_policies(tmp_path, {"name": "p", **policy})

    command = bench.order(a_proposal(alarm()))

    assert (command.action, command.num_batches, command.for_s) == expected
    assert (command.at_step, command.ranks, command.reason) == (42, (), "nan fired, suspected in somewhere")
    bench.now += 700.0
    assert bench.order(a_proposal(alarm(), number=2)) is None
    assert ("not_requested", "1 requests in the last hour") in [(a, d.get("why")) for a, d in bench.entries]


def test_what_was_ordered_is_known_after_a_restart(tmp_path):
    policies = ({"name": "p", "action": "checkpoint", "max_per_hour": 5, "cooldown_s": 0.0},)
    bench = with_policies(tmp_path, *policies, max_per_hour=1, cooldown_s=0.0)
    late = bench.order(a_proposal(alarm("other"), number=2))
    after = with_policies(tmp_path, *policies, max_per_hour=1, cooldown_s=0.0)
    after.run_commands.load(bench.run_commands.dump())
    after.escalator.load(bench.escalator.dump())

    after.answer(late, "missed")
    [again] = after.tick({0: 60})

    assert again.action == "checkpoint" and again.at_step > late.at_step
    assert after.escalator.latency_s == pytest.approx(0.2)


def test_limits_by_the_hour_hold_across_a_restart(tmp_path):
    bench = Bench(tmp_path, max_per_hour=1, cooldown_s=0.0)
    bench.consider(1)
    after = Bench(tmp_path, max_per_hour=1, cooldown_s=0.0)
    after.run_commands.load(bench.run_commands.dump())
    after.escalator.load(bench.escalator.dump())

    assert after.consider(2, newest_step=9000) is None
    assert after.why_not() == ["1 escalations in the last hour"]


def test_a_command_is_given_the_time_that_the_last_ones_took(tmp_path):
    bench = Bench(tmp_path)
    command = bench.consider()
    bench.now += 0.08
    bench.answer(command, "armed")
    bench.tick({0: 40})

    assert bench.escalator.latency_s == pytest.approx(0.12)
    bench.now += 4000.0
    second = bench.consider(2, newest_step=500)
    bench.now += 0.001
    bench.answer(second, "armed")
    bench.tick({0: 500})
    assert bench.escalator.latency_s == pytest.approx(0.12)  # The slowest of the last ones counts.


def steps_that_take(bench, seconds, first, num):
    """Let steps go by, each of which takes so long."""
    for step in range(first, first + num):
        bench.now += seconds
        changed = bench.run_commands.tick({0: step}, bench.now)
        bench.escalator.follow(changed, newest_step=step, step_time_s=seconds, now=bench.now)


@pytest.mark.parametrize(("slow_s", "is_over"), [(0.2, True), (0.1001, False)])
def test_measuring_more_may_cost_only_so_much_of_an_hour(tmp_path, slow_s, is_over):
    bench = Bench(tmp_path, max_overhead=0.0005, cooldown_s=0.0)  # 1.8 s
    steps_that_take(bench, 0.1, 0, 40)
    command = bench.consider(1)
    bench.answer(command, "armed")
    steps_that_take(bench, 0.1, 40, 2)
    bench.answer(command, "applied")
    steps_that_take(bench, slow_s, 42, 30)

    assert (bench.consider(2, newest_step=200) is None) is is_over
    assert any("of the last hour (control.max_overhead)" in why for why in bench.why_not()) is is_over
    bench.now += 3700.0
    assert bench.consider(3, newest_step=4000) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "control.policies: expected a name"),
        ({"name": "escalate"}, r"control.policies\[escalate\]: expected another name"),
        ({"min_severity": Severity.INFO}, "min_severity must be warning or critical"),
        ({"kinds": ("activations",)}, r"control.policies\[p\].kinds must be among .*activation"),
        ({"action": "dump", "kinds": ("scalar",)}, r"control.policies\[p\].kinds must be among"),
        ({"for_steps": 0}, r"control.policies\[p\].for_steps must be at least 1, got 0"),
        ({"for_s": float("inf")}, r"control.policies\[p\].for_s must be above 0 and finite"),
    ],
)
def test_nonsense_in_a_policy_is_refused_by_its_path(change, message):
    with pytest.raises(ConfigError, match=message):
        PolicyConfig(**({"name": "p"} | change))


def test_two_policies_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="expected every name once, got 'p' 2 times"):
        ControlConfig(policies=(PolicyConfig(name="p"), PolicyConfig(name="p")))
