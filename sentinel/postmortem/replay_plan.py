"""The replay plan of an incident: from which checkpoint, with which samples and seeds, by which command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from sentinel.anomaly import Anomaly, is_liveness
from sentinel.anomaly_words import place_words
from sentinel.command import ALARM_KINDS
from sentinel.explain.drawing import rank_words
from sentinel.explain.story import Story
from sentinel.incident import Incident
from sentinel.ingest.incarnation import Incarnation
from sentinel.messages import Descriptor
from sentinel.postmortem.report_document import Block, Items, Preformatted, missing, shown
from sentinel.postmortem.run_material import RunMaterial
from sentinel.postmortem.spool_reading import CheckpointSaid, SpoolReading
from sentinel.rank_identity import LABEL

MOST_SAMPLES = 64
"""Ids of samples that are listed of a rank."""
MOST_RANKS = 8
MEASURED_BEFORE = 2
"""Steps before the incident's first that a replay measures too: what was still sound."""
_SEED_NAME = re.compile(r"(?:.*[._-])?seed", re.IGNORECASE)
_SEED_OPTION = re.compile(r"--?[\w.-]*seed(?:[= ])(\S+)", re.IGNORECASE)


def replay_plan(story: Story, material: RunMaterial, reading: SpoolReading) -> tuple[Block, ...]:
    """Return the plan, in the order in which somebody would follow it."""
    incident = story.incident
    processes = [one for attempt in (incident.attempt, -1) for one in reading.attempts.get(attempt, ())]
    descriptors = [one.descriptor for one in processes if one.descriptor is not None]
    causes = [one for one in story.first_causes if not is_liveness(one)]
    first = incident.opened_step
    blocks: list[Block] = [
        *_checkpoint(story.incident, reading, descriptors),
        *_samples(story, reading),
        *_seeds(descriptors, material, reading),
        *_command(material, descriptors),
        *_layout(processes),
    ]
    if not causes:
        return tuple(blocks)
    again = f"It happened again if the replay shows: {shown(place_words(causes[0]))}."
    blocks.append(Items((_repeatable(), f"Measure steps {max(0, first - MEASURED_BEFORE)} to {first} as below.", again)))
    blocks.append(Preformatted(tuple(_switches(story, causes))))
    return tuple(blocks)


def _checkpoint(incident: Incident, reading: SpoolReading, descriptors: Sequence[Descriptor]) -> Iterable[Block]:
    first, attempt = incident.opened_step, incident.attempt
    # One of the very step is sound where it is ranks that are gone, and not numbers.
    behind = first + 1 if incident.nature == "liveness" else first
    said = [one for one in reading.checkpoints if one.attempt in (attempt, -1) and one.step < behind]
    resumed = sorted({one.resumed_step for one in descriptors if 0 <= one.resumed_step <= first})
    if said:
        newest: CheckpointSaid = max(said)
        yield Items((f"Checkpoint: the newest before step {first:,} was written about step {newest.step:,}.",))
    if resumed:
        yield Items((f"Checkpoint: attempt {attempt} itself began from the one whose next step was {resumed[-1]:,}.",))
    where = ", in what was read of a large spool" if reading.is_cut else ""
    lacking = (
        ""
        if said or resumed
        else f'a checkpoint before step {first:,}{where} (monitor.activity("checkpoint") says it), nor '
    )
    yield missing(f"{lacking}where checkpoints lie; the trainer's own log may say it.")


def _samples(story: Story, reading: SpoolReading) -> Iterable[Block]:
    incident, lines = story.incident, []
    said = reading.of_step(incident.opened_step, incident.attempt)
    ranks = [one for one in said if one.end.samples and (not incident.ranks or one.rank in incident.ranks)]
    ranks = ranks or [one for one in said if one.end.samples]
    for one in ranks[:MOST_RANKS]:
        cut = one.end.num_samples_cut + max(0, len(one.end.samples) - MOST_SAMPLES)
        named = ", ".join(shown(str(sample), 100) for sample in one.end.samples[:MOST_SAMPLES])
        lines.append(
            f"Samples of rank {one.rank} in step {incident.opened_step:,}: {named}{f', and {cut:,} more' if cut else ''}"
        )
    if len(ranks) > MOST_RANKS:
        lines.append(f"and those of {len(ranks) - MOST_RANKS} more ranks")
    if lines:
        yield Items(tuple(lines))
    elif incident.skip_samples:
        named = ", ".join(shown(str(sample), 100) for sample in incident.skip_samples[:MOST_SAMPLES])
        more = len(incident.skip_samples) - MOST_SAMPLES
        yield Items((f"Samples that are suspected: {named}{f', and {more:,} more' if more > 0 else ''}",))
    else:
        yield missing(
            f"the ids of the samples of step {incident.opened_step:,}; monitor.log(sample_ids=...) writes them down. "
            "The batch is the one that the loader gives in that step of the same data order."
        )


