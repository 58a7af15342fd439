"""The causal order: a strict partial order, its total extension, and first causes."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.anomaly import Severity
from sentinel.order.causal import happens_before, is_possible_cause, sort_key
from sentinel.order.causes import blast_radius, first_causes, leading_causes
from sentinel.order.origin import origin
from sentinel.place import depth as depth_of

from ..support.anomalies import a_nan

KINDS = [
    "param", "weight_spectrum", "activation_in", "activation", "residual", "attention", "router", "saturation", "channel",
    "dgrad", "dgrad_in", "wgrad_unreduced", "wgrad", "exp_avg", "exp_avg_sq", "update", "update_ratio", "comm", "health",
    "precision:param", "precision:activation_in", "precision:activation", "precision:dgrad", "precision:wgrad_unreduced",
    "precision:wgrad", "precision:exp_avg_sq",
]  # fmt: skip
SCALARS = ["loss", "grad_norm", "found_inf", "lr", "accuracy", "step_time", "params norm"]
SCHEDULES = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved1f1b", 2), ("loopedbfs", 2), ("interleavedzerobubble", 2), ("zbv", 2),
    ("dualpipev", 2), ("Interleaved1F1B", 3), ("ScheduleZBVZeroBubble", 2),
]  # fmt: skip


@st.composite
def layouts(draw):
    """A parallel layout: schedule, sizes of dp, pp and tp, chunks on a stage."""
    schedule, vpp = draw(st.sampled_from(SCHEDULES))
    sizes = [draw(st.integers(1, 2)) for _ in range(3)]
    return schedule, vpp, *sizes


@st.composite
def anomalies_of_a_layout(draw, min_size=0, max_size=8):
    """Anomalies with every field that the order looks at drawn anew, call_ids that contradict site_pos included."""
    schedule, vpp, dp, pp, tp = draw(layouts())
    more = draw(st.sampled_from([{}, {}, {"cp": 2}, {"ep": 2}]))
    result = []
    for _ in range(draw(st.integers(min_size, max_size))):
        stage, chunk = draw(st.integers(0, pp - 1)), draw(st.integers(0, vpp - 1))
        coordinates = {"dp": draw(st.integers(0, dp - 1)), "pp": stage, "tp": draw(st.integers(0, tp - 1))}
        is_merged = draw(st.booleans())
        rank = None if is_merged else (stage * dp + coordinates["dp"]) * tp + coordinates["tp"]
        if "cp" in more:
            coordinates["cp"] = draw(st.integers(0, 1))
            rank = None if rank is None else 2 * rank + coordinates["cp"]
        elif "ep" in more:
            coordinates["ep"] = coordinates["dp"] % 2
        is_scalar = draw(st.integers(0, 5)) == 0
        kind, _, about = draw(st.sampled_from(KINDS)).partition(":")
        name = draw(st.sampled_from("abc")) + (f":{about}.fp16_overflow" if about else "")
        result.append(
            a_nan(
                "scalar" if is_scalar else kind,
                draw(st.sampled_from(SCALARS)) if is_scalar else name,
                attempt=draw(st.sampled_from([0, 0, 0, 1])),
                step=draw(st.sampled_from([5, 5, 5, 6])),
                micro_step=draw(st.sampled_from([None, 0, 1])),
                rank=rank,
                place={} if is_merged else coordinates,
                dp_size=dp, pp_size=pp, tp_size=tp, ep_size=more.get("ep", 1), pp_stage=stage, vpp_stage=chunk,
                depth=depth_of(schedule, stage, chunk, pp),
                site_pos=draw(st.integers(0, 2)),
                call_id=draw(st.sampled_from([None, 0, 1, 2])),
                communicates=draw(st.booleans()),
                statistic="norm",
                value_text=draw(st.sampled_from(["", "nan"])),
                severity=draw(st.sampled_from(Severity)),
            )
        )  # fmt: skip
    return result


@pytest.mark.property
@given(anomalies_of_a_layout(min_size=3, max_size=8))
def test_order_is_a_partial_order(some):
    before = {(i, j): happens_before(a, b) for (i, a), (j, b) in itertools.product(enumerate(some), repeat=2)}

    assert not any(before[i, i] for i in range(len(some)))
    assert not any(before[i, j] and before[j, i] for i, j in before)
    for i, j, k in itertools.product(range(len(some)), repeat=3):
        if before[i, j] and before[j, k]:
            assert before[i, k], (some[i], some[j], some[k])


@pytest.mark.property
@given(anomalies_of_a_layout(max_size=10))
def test_total_order_extends_the_partial_order(some):
    for a, b in itertools.permutations(some, 2):
        if happens_before(a, b):
            assert is_possible_cause(a, b)
        if is_possible_cause(a, b):
            assert sort_key(a) < sort_key(b)


@pytest.mark.property
@given(anomalies_of_a_layout(max_size=12))
def test_first_causes_are_the_minimal_elements(some):
    minimal = [i for i, b in enumerate(some) if not any(happens_before(a, b) for a in some)]

    assert first_causes(some) == sorted(minimal, key=lambda i: sort_key(some[i]))


@pytest.mark.property
@given(anomalies_of_a_layout(min_size=1, max_size=12))
def test_no_leading_cause_is_a_possible_effect_of_its_equals(some):
    worst = max((a.severity.level, bool(a.value_text)) for a in some)
    # Finite ones are equals from `warning` on; of non-finite ones the gravest count alone.
    levels = {1, 2} if not worst[1] and worst[0] >= 1 else {worst[0]}
    pool = [a for a in some if a.severity.level in levels and bool(a.value_text) == worst[1]]
    expected = [a for a in pool if not any(is_possible_cause(b, a) for b in pool)]

    found = [some[i] for i in leading_causes(some)]
    assert found
    if any(a.kind == "comm" for a in expected) and any(a.kind != "comm" for a in expected):
        # Of collectives and what else is minimal one explains the other: what is left says which.
        assert all(a in expected for a in found) or {a.kind for a in found} == {"comm"}
        assert len({a.kind == "comm" for a in found}) == 1
    else:
        assert found == sorted(expected, key=sort_key)


@pytest.mark.property
@given(anomalies_of_a_layout(max_size=12))
def test_blast_radius_holds_all_that_a_cause_possibly_precedes(some):
    causes = [some[i] for i in leading_causes(some)]
    ids = {a.id for a in causes}

    radius = blast_radius(some)

    least = [a for a in some if a.id not in ids and any(is_possible_cause(c, a) for c in causes)]
    most = [a for a in some if a.id not in ids]
    assert len(least) <= radius.num_anomalies <= len(most)
    assert radius.num_anomalies == sum(radius.by_kind.values()) == sum(radius.by_step.values())


class Simulation:
    """Two micro-steps of a model cut over the ranks, run in a random feasible order: who really was before whom.

    Every site is one tensor: input slot and output slot of `num_modules` modules at each depth.
    """

    def __init__(self, draw, schedule, vpp, dp, pp, tp, num_micro_steps=2, num_modules=2):
        self.events = {}
        self.after = {}
        layout = {"schedule": schedule, "vpp": vpp, "dp": dp, "pp": pp, "tp": tp}
        depths = sorted((depth_of(schedule, s, c, pp), s, c) for s in range(pp) for c in range(vpp))
        num_sites = 2 * num_modules
        for d, micro in itertools.product(range(dp), range(num_micro_steps)):
            previous = None
            forward = [(at, s, c, pos) for at, s, c in depths for pos in range(num_sites)]
            for phase, sites in (("F", forward), ("B", forward[::-1])):
                for at, s, c, pos in sites:
                    layer = [(phase, at, pos, d, micro, t) for t in range(tp)]
                    for t, event in enumerate(layer):
                        name = f"stage{at}.m{pos // 2}"
                        kinds = ("activation_in", "activation") if phase == "F" else ("dgrad_in", "dgrad")
                        self.add(event, layout, kinds[pos % 2], name, s, c, at, pos, d, t, micro, previous or ())
                    previous = layer
        for at, s, c in depths:
            for pos, d, t in itertools.product(range(1, num_sites, 2), range(dp), range(tp)):
                name = f"stage{at}.m{pos // 2}.weight"
                mine = [("B", at, pos, d, m, t) for m in range(num_micro_steps)]
                own = ("U", at, pos, d, None, t)
                self.add(own, layout, "wgrad_unreduced", name, s, c, at, pos, d, t, None, mine)
            for pos, d, t in itertools.product(range(1, num_sites, 2), range(dp), range(tp)):
                replicas = [("U", at, pos, other, None, t) for other in range(dp)]
                reduced = ("W", at, pos, d, None, t)
                self.add(reduced, layout, "wgrad", f"stage{at}.m{pos // 2}.weight", s, c, at, pos, d, t, None, replicas)
        # The optimizer steps behind the barrier, and on every rank behind its own whole backward.
        everyone = [event for event in self.after if event[0] in "WB"]
        for event in [event for event in everyone if event[0] == "W"]:
            at, pos, d, t = event[1], event[2], event[3], event[5]
            s, c = next((s, c) for there, s, c in depths if there == at)
            done = ("O", at, pos, d, None, t)
            self.add(done, layout, "update", f"stage{at}.m{pos // 2}.weight", s, c, at, pos, d, t, None, everyone)
        # Reduced gradients are read in one pass, when the rank's own backward is over: an order, but no cause.
        backward = {}
        for event in self.events:
            if event[0] == "B":
                backward.setdefault(self.events[event]["rank"], set()).add(event)
        waits = {event: backward[self.events[event]["rank"]] for event in self.events if event[0] == "W"}
        self.run(draw, waits)

    def add(self, event, layout, kind, name, stage, chunk, at, pos, d, t, micro, causes):
        """Record an event and its direct causes."""
        rank = (stage * layout["dp"] + d) * layout["tp"] + t
        place = {"dp": d, "pp": stage, "tp": t}
        sizes = {"dp_size": layout["dp"], "pp_size": layout["pp"], "tp_size": layout["tp"]}
        self.events[event] = dict(
            kind=kind, name=name, rank=rank, place=place, pp_stage=stage, vpp_stage=chunk, depth=at, site_pos=pos,
            micro_step=micro, communicates=True, **sizes,
        )  # fmt: skip
        self.after[event] = set(causes)

    def run(self, draw, waits):
        """Hand out call_ids rank by rank in a random order that obeys all causes and waits."""
        waiting = {event: causes | waits.get(event, set()) for event, causes in self.after.items()}
        effects = {event: [] for event in self.after}
        for event, causes in waiting.items():
            for cause in causes:
                effects[cause].append(event)
        ready = [event for event, causes in waiting.items() if not causes]
        calls, self.when, self.reach = {}, {}, {}
        while ready:
            event = ready.pop(draw(st.integers(0, len(ready) - 1)))
            fields = self.events[event]
            fields["call_id"] = calls.get(fields["rank"], 0)
            calls[fields["rank"]] = fields["call_id"] + 1
            self.when[event] = len(self.when)
            self.reach[event] = set().union(*({c} | self.reach[c] for c in self.after[event]))
            for effect in effects[event]:
                waiting[effect].discard(event)
                if not waiting[effect]:
                    ready.append(effect)
        self.anomalies = {event: a_nan(**fields) for event, fields in self.events.items()}


@pytest.mark.property
@settings(max_examples=max(5, settings.default.max_examples // 5))
@given(st.data(), layouts())
def test_order_agrees_with_simulated_schedules(data, layout):
    """Every true cause is before its effect, and nothing is said to be before what it was really after."""
    simulation = Simulation(data.draw, *layout)
    events = st.sampled_from(sorted(simulation.events, key=str))
    some = sorted(data.draw(st.sets(events, min_size=2, max_size=24)), key=str)

    assert len(some) > 1
    for x, y in itertools.permutations(some, 2):
        a, b = simulation.anomalies[x], simulation.anomalies[y]
        is_before = happens_before(a, b)
        if x in simulation.reach[y]:
            assert is_before, (a, b)
        if is_before:
            assert y not in simulation.reach[x], (a, b)
            assert sort_key(a) < sort_key(b)
        if is_before and a.rank == b.rank:
            assert simulation.when[x] < simulation.when[y]


def test_first_cause_under_tensor_parallel():
    """The origin has call 43 on stage 0, a victim call 29 on stage 1 (seen): sorting by call_id alone is wrong."""
    place = {"dp_size": 1, "tp_size": 2, "pp_size": 2}
    born = a_nan(name="blocks.3.mlp.fc2", rank=1, call_id=43, site_pos=21, place={"tp": 1, "pp": 0}, **place)
    mate = a_nan(name="blocks.3", rank=0, call_id=44, site_pos=23, place={"tp": 0, "pp": 0}, **place)
    victim = a_nan(
        name="blocks.4.ln1", rank=2, call_id=29, pp_stage=1, depth=1, site_pos=1, place={"tp": 0, "pp": 1}, **place
    )
    some = [victim, mate, born]

    assert min(some, key=lambda a: a.call_id) is victim
    assert first_causes(some) == [2]
    assert min(some, key=sort_key) is born
    assert origin(born, some).name == "blocks.3.mlp.fc2"


def test_inputs_of_a_communicating_module_precede_its_outputs_on_every_rank():
    place = {"tp_size": 2, "site_pos": 4, "call_id": 9, "rank": 0}
    of_rank_1 = a_nan("activation_in", "fc2", communicates=True, **place | {"rank": 1})
    of_rank_0 = a_nan("activation", "fc2", communicates=True, **place)
    alone_1 = a_nan("activation_in", "fc1", **place | {"rank": 1})
    alone_0 = a_nan("activation", "fc1", **place)

    assert happens_before(of_rank_1, of_rank_0)
    assert not happens_before(alone_1, alone_0)
    assert not happens_before(alone_0, alone_1)


def test_a_rank_s_summand_of_a_gradient_precedes_the_sum_on_every_rank():
    """The summand's site lies right behind that of the tensor, whose gradient is the sum."""
    group = {"tp_size": 2, "site_pos": 64}
    sums = [a_nan("dgrad", "ln2", rank=r, call_id=7, place={"tp": r}, consumers=("mlp",), **group) for r in range(2)]
    born = a_nan("dgrad_in", "mlp.fc1", rank=1, call_id=8, place={"tp": 1}, communicates=True, **group | {"site_pos": 65})
    some = [*sums, born]

    assert all(happens_before(born, one) for one in sums)
    assert [some[i] for i in first_causes(some)] == [some[i] for i in leading_causes(some)] == [born]
    assert (origin(born, some).module, origin(born, some).rank) == ("mlp.fc1", 1)


