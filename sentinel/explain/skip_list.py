"""The skip list of a run: batches that `batch` diagnoses suspect, read from its `incidents.jsonl`.

Needs no torch, no daemon.

There is no second file to keep in step: `incidents.jsonl` is appended exactly once and recovered after a crash, and each
revision of an incident says which steps it suspects. What a later revision takes back is no longer on the list.

    skip = sentinel.skip_list("sentinel_runs/my-run")
    if step in skip: continue                          # the same batches in the same order
    kept = [i for i in indices if i not in skip.samples]
    if step in skip.of(rank): ...                      # where each rank draws its own part

A step is a whole one: all of its micro-batches. `sentinel export --format skip-list` writes the same as JSON lines, which
`skip_list` reads too.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import msgspec

from sentinel.errors import MALFORMED, ConfigError

REASON = "suspected batch: "


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """One step whose batch is suspected."""

    attempt: int
    step: int
    """As the trainer counts it, of `attempt`: the newest attempt that trained on the batch."""
    ranks: tuple[int, ...] = ()
    """The ranks whose part of it it was; empty: all."""
    samples: tuple[int | str, ...] = ()
    """Ids of the samples of all steps of the incident, where the trainer logs them."""
    incident: str = ""
    reason: str = ""


class _RevisionRead(msgspec.Struct, frozen=True):
    """Of a revision of an incident, what a skip list reads."""

    id: str
    revision: int
    attempt: int
    state: str
    suspected: str = msgspec.field(default="unknown", name="verdict")
    evidence: tuple[str, ...] = ()
    skip_steps: tuple[int, ...] = ()
    skip_ranks: tuple[int, ...] = ()
    skip_samples: tuple[int | str, ...] = ()


class SkipList(Container[int]):
    """Suspected batches. `step in skips` asks for a step, `sample in skips.samples` for a sample."""

    def __init__(self, skips: Iterable[Skip] = (), problems: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        """Lines that were not understood, in words, with file and line: what they said is not on the list."""
        self.skips = tuple(sorted(skips, key=lambda one: (one.step, one.attempt, one.incident)))
        self.steps = frozenset(one.step for one in self.skips)
        self.samples: frozenset[int | str] = frozenset(sample for one in self.skips for sample in one.samples)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last step of each stretch, rising."""
        found: list[tuple[int, int]] = []
        for step in sorted(self.steps):
            if found and step == found[-1][1] + 1:
                found[-1] = (found[-1][0], step)
            else:
                found.append((step, step))
        return tuple(found)

    def of(self, rank: int) -> SkipList:
        """Return those whose part of the batch a rank had: those of all ranks, and its own."""
        return SkipList((one for one in self.skips if not one.ranks or rank in one.ranks), self.problems)

    def __contains__(self, step: object) -> bool:
        return step in self.steps

    def __iter__(self) -> Iterator[Skip]:
        return iter(self.skips)

    def __len__(self) -> int:
        return len(self.skips)

    def __repr__(self) -> str:
        return f"SkipList(steps={sorted(self.steps)}, {len(self.samples)} samples)"


def skip_list(run: str | os.PathLike[str], *, attempt: int | None = None) -> SkipList:
    """Return the suspected batches of a run, as of now: none while nothing is suspected.

    run: its directory, its `incidents.jsonl`, or what `export --format skip-list` wrote. attempt: of this one alone. A torn
    last line is left out; other lines that are not understood are listed in `problems`. ConfigError when there is no such
    run, when the directory holds runs instead of being one, or when no line of a file is understood.
    """
    path = Path(run)
    if path.is_dir():
        held = [] if (path / "incidents.jsonl").exists() else _runs_in(path)
        if held:
            raise ConfigError(
                f"{path}: expected a run's directory, got one that holds runs: name one of {len(held)}, {held[0]}"
            )
        path = path / "incidents.jsonl"
    elif not path.is_file():
        raise ConfigError(f"{path}: expected a run's directory, or its incidents.jsonl; there is neither")
    reported, skips, problems = _read(path)
    if problems and not reported and not skips:
        raise ConfigError(f"{problems[0]}; no line of it is understood: expected incidents.jsonl, or an exported skip list")
    skips += [
        Skip(
            attempt=one.attempt, step=step, ranks=one.skip_ranks, samples=one.skip_samples, incident=one.id,
            reason=next((line.removeprefix(REASON) for line in one.evidence if line.startswith(REASON)), ""),
        )
        for one in reported.values()
        if one.suspected == "batch" and one.state != "merged"
        for step in one.skip_steps
    ]  # fmt: skip
    return SkipList((one for one in skips if attempt in (None, one.attempt)), problems)


def _runs_in(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if (one / "incidents.jsonl").exists() or (one / "spool").is_dir())


def _read(path: Path) -> tuple[dict[str, _RevisionRead], list[Skip], list[str]]:
    """Return the newest revision of each incident, exported entries, and what was not understood."""
    newest: dict[str, _RevisionRead] = {}
    skips: list[Skip] = []
    problems: list[str] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []  # Nothing has happened yet.
    incidents, exported = msgspec.json.Decoder(_RevisionRead), msgspec.json.Decoder(Skip)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            reported = incidents.decode(line)
        except MALFORMED as error:
            try:
                skips.append(exported.decode(line))
            except MALFORMED:
                if number < len(lines):  # The last may be torn.
                    problems.append(f"{path}:{number}: {error}")
            continue
        if reported.id not in newest or newest[reported.id].revision <= reported.revision:
            newest[reported.id] = reported
    return newest, skips, problems
