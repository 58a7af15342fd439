"""Top-k: the k earliest, from any files in any order, msProbe's too."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Severity
from sentinel.errors import ConfigError
from sentinel.explain import anomaly_files as files_module
from sentinel.explain.anomaly_files import anomaly_files
from sentinel.explain.msprobe_records import MsprobeRecord, from_msprobe, msprobe_sort_key
from sentinel.explain.topk import topk
from sentinel.incident import Incident
from sentinel.msprobe_tag import module_of
from sentinel.order.causal import sort_key
from sentinel.order.causes import leading_causes
from sentinel.order.origin import origin
from sentinel.order.position import observation_key

from ..support.anomalies import an_excursion, an_incident

GOLDEN = Path(__file__).parent / "golden"


def numbered(number, step, **fields):
    """One of a thousand."""
    usual = {
        "rank": number % 4, "micro_step": number % 2, "call_id": number % 97, "site_pos": number % 13,
        "severity": Severity.INFO, "value": number / 7, "baseline": None, "score": None, "message": "high", "time": 0.0,
    }  # fmt: skip
    name, kind = fields.pop("tag_name", f"blocks.{number % 13}"), fields.pop("kind", "activation")
    return an_excursion(kind, name, step, **(usual | fields))


def thousand(seed=0):
    rng = random.Random(seed)
    return [
        numbered(
            number,
            rng.randrange(50),
            kind=rng.choice(["activation", "dgrad", "wgrad", "param"]),
            severity=rng.choice(list(Severity)) if rng.random() < 0.05 else Severity.INFO,
        )
        for number in range(1000)
    ]


def write(path, anomalies, tail=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(a) + b"\n" for a in anomalies) + tail)


def ids(found):
    return [entry.anomaly.id for entry in found.entries]


def in_places(anomalies, k):
    """The first k of the total order: one of each observation, then, where there is room, what repeats those."""
    first, repeated = {}, []
    for one in sorted(anomalies, key=sort_key):
        if first.setdefault(observation_key(one), one) is not one:
            repeated.append(one)
    return [one.id for one in [*first.values(), *repeated][:k]]


def test_topk_independent_of_file_order(tmp_path):
    some = thousand()
    rng = random.Random(1)
    results = []
    for attempt in range(6):
        mixed = rng.sample(some, len(some))
        run = tmp_path / f"run{attempt}"
        num_files = attempt + 1
        for index in range(num_files):
            write(run / "anomalies" / f"{rng.randrange(10**6):06d}{index}.jsonl", mixed[index::num_files])
        results.append(topk(run, 20))

    expected = in_places(some, 20)
    assert all(ids(found) == expected for found in results)
    assert {found.num_anomalies for found in results} == {1000}
    assert len({found.worst.anomaly.id for found in results}) == 1
    assert results[0].entries[0].anomaly == min(some, key=sort_key)


def test_topk_independent_of_file_order_when_ours_and_msprobes_mix_and_lines_are_torn(tmp_path):
    """Ours in any number of files, packed or not, some torn; msProbe's of several ranks, one cut short."""
    ours, rng = thousand(11), random.Random(12)
    theirs = list(json.loads((GOLDEN / "msprobe_anomaly.json").read_text()).values())
    results, by_msprobe = [], []
    for attempt in range(5):
        mixed = rng.sample(ours, len(ours))
        run = tmp_path / f"run{attempt}"
        num_files = 1 + attempt
        for index in range(num_files):
            path = run / "anomalies" / f"{rng.randrange(10**6):06d}{index}.jsonl"
            # A line that was half written, in the middle or at the end: another one in each layout of files.
            torn = b'{"id":"x","step":0,"tag_name":"bl'
            some = mixed[index::num_files]
            write(path, some[:100], tail=torn + b"\n")
            with path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(a) + b"\n" for a in some[100:]) + torn)
            if index % 2:
                path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
                path.unlink()
        ranks = rng.sample(range(8), 2)
        halves = rng.sample(theirs, len(theirs))
        for rank, half in zip(ranks, (halves[::2], halves[1::2]), strict=True):
            target = run / "anomaly_detected" / f"rank{rank}" / "anomaly.json"
            target.parent.mkdir(parents=True)
            text = json.dumps({f"{number}": record for number, record in enumerate(half)}, indent=4)
            target.write_text(text if attempt % 2 else text.removesuffix("\n}") + ',\n    "z": {"step": 0, "ra')
        results.append(topk(run, 30))
        by_msprobe.append(topk(run, 30, order="msprobe"))

    assert len({found.num_anomalies for found in results}) == 1
    assert results[0].num_anomalies == 1000 + len(theirs)
    for same in (results, by_msprobe):
        assert len({tuple(ids(found)) for found in same}) == 1
        assert len({json.dumps(list(found.analysis().values())) for found in same}) == 1
        assert len({found.worst.anomaly.id for found in same}) == 1
    assert ids(results[0]) != ids(by_msprobe[0])
    assert [len(found.torn) for found in results] == [1 + 2, 2, 3 + 2, 4, 5 + 2]
    assert [found.num_malformed for found in results] == [1, 2, 3, 4, 5]


