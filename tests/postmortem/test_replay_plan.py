"""The replay plan: checkpoint, samples, seeds and command of the run where they are on record, and valid commands."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import msgspec
import pytest

from sentinel.cli.main import VERBS
from sentinel.cli.main import sentinel as command_line
from sentinel.daemon.command_note import CommandNote, write_note
from sentinel.explain.story import story_of
from sentinel.postmortem.replay_plan import replay_plan
from sentinel.postmortem.report_document import MISSING, Block, Items, Preformatted, Prose
from sentinel.postmortem.run_material import RunMaterial, Standing
from sentinel.postmortem.spool_reading import SpoolReading

from .conftest import BAD, CHECKPOINT, MODULE, RANK


def plan_of(run_dir: Path, **environment: str) -> tuple[Block, ...]:
    """The plan of the run's incident. environment: further entries of what its ranks said of themselves."""
    reading = SpoolReading(run_dir, [(0, 100)])
    for one in reading.incarnations:
        assert one.descriptor is not None
        one.descriptor = msgspec.structs.replace(one.descriptor, environment={**one.descriptor.environment, **environment})
    return replay_plan(story_of(run_dir, "worst"), RunMaterial(run_dir, 1.8e9, Standing()), reading)


def words_of(blocks: tuple[Block, ...]) -> str:
    """What a plan says to do, without what it says is missing."""
    lines = [line for one in blocks if isinstance(one, Items) for line in one.items]
    return "\n".join([*map(str, lines), *(line for one in blocks if isinstance(one, Preformatted) for line in one.lines)])


def missing_of(blocks: tuple[Block, ...]) -> str:
    return "\n".join(one.text for one in blocks if isinstance(one, Prose) and one.tone == MISSING)


def test_checkpoint_and_samples_are_the_recorded_ones(judged: Path) -> None:
    words = words_of(plan_of(judged))

    assert f"before step {BAD} was written about step {CHECKPOINT}" in words
    assert f"Samples of rank {RANK} in step {BAD}: doc-{RANK}-{BAD}-0, doc-{RANK}-{BAD}-1, doc-{RANK}-{BAD}-2" in words
    assert "Layout: 4 ranks (pp 2, dp 2)" in words


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"seed": "1234"}, "Seed: seed = 1234 (as ranks 0-3 reported it)"),
        ({"label.data_seed": "9"}, "Seed: data_seed = 9 (as ranks 0-3 reported it)"),
        ({"command": "python train.py --seed=77"}, "Seed: 77 (on the command line)"),
        ({"command": "python train.py --data-seed 78 --lr 1"}, "Seed: 78 (on the command line)"),
    ],
)
def test_seeds_are_found_where_the_run_has_them(judged: Path, environment: dict[str, str], said: str) -> None:
    plan = plan_of(judged, **environment)

    assert said in words_of(plan)
    assert "seeds" not in missing_of(plan)


def test_no_seed_is_made_up(judged: Path) -> None:
    plan = plan_of(judged, **{"label.seedling": "5", "command": "python train.py --seedlings=5"})

    assert "Seed:" not in words_of(plan) and "seeds; a label keeps them" in missing_of(plan)


def test_the_command_of_sentinel_run_is_there_with_its_folder(judged: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(judged, tmp_path / "good"))
    assert "the command line" in missing_of(plan_of(run_dir))
    write_note(run_dir, CommandNote(began=1.0, command="torchrun train.py", folder="/home/ana"))
    plan = plan_of(run_dir)

    assert "cd /home/ana\ntorchrun train.py" in words_of(plan)
    assert "the command line" not in missing_of(plan)


def test_what_is_to_be_switched_on_can_be_typed(judged: Path) -> None:
    commands = [
        line
        for one in plan_of(judged)
        if isinstance(one, Preformatted)
        for line in one.lines
        if line.startswith("sentinel ")
    ]

    assert any(f"--targets {MODULE}" in line and f"--at-step {BAD - 2}" in line for line in commands)
    for line in commands:
        _, verb, *arguments = shlex.split(line)
        assert verb in VERBS
        command = command_line.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        command.make_context(verb, arguments)