def test_first_cause_under_global_clipping():
    """One inf in one wgrad makes every update of that step and every weight of the next NaN: none is a first cause."""
    born = a_nan("wgrad", "blocks.1.mlp.fc1.weight", rank=None, micro_step=None, value_text="inf", site_pos=9)
    norm = a_nan("scalar", "grad_norm", rank=None, micro_step=None, value_text="inf")
    names = ["embed.weight", "blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight", "head.weight"]
    updates = [a_nan("update", n, micro_step=None, call_id=i) for i, n in enumerate(names)]
    weights = [a_nan("param", n, micro_step=None, step=6, call_id=i) for i, n in enumerate(names)]
    forward = [a_nan("activation", n[: -len(".weight")], step=6, site_pos=i) for i, n in enumerate(names)]
    some = [*forward, *weights, *updates, norm, born]

    assert [some[i] for i in first_causes(some)] == [born]
    assert [some[i] for i in leading_causes(some)] == [born]
    assert origin(born, some).name == "blocks.1.mlp.fc1.weight"
    assert blast_radius(some).by_step == {5: 5, 6: 8}
    assert [some[:8][i] for i in first_causes(some[:8])] == weights


def test_a_wgrad_is_a_leaf_of_its_dgrad():
    dgrad = a_nan("dgrad", "blocks.1.fc", site_pos=6, call_id=7)
    own = a_nan("wgrad_unreduced", "blocks.1.fc.weight", site_pos=6, call_id=8)
    earlier_dgrad = a_nan("dgrad", "blocks.0.fc", site_pos=3, call_id=9)
    wgrad = a_nan("wgrad", "blocks.1.fc.weight", micro_step=None, site_pos=6, call_id=20)

    assert happens_before(dgrad, earlier_dgrad)
    assert happens_before(dgrad, wgrad)
    assert happens_before(dgrad, own)
    assert happens_before(own, wgrad)
    assert not happens_before(wgrad, earlier_dgrad)
    assert not happens_before(own, earlier_dgrad)
    assert not happens_before(own, a_nan("wgrad", "blocks.0.fc.weight", micro_step=None, site_pos=3))