def test_a_packed_file_that_is_cut_short_gives_what_is_whole(tmp_path):
    some = thousand(13)
    packed = gzip.compress(b"".join(msgspec.json.encode(a) + b"\n" for a in some))
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    whole = topk(tmp_path, 2000)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])

    cut = topk(tmp_path, 2000)

    assert (whole.num_anomalies, whole.torn) == (1000, ())
    assert 100 < cut.num_anomalies < 1000
    assert cut.torn == (str(tmp_path / "a.jsonl.gz"),)
    assert set(ids(cut)) <= set(ids(whole))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_topk_independent_of_how_the_work_is_shared(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(files_module, "_RANGE_BYTES", 20_000)
    monkeypatch.setattr(files_module, "_CHUNK_BYTES", 700)
    some = thousand(2)
    write(tmp_path / "anomalies" / "000001.jsonl", some[:700])
    write(tmp_path / "anomalies" / "000002.jsonl", some[700:])

    found = topk(tmp_path, 50, processes=processes)

    assert ids(found) == in_places(some, 50)
    assert found.num_anomalies == 1000
    critical = [a for a in some if a.severity is Severity.CRITICAL]
    assert found.worst.anomaly == min(critical, key=sort_key)


def test_steps_severity_and_incident_restrict(tmp_path):
    some = thousand(3)
    write(tmp_path / "anomalies" / "000001.jsonl", some)
    members = [some[i].id for i in (5, 500, 900)]
    revision = Incident(
        id="iabc", revision=1, run="r", attempt=0, state="open", opened_step=0, last_step=9, severity=Severity.INFO,
        title="t", root=None, members=tuple(members[:2]),
    )  # fmt: skip
    merged = msgspec.structs.replace(revision, id="idef", members=(members[2],), state="merged", merged_into="iabc")
    write(tmp_path / "incidents.jsonl", [revision, merged], tail=b'{"torn')

    in_steps = topk(tmp_path, 1000, steps={7, 8})
    severe = topk(tmp_path, 1000, min_severity=Severity.WARNING)
    of_incident = topk(tmp_path, incident="ia")

    assert ids(in_steps) == in_places([a for a in some if a.step in (7, 8)], 1000)
    assert ids(severe) == in_places([a for a in some if a.severity is not Severity.INFO], 1000)
    assert sorted(ids(of_incident)) == sorted(members)
    assert ids(topk(tmp_path / "anomalies", incident="ia")) == ids(of_incident)
    with pytest.raises(ConfigError, match=r'"ix": no incident has an id that begins so; known: iabc, idef'):
        topk(tmp_path, incident="ix")
    with pytest.raises(ConfigError, match=r'"i": several incident'):
        topk(tmp_path, incident="i")


def test_a_torn_last_line_is_skipped_and_said(tmp_path):
    some = thousand(4)[:10]
    path = tmp_path / "anomalies" / "000001.jsonl"
    write(path, some, tail=b'{"id":"x","step":0,"tag_na')

    found = topk(tmp_path, 100)

    assert found.num_anomalies == 10
    assert found.torn == (str(path),)
    assert found.num_malformed == 0


def test_a_last_line_without_a_line_feed_counts_when_it_is_whole(tmp_path):
    some = thousand(4)[:10]
    write(tmp_path / "a.jsonl", some[:9], tail=msgspec.json.encode(some[9]))

    assert topk(tmp_path, 100).num_anomalies == 10


def test_lines_that_cannot_be_read_are_counted_and_placed(tmp_path):
    some = thousand(5)[:4]
    path = tmp_path / "a.jsonl"
    head = b"".join(msgspec.json.encode(a) + b"\n" for a in some[:2])
    path.write_bytes(head + b"what is this\n\n   \n" + b"".join(msgspec.json.encode(a) + b"\n" for a in some[2:]))

    found = topk(tmp_path, 100)

    assert (found.num_anomalies, found.num_malformed) == (4, 1)
    assert found.malformed == (f"{path}:{len(head)}",)


def test_blank_lines_do_not_shift_what_is_read(tmp_path):
    some = thousand(6)[:50]
    (tmp_path / "a.jsonl").write_bytes(b"\n\n".join(msgspec.json.encode(a) for a in some) + b"\n \n")

    assert ids(topk(tmp_path, 50)) == [a.id for a in sorted(some, key=sort_key)]


def test_ends_of_episodes_are_no_anomalies(tmp_path):
    onset = numbered(1, 5)
    end = msgspec.structs.replace(onset, id="e", step=1, event="end", onset_id=onset.id)
    note = msgspec.structs.replace(onset, id="t", step=0, event="truncated")
    write(tmp_path / "a.jsonl", [end, note, onset])

    found = topk(tmp_path)

    assert (ids(found), found.num_anomalies) == ([onset.id], 1)


def test_the_same_record_in_two_files_is_one(tmp_path):
    write(tmp_path / "a.jsonl", [numbered(1, 5), numbered(2, 5)])
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")

    assert len(topk(tmp_path).entries) == 2


def test_several_rules_on_one_tensor_are_all_kept(tmp_path):
    some = [
        numbered(1, 5, rule=rule, statistic=statistic) for rule in ("nan", "high") for statistic in ("min", "max", "norm")
    ]
    write(tmp_path / "a.jsonl", some)

    analysis = topk(tmp_path).analysis()

    assert len(analysis) == 6
    assert {record["id"] for record in analysis.values()} == {a.id for a in some}
    assert next(iter(analysis)) == "blocks.1_step_5_call_1"


def logged(rank, rule, value, **fields):
    """What a rule says of the loss of one rank, or of all."""
    fields = {"severity": Severity.WARNING, "place": {} if rank is None else {"dp": rank // 2, "tp": rank % 2}} | fields
    return numbered(
        1, 5, kind="scalar", tag_name="loss", statistic="value", rule=rule, rank=rank, value=value, micro_step=None,
        call_id=None, dp_size=2, tp_size=2, **fields,
    )  # fmt: skip


def test_what_further_rules_say_of_a_loss_does_not_push_the_tensor_behind_it_out_of_the_first_lines(tmp_path):
    """Five records of one loss, three of its mean and two of a rank and its tensor-parallel peer, are two places."""
    mean = [logged(None, "spike", 9.0), *(logged(None, rule, 9.0, severity=Severity.INFO) for rule in ("jump", "drift"))]
    of_ranks = [logged(rank, "skew", 14.0, severity=Severity.INFO) for rank in (2, 3)]
    gradient = numbered(2, 5, kind="dgrad", severity=Severity.WARNING, call_id=None)
    write(tmp_path / "a.jsonl", [gradient, *of_ranks, *mean])

    found, everything = topk(tmp_path, 3), topk(tmp_path, 3, all_alike=True)

    assert ids(found) == [mean[0].id, of_ranks[0].id, gradient.id]
    assert gradient.id not in ids(everything)
    assert ids(topk(tmp_path, 8))[:3] == ids(found)
    assert set(ids(topk(tmp_path, 8))) == {a.id for a in (gradient, *of_ranks, *mean)}


def test_ranks_that_log_other_numbers_and_ranks_that_are_not_finite_keep_lines_of_their_own(tmp_path):
    apart = [logged(rank, "skew", 10.0 + rank) for rank in (2, 3)]
    bad = [logged(rank, "nan", None, value_text="nan", severity=Severity.CRITICAL) for rank in (0, 1)]
    weight = [numbered(rank, 5, kind="activation", rank=rank, tag_name="blocks.0", micro_step=0) for rank in (0, 1)]
    write(tmp_path / "a.jsonl", [*apart, *bad, *weight])

    assert set(ids(topk(tmp_path, 6))) == {a.id for a in (*apart, *bad, *weight)}
    assert ids(topk(tmp_path, 6)) == [a.id for a in sorted([*apart, *bad, *weight], key=sort_key)]


def test_strict_json_always(tmp_path):
    """A bare NaN that somebody else wrote becomes null beside `value_text`, and what we write has none."""
    strict = numbered(1, 5, value=None, value_text="nan")
    loose = msgspec.to_builtins(numbered(2, 4)) | {"value": float("-inf"), "baseline": float("nan")}
    write(tmp_path / "a.jsonl", [strict], tail=json.dumps(loose).encode() + b"\n")

    found = topk(tmp_path)

    text = json.dumps(found.analysis(), allow_nan=False)
    records = json.loads(text, parse_constant=lambda word: pytest.fail(f"bare {word}"))
    first = next(iter(records.values()))
    assert (first["value"], first["value_text"], first["baseline"]) == (None, "-inf", None)
    assert found.num_malformed == 0


def test_no_such_directory_and_a_directory_of_runs_are_said(tmp_path):
    with pytest.raises(ConfigError, match="expected a directory of anomalies, found none"):
        topk(tmp_path / "nowhere")
    write(tmp_path / "one" / "anomalies" / "000001.jsonl", [])
    assert topk(tmp_path).num_files == topk(tmp_path / "one").num_files == 1
    write(tmp_path / "two" / "anomalies" / "000001.jsonl", [])
    with pytest.raises(ConfigError, match="expected one run, found 2: one, two; name one"):
        topk(tmp_path)
    with pytest.raises(ConfigError, match="k must be at least 1, got 0"):
        topk(tmp_path / "one", 0)
    assert topk(tmp_path / "one").entries == ()


# msProbe's files. `golden/msprobe_anomaly.json` is a real one, shortened: steps 0 to 4, and the forward of step 5.


def msprobe_records(path):
    return [from_msprobe(msgspec.convert(record, MsprobeRecord)) for record in json.loads(path.read_text()).values()]


@pytest.fixture
def msprobe_run(tmp_path):
    target = tmp_path / "anomaly_detected" / "rank0"
    target.mkdir(parents=True)
    shutil.copy(GOLDEN / "msprobe_anomaly.json", target / "anomaly.json")
    return tmp_path


ORIGIN = "0:encoder.layers.0.linear1.output:0/rank0/actv"


def test_msprobe_order_gives_its_own_answer(msprobe_run):
    """Its top 8 of step 5, as the real tool wrote them: the origin comes last."""
    expected = json.loads((GOLDEN / "msprobe_analyse_step_5.json").read_text())

    analysis = topk(msprobe_run, 8, steps={5}, order="msprobe").analysis()

    assert list(analysis) == list(expected)
    for key, record in expected.items():
        assert {name: analysis[key][name] for name in record} == record
    assert next(reversed(analysis.values()))["tag_name"] == ORIGIN


def test_msprobe_origin_is_found_first(msprobe_run):
    """It lies at place 436 of 1050 in its own order, and last of 8 in its step; the leading cause of all is it."""
    some = msprobe_records(msprobe_run / "anomaly_detected" / "rank0" / "anomaly.json")
    place = [a.tag_name for a in sorted(some, key=msprobe_sort_key)].index(ORIGIN) + 1

    found = topk(msprobe_run)

    assert place > 400
    assert found.worst.anomaly.tag_name == ORIGIN
    assert found.worst.anomaly.step == 5
    assert topk(msprobe_run, 1, min_severity=Severity.CRITICAL).entries[0].anomaly.tag_name == ORIGIN
    assert some[leading_causes(some)[0]].tag_name == ORIGIN
    assert module_of(origin(found.worst.anomaly).name) == "encoder.layers.0.linear1"


def test_msprobe_files_are_read_in_pieces_whatever_their_size(msprobe_run, monkeypatch):
    whole = topk(msprobe_run, 2000)
    for size in (300, 5000, 1 << 20):
        monkeypatch.setattr(files_module, "_CHUNK_BYTES", size)

        assert ids(topk(msprobe_run, 2000)) == ids(whole)
        assert topk(msprobe_run, 3).num_anomalies == whole.num_anomalies


@pytest.mark.parametrize("layout", [{"indent": 4}, {"indent": None}, {"indent": 1, "separators": (" ,", ":")}])
def test_msprobe_files_laid_out_otherwise_are_read_too(msprobe_run, layout):
    path = msprobe_run / "anomaly_detected" / "rank0" / "anomaly.json"
    expected = ids(topk(msprobe_run, 20))
    path.write_text(json.dumps(json.loads(path.read_text()), **layout))

    assert ids(topk(msprobe_run, 20)) == expected


@pytest.mark.parametrize("cut", [10, 1000, 100_000])
def test_a_cut_msprobe_file_gives_what_is_whole(msprobe_run, cut):
    path = msprobe_run / "anomaly_detected" / "rank0" / "anomaly.json"
    whole = topk(msprobe_run, 3).num_anomalies
    path.write_bytes(path.read_bytes()[:-cut])

    found = topk(msprobe_run, 3)

    assert found.torn == (str(path),)
    assert 0 < found.num_anomalies < whole


def test_ours_and_msprobes_mix(msprobe_run):
    write(msprobe_run / "anomalies" / "000001.jsonl", [numbered(1, -1)])

    found = topk(msprobe_run)

    assert found.num_files == 2
    assert found.entries[0].anomaly.step == -1
    assert [path.suffix for path in anomaly_files(msprobe_run)] == [".jsonl", ".json"]


@pytest.mark.parametrize(
    ("tag", "kind", "name"),
    [
        ("0:fc1.weight/rank0/post_grad", "wgrad", "fc1.weight"),
        ("0:fc1.weight/rank12/acc_grad", "wgrad_unreduced", "fc1.weight"),
        ("1:layers.0.input_1:0/rank0/actv", "activation_in", "layers.0"),
        ("0:.output:0/rank0/actv_grad", "dgrad", "model"),
        ("0:.input:0/rank0/actv_grad", "dgrad_in", "model"),
        ("0:fc2.weight/rank0/exp_avg_sq", "exp_avg_sq", "fc2.weight"),
    ],
)
def test_msprobe_tags(tag, kind, name):
    record = from_msprobe(MsprobeRecord(step=1, tag_name=tag, message=""))

    assert (record.kind, module_of(tag), record.tag_name) == (kind, name, tag)


def test_other_names_are_no_msprobe_tags():
    assert module_of("train/loss") == "train/loss"


def joining(name, members, severity=Severity.WARNING, **fields):
    """An incident of these anomalies."""
    given = {"id": name, "title": name, "nature": "finite", "num_members": len(members)} | fields
    return an_incident(severity=severity, members=tuple(one.id for one in members), **given)


def test_notes_and_ill_timing_stand_behind_causes_unless_all_are_asked_for(tmp_path):
    timing = [numbered(n, 2, kind="health", rule="slow-rank", severity=Severity.CRITICAL) for n in range(3)]
    notes = [numbered(10 + n, 3) for n in range(3)]
    causes = [numbered(20 + n, 7 + n, severity=Severity.WARNING) for n in range(3)]
    led = numbered(30, 6)  # a note, but of an incident that became grave
    write(tmp_path / "anomalies" / "0.jsonl", [*timing, *notes, *causes, led])
    write(
        tmp_path / "incidents.jsonl",
        [
            joining("i1", timing, Severity.CRITICAL, nature="liveness"), joining("i2", notes, Severity.INFO),
            joining("i3", [led, *causes]), joining("i4", notes[2:], Severity.INFO, state="merged", merged_into="i2"),
        ],
    )  # fmt: skip

    plain, everything = topk(tmp_path, 8), topk(tmp_path, 8, all_alike=True)

    behind = sorted([*timing, *notes], key=sort_key)
    assert ids(plain) == [led.id, *(a.id for a in causes), *(a.id for a in behind[:4])]
    assert ids(everything)[:6] == [a.id for a in behind]
    assert plain.worst is None and everything.worst.anomaly.id in {a.id for a in timing}
    assert plain.num_anomalies == everything.num_anomalies == 10
    assert ids(topk(tmp_path, 2, incident="i1")) == [a.id for a in sorted(timing, key=sort_key)[:2]]
    assert ids(topk(tmp_path, 8, order="msprobe"))[:3] != ids(plain)[:3]


def test_an_incident_has_one_count_everywhere(tmp_path):
    members = [numbered(n, 3, severity=Severity.WARNING) for n in range(5)]
    write(tmp_path / "anomalies" / "0.jsonl", members)
    write(tmp_path / "incidents.jsonl", [joining("i1", members, num_members=505)])

    found = topk(tmp_path, 3, incident="i1")

    assert (found.num_anomalies, found.num_unwritten) == (505, 500)
    assert (topk(tmp_path, 3, steps=[3], incident="i1").num_anomalies, topk(tmp_path, 3).num_unwritten) == (5, 0)