def _seeds(descriptors: Sequence[Descriptor], material: RunMaterial, reading: SpoolReading) -> Iterable[Block]:
    reported: dict[str, list[int]] = {}
    for one in descriptors:
        for name, value in one.environment.items():
            if _SEED_NAME.fullmatch(name.removeprefix(LABEL)):
                reported.setdefault(f"{name.removeprefix(LABEL)} = {value}", []).append(one.place.rank)
    found = [f"{words} (as {rank_words(sorted(set(ranks)))} reported it)" for words, ranks in reported.items()]
    logged = {
        (name, value) for said in reading.steps for name, value in said.end.scalars.items() if _SEED_NAME.fullmatch(name)
    }
    found += [f"{name} = {value:g} (logged)" for name, value in sorted(logged)[:MOST_RANKS]]
    for command in _commands(material, descriptors):
        found += [f"{value} (on the command line)" for value in _SEED_OPTION.findall(command)]
    if found:
        unique = list(dict.fromkeys(found))
        more = [f"and {len(unique) - MOST_RANKS} more"] if len(unique) > MOST_RANKS else []
        yield Items(tuple(f"Seed: {shown(one, 300)}" for one in (*unique[:MOST_RANKS], *more)))
    else:
        yield missing("seeds; a label keeps them: SENTINEL_LABELS=seed=1234.")


def _commands(material: RunMaterial, descriptors: Sequence[Descriptor]) -> list[str]:
    given = [material.note.command, *(one.environment.get("command", "") for one in descriptors)]
    return list(dict.fromkeys(filter(None, given)))


def _command(material: RunMaterial, descriptors: Sequence[Descriptor]) -> Iterable[Block]:
    commands = _commands(material, descriptors)
    if commands:
        folder = f"cd {shlex.quote(material.note.folder)}" if material.note.folder else ""
        yield Preformatted(tuple(shown(one) for one in filter(None, (folder, *commands[:2]))))
    else:
        yield missing("the command line; a run that is started by sentinel run -- COMMAND has it.")


def _layout(processes: Sequence[Incarnation]) -> Iterable[Block]:
    descriptor = next((one.descriptor for one in processes if one.descriptor is not None), None)
    if descriptor is None:
        yield missing("the layout: no spool of this attempt could be read.")
        return
    place = descriptor.place
    sizes = [f"{axis} {place.size(axis)}" for axis in ("pp", "dp", "tp", "cp", "ep") if place.size(axis) > 1]
    words = ", ".join(sizes)
    ranks = f"{place.world_size:,} rank{'' if place.world_size == 1 else 's'}"
    yield Items((f"Layout: {ranks}{f' ({words})' if sizes else ''}; fewer ranks add in another order.",))


def _repeatable() -> str:
    return (
        "Have torch repeat itself: torch.use_deterministic_algorithms(True), and CUBLAS_WORKSPACE_CONFIG=:4096:8 in the "
        "environment of GPUs."
    )


def _switches(story: Story, causes: Sequence[Anomaly]) -> Iterable[str]:
    incident = story.incident
    start = max(0, incident.opened_step - MEASURED_BEFORE)
    num_steps = incident.opened_step - start + 1
    module = incident.module or causes[0].segment or (causes[0].tag_name if causes[0].kind in ALARM_KINDS else "")
    targets = f" --targets {shlex.quote(shown(module, 200))}" if module else ""
    kinds = ",".join(ALARM_KINDS)
    yield f"sentinel enable -d REPLAY --kinds {kinds} --per-micro-step --at-step {start} --for-steps {num_steps}"
    yield f"sentinel dump -d REPLAY --kinds activation_in,activation{targets} --at-step {start} --for-steps {num_steps}"
    yield "sentinel explain -d REPLAY"