def test_replicas_and_micro_steps_are_concurrent_until_the_reduction():
    def at(dp, micro, kind="activation", **fields):
        return a_nan(kind, rank=dp, micro_step=micro, place={"dp": dp}, dp_size=2, call_id=1, **fields)

    reduced = at(0, None, "wgrad", name="w", site_pos=1)

    for other in (at(1, 0, site_pos=5), at(0, 1, site_pos=5), at(1, 0, "dgrad"), at(0, 1, "dgrad")):
        assert not happens_before(at(0, 0), other)
        assert not happens_before(other, at(0, 0))
        assert happens_before(at(0, 0), reduced)
    assert happens_before(at(1, 1, "dgrad", site_pos=3), reduced)
    assert happens_before(at(0, 0), at(0, 0, "dgrad"))


def test_expert_exchange_couples_the_replicas_that_share_experts():
    def at(dp, site_pos):
        return a_nan(rank=dp, place={"dp": dp, "ep": dp % 2}, dp_size=4, ep_size=2, site_pos=site_pos)

    assert happens_before(at(0, 1), at(1, 2))
    assert not happens_before(at(0, 1), at(2, 2))


def test_loss_lies_between_forward_and_backward():
    loss = a_nan("scalar", "loss", rank=None, micro_step=None)
    forward, backward = a_nan(depth=3, site_pos=99), a_nan("dgrad", depth=3, site_pos=99)

    assert happens_before(forward, loss)
    assert happens_before(loss, a_nan("dgrad", rank=None, micro_step=None))
    assert is_possible_cause(loss, backward)
    assert sorted([backward, loss, forward], key=sort_key) == [forward, loss, backward]
    assert leading_causes([backward, loss]) == [1]


