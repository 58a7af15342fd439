"""The story of an incident in words: a golden text, which users see."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sentinel.anomaly import Severity, anomaly_id
from sentinel.command import EnableMonitoring
from sentinel.errors import ConfigError
from sentinel.explain.story import SentAlert, render, story_of
from sentinel.incident import Incident
from sentinel.incidents.peers import IncidentConfig
from sentinel.incidents.tracker import IncidentTracker
from sentinel.recorded_incidents import incident_revisions

from ..support.anomalies import a_nan

GOLDEN = Path(__file__).parent / "golden"


def of_the_demo(kind, name, step, **fields):
    usual = {
        "run": "demo", "rank": 3, "micro_step": 1, "pp_stage": 1, "call_id": 57, "rule": "nan-anywhere", "depth": 1,
        "place": {"dp": 1, "pp": 1}, "dp_size": 2, "pp_size": 2, "time": 1e9 + step,
    }  # fmt: skip
    given = usual | fields
    identity = ("demo", 0, step, given["micro_step"], given["rank"], f"{name}/{kind}", given["rule"])
    return a_nan(kind, name, step, id=anomaly_id(*identity), **given)


def steps_of_a_fault():
    """A NaN born in blocks.2.mlp.fc1 on rank 3 in a skipped step; module monitoring sees it come again at step 45."""
    border = {"border": "block_output", "segment": "blocks.2"}
    merged = {"rank": None, "micro_step": None, "call_id": None, "place": {}, "ranks": (0, 1, 2, 3)}
    first = [
        of_the_demo("activation", "blocks.2", 41, site_pos=10, **border),
        of_the_demo("activation", "blocks.3", 41, site_pos=20, call_id=61, border="block_output", segment="blocks.3"),
        of_the_demo("scalar", "loss", 41, **merged),
        of_the_demo("dgrad", "blocks.2", 41, site_pos=10, call_id=70, border="block_output", segment="blocks.3"),
        of_the_demo("dgrad", "blocks.0", 41, rank=1, pp_stage=0, depth=0, site_pos=4, call_id=33, place={"dp": 1, "pp": 0}),
        *(of_the_demo("wgrad", f"blocks.{i}.mlp.fc1.weight", 41, depth=i // 2, pp_stage=i // 2, **merged) for i in range(4)),
    ]
    again = [
        of_the_demo("activation", "blocks.2.mlp.fc1", 45, site_pos=7, call_id=49, segment="blocks.2"),
        of_the_demo("activation", "blocks.2.mlp.act", 45, site_pos=8, call_id=50, segment="blocks.2"),
    ]
    return {41: first, 45: again}


@pytest.fixture
def run(tmp_path):
    """The run directory that a daemon would leave of it."""
    tracker = IncidentTracker(IncidentConfig(episode_quiet_steps=0))
    steps = steps_of_a_fault()
    revisions = [i for step in range(40, 66) for i in tracker.update(step, steps.get(step, []), is_skipped=step in steps)]
    (tmp_path / "anomalies").mkdir()
    for index, found in enumerate(steps.values(), 1):
        body = b"".join(msgspec.json.encode(a) + b"\n" for a in found)
        (tmp_path / "anomalies" / f"{index:06d}.jsonl").write_bytes(body)
    (tmp_path / "incidents.jsonl").write_bytes(b"".join(msgspec.json.encode(i) + b"\n" for i in revisions))
    (tmp_path / "control").mkdir()
    command = EnableMonitoring(id="c1", seq=1, at_step=43, for_steps=20, ranks=(2, 3), reason="nan-anywhere at step 41")
    (tmp_path / "control" / "000001.json").write_bytes(msgspec.json.encode(command))
    return tmp_path


def alerts(run):
    (incident,) = {i.id for i in incident_revisions(run)}
    return [
        (incident, SentAlert(sink="slack", change="opened", revision=1, is_page=True, outcome="sent")),
        (incident, SentAlert(sink="slack", change="refined", revision=2, is_page=False, outcome="")),
        ("iother", SentAlert(sink="slack", change="opened", revision=1, is_page=True, outcome="sent")),
    ]


def test_story_in_words(run):
    text = render(story_of(run, "latest", alerts(run)))

    golden = GOLDEN / "explain.txt"
    assert text + "\n" == golden.read_text()


def test_story_as_data(run):
    story = story_of(run, "i", alerts(run))

    assert (story.incident.module, story.incident.state) == ("blocks.2.mlp.fc1", "resolved")
    assert story.root.tag_name == "blocks.2"
    assert story.followed.num_anomalies == 10
    assert (len(story.commands), len(story.inside), len(story.alerts), story.num_missing) == (1, 2, 2, 0)
    assert msgspec.json.decode(msgspec.json.encode(story.as_object()))["text"] == render(story)


def test_all_that_the_text_says_of_the_incident_is_in_the_data(run):
    story = story_of(run, "latest", alerts(run))
    evidence = ("suspected hardware: rank 3 alone", "suspected hardware: to do: move it", "seen in segment blocks.2")
    one = msgspec.structs.replace(story.incident, suspected="hardware", evidence=(*evidence, *story.refined))

    told = msgspec.structs.replace(story, incident=one).as_object()

    assert (told["steps"], told["diagnosis"], told["to_do"]) == (one.steps, "hardware", "move it")
    assert told["reasons"] == ["rank 3 alone"]
    assert told["facts"] == ["seen in segment blocks.2"]
    assert len(told["refined"]) == 1
    for words in (told["steps"], told["diagnosis"], told["to_do"], *told["reasons"], *told["facts"], *told["refined"]):
        assert words in told["text"]


def test_a_story_survives_the_loss_of_its_records(run):
    for path in (run / "anomalies").iterdir():
        path.unlink()

    story = story_of(run, "latest")

    assert story.root is None
    assert story.num_missing == 11
    assert "its record is no longer there" in render(story)


def test_merged_incidents_are_one_story(run):
    (own,) = {i.id for i in incident_revisions(run)}
    other = Incident(
        id="izzz", revision=1, run="demo", attempt=0, state="merged", merged_into=own, opened_step=44, last_step=44,
        severity=Severity.INFO, title="t", root=None, members=("gone",),
    )  # fmt: skip
    with (run / "incidents.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(other) + b"\n")

    story = story_of(run, "latest")

    assert story.incident.id == own
    assert story.num_missing == 1


def test_no_such_incident_is_said(run):
    with pytest.raises(ConfigError, match=r'"nope": no incident has an id that begins so; known: i'):
        story_of(run, "nope")