def test_program_order_outranks_the_order_of_first_appearance():
    """A module's output is usually its child's; planted, it is a tensor of its own, whose site is seen last of all."""
    output = a_nan(name="blocks.1.attn", site_pos=24, call_id=43)
    after = a_nan("activation_in", "blocks.1.ln2", site_pos=17, call_id=44)

    assert happens_before(output, after)
    assert first_causes([after, output]) == [1]


def test_a_module_that_runs_twice_is_ordered_by_its_calls():
    second_run = a_nan(name="shared.fc2", site_pos=2, call_id=5)
    third_run = a_nan(name="shared.fc1", site_pos=1, call_id=7)

    assert first_causes([third_run, second_run]) == [1]


def test_optimizer_state_precedes_what_is_added_to_its_own_weight():
    """A dying second moment is no effect of the update that it makes; that of another weight is neither's."""
    state = a_nan("exp_avg_sq", "fc.weight", micro_step=None, call_id=9)
    update = a_nan("update", "fc.weight", micro_step=None, call_id=2)
    ratio = a_nan("update_ratio", "fc.weight", rank=None, micro_step=None)
    other = a_nan("update", "head.weight", micro_step=None, call_id=1)

    assert happens_before(state, update)
    assert happens_before(update, ratio)
    assert not happens_before(state, other)
    assert not happens_before(other, state)
    assert [a.kind for a in sorted([ratio, update, state], key=sort_key)] == ["exp_avg_sq", "update", "update_ratio"]
    assert first_causes([ratio, update, state]) == [2]


def test_every_gradient_precedes_every_update():
    gradients = [
        a_nan("wgrad", f"w{rank}", rank=rank, micro_step=None, depth=rank, place={"pp": rank}, pp_size=2)
        for rank in range(2)
    ]
    norm = a_nan("scalar", "grad_norm", rank=None, micro_step=None)
    states = [a_nan(kind, "w0", rank=rank, micro_step=None) for kind in ("exp_avg", "update") for rank in range(2)]

    for gradient in gradients:
        assert happens_before(gradient, norm)
        for state in states:
            assert happens_before(gradient, state)
            assert happens_before(norm, state)


def test_unreduced_gradients_precede_the_reduced_one_of_their_own_group_alone():
    """Reduced over dp: tensor-parallel rank 1 holds another shard, and another weight is another tensor."""
    axes = {"dp_size": 2, "tp_size": 2, "micro_step": None, "site_pos": 4}

    def at(kind, dp, tp, name="fc1.weight"):
        return a_nan(kind, name, rank=2 * dp + tp, place={"dp": dp, "tp": tp}, **axes)

    for dp in range(2):
        assert happens_before(at("wgrad_unreduced", 1, 0), at("wgrad", dp, 0))
        assert not happens_before(at("wgrad_unreduced", 1, 0), at("wgrad", dp, 1))
    assert not happens_before(at("wgrad_unreduced", 1, 0), at("wgrad", 1, 0, "fc2.weight"))
    assert first_causes([at("wgrad", 0, 1), at("wgrad", 1, 0), at("wgrad_unreduced", 1, 0)]) == [2, 0]


def test_what_a_probe_says_of_a_tensor_stands_where_the_tensor_does():
    inputs = a_nan("activation_in", "fc1", rank=None, call_id=None, micro_step=None, site_pos=3)
    same_site = {"rank": None, "call_id": None, "micro_step": None, "site_pos": 3, "statistic": "norm", "value_text": ""}

    names = {"saturation": "fc1:zero", "channel": "fc1:channel_rms", "precision": "fc1:activation.fp16_overflow"}
    for kind, name in names.items():
        said = a_nan(kind, name, **same_site)
        assert happens_before(inputs, said)
        assert not happens_before(said, a_nan("activation", "fc1", **same_site))
        assert happens_before(said, a_nan("dgrad", "fc1", **same_site))
    backward = a_nan("precision", "fc1:dgrad.fp16_underflow", **same_site)
    assert happens_before(backward, a_nan("dgrad", "fc0", **same_site | {"site_pos": 1}))
    unreduced = a_nan("precision", "w:wgrad_unreduced.fp16_overflow", **same_site)
    assert happens_before(unreduced, a_nan("wgrad", "w", **same_site))
    assert not happens_before(unreduced, a_nan("wgrad", "v", **same_site))


def test_collectives_have_the_program_order_of_their_rank():
    reduce = a_nan("comm", "all_reduce@train.py:8:out", call_id=5)
    gather = a_nan("comm", "all_gather@train.py:9:in", call_id=9)
    before = a_nan(call_id=3)

    assert happens_before(reduce, gather)
    assert not happens_before(reduce, msgspec.structs.replace(gather, rank=1))
    assert is_possible_cause(before, reduce)
    assert not is_possible_cause(msgspec.structs.replace(before, rank=1), reduce)
    assert not is_possible_cause(a_nan(call_id=7), reduce)
    assert leading_causes([gather, reduce, before]) == [2]


def collective(role, rank, call, **fields):
    return a_nan("comm", f"all_reduce@ddp.py:7:{role}", rank=rank, call_id=call, micro_step=None, **fields)


def test_a_collective_that_spoilt_good_data_came_first():
    """What each rank gave was well, what came back was not: on every rank the gradients went bad behind it."""
    gradients = [a_nan("wgrad", "w", rank=rank, call_id=90, micro_step=None, dp_size=2) for rank in range(2)]
    results = [collective("out", rank, 80, dp_size=2) for rank in range(2)]
    some = [*gradients, *results]

    assert [some[i] for i in leading_causes(some)] == results
    assert leading_causes([*gradients, results[0]]) == [1], "rank 1 had it from elsewhere"


def test_the_rank_that_gave_a_collective_what_was_bad_is_left():
    """Reduced gradients are bad on all ranks alike; what went into the reduction was bad on rank 1 alone."""
    gradients = [a_nan("wgrad", "w", rank=rank, call_id=90, micro_step=None, dp_size=3) for rank in range(3)]
    given = collective("in", 1, 79, dp_size=3)
    results = [collective("out", rank, 80, dp_size=3) for rank in range(3)]
    some = [*results, given, *gradients]

    assert [some[i] for i in leading_causes(some)] == [gradients[1]]


def test_what_was_bad_before_a_collective_is_not_its_fault():
    born = a_nan(rank=0, call_id=3)
    some = [a_nan("dgrad", rank=0, call_id=9), collective("out", 0, 5), born]

    assert [some[i] for i in leading_causes(some)] == [born]


@pytest.mark.parametrize("schedule", ["zbv", "ZBV", "ScheduleZBVZeroBubble", "DualPipeV", "dualpipe-v", "v-half"])
def test_v_shaped_schedules_fold_however_they_are_spelt(schedule):
    """Rank 0 holds the first and the last chunk: what it does in both is far apart in depth."""
    chunks = [(stage, chunk) for chunk in range(2) for stage in range(2)]

    assert {chunk: depth_of(schedule, *chunk, 2) for chunk in chunks} == {(0, 0): 0, (1, 0): 1, (1, 1): 2, (0, 1): 3}
    assert [depth_of("interleaved1f1b", *chunk, 2) for chunk in chunks] == [0, 1, 2, 3]


def test_a_v_shaped_fault_of_the_first_chunk_comes_before_the_last_chunk_of_its_own_rank():
    """Both chunks lie on rank 0; the middle two on rank 1 pass it on. call_ids of rank 0 alone would say the same here,
    those of both ranks would not."""
    born = a_nan(name="stage0", call_id=9, depth=depth_of("zbv", 0, 0, 2), pp_size=2)
    between = a_nan(name="stage2", rank=1, call_id=1, pp_stage=1, vpp_stage=1, depth=depth_of("zbv", 1, 1, 2), pp_size=2)
    last = a_nan(name="stage3", call_id=12, vpp_stage=1, depth=depth_of("zbv", 0, 1, 2), pp_size=2)

    assert sorted([last, between, born], key=sort_key) == [born, between, last]
    assert first_causes([last, between, born]) == [2]


def test_call_ids_of_two_ranks_are_never_compared():
    ours, theirs = a_nan(rank=0, call_id=1, site_pos=1), a_nan(rank=1, call_id=9, site_pos=9)

    assert not happens_before(ours, theirs)
    assert not happens_before(theirs, ours)


def test_a_jump_of_the_loss_comes_of_what_moved_before_it():
    """The loss is `critical`, what lasts or agrees is `warning`, a lone excursion is `info`: chance, and no cause."""
    finite = {"rank": None, "micro_step": None, "statistic": "norm", "value_text": ""}
    loss = a_nan("scalar", "loss", **finite)
    moved = [a_nan("activation", f"b{i}", site_pos=i, severity=Severity.WARNING, **finite) for i in (4, 5)]
    chance = a_nan("activation", "b1", site_pos=1, severity=Severity.INFO, **finite)
    some = [loss, chance, *moved]

    assert leading_causes(some) == [2]
    assert leading_causes([loss, chance]) == [0]
    assert leading_causes([*some, a_nan("dgrad", "b5")]) == [4], "what is not a number is made by none of them"


def test_weights_precede_the_forward_of_their_own_stage_and_what_follows():
    weight = a_nan("param", "blocks.9.weight", micro_step=None, pp_stage=1, depth=1)

    assert happens_before(a_nan("update", step=4, micro_step=None), weight)
    assert not happens_before(weight, a_nan(pp_stage=0, depth=0))
    assert happens_before(weight, a_nan(pp_stage=1, depth=1))
    assert happens_before(weight, a_nan(pp_stage=1, vpp_stage=1, depth=3))
    assert happens_before(weight, a_nan("dgrad", depth=0))


@pytest.mark.slow
def test_first_causes_are_near_linear():
    many = [
        a_nan(
            name=f"m{i % 977}", rank=i % 64, micro_step=i % 8, place={"dp": i % 64}, dp_size=64,
            site_pos=i % 977, call_id=i % 977,
        )
        for i in range(20_000)
    ]  # fmt: skip
    start = time.process_time()

    causes = first_causes(many)

    assert 0 < len(causes) <= 64 * 8 * 40
    assert time.process_time() - start < 5.0
