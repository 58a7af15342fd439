"""The skip list of a run: batches that `batch` verdicts suspect, read from its `incidents.jsonl`. Needs no torch, no daemon.

There is no second file to keep in step: `incidents.jsonl` is appended exactly once and recovered after a crash, and each
revision of an incident says which steps it suspects. What a later revision takes back is no longer on the list.

    skip = sentinel.skip_list("sentinel_runs/my-run")
    if step in skip: continue                          # the same batches in the same order
    kept = [i for i in indices if i not in skip.samples]
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError

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


class _Told(msgspec.Struct, frozen=True):
    """Of a revision of an incident, what a skip list reads."""

    id: str
    revision: int
    attempt: int
    state: str
    verdict: str = "unknown"
    evidence: tuple[str, ...] = ()
    skip_steps: tuple[int, ...] = ()
    skip_ranks: tuple[int, ...] = ()
    skip_samples: tuple[int | str, ...] = ()


class SkipList(Container[int]):
    """Suspected batches. `step in skips` asks for a step, `sample in skips.samples` for a sample."""

    def __init__(self, skips: Iterable[Skip] = ()) -> None:
        self.skips = tuple(sorted(skips, key=lambda one: (one.step, one.attempt, one.incident)))
        self.steps = frozenset(one.step for one in self.skips)
        self.samples: frozenset[int | str] = frozenset(sample for one in self.skips for sample in one.samples)

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

    run: its directory, or its `incidents.jsonl`. attempt: of this one alone. A torn last line is left out.
    ConfigError when there is no such run.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "incidents.jsonl"
    elif not path.is_file():
        raise ConfigError(f"{path}: expected a run's directory, or its incidents.jsonl; there is neither")
    newest: dict[str, _Told] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []  # Nothing has happened yet.
    decoder = msgspec.json.Decoder(_Told)
    for line in lines:
        try:
            told = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if told.id not in newest or newest[told.id].revision <= told.revision:
            newest[told.id] = told
    return SkipList(
        Skip(
            attempt=one.attempt, step=step, ranks=one.skip_ranks, samples=one.skip_samples, incident=one.id,
            reason=next((line.removeprefix(REASON) for line in one.evidence if line.startswith(REASON)), ""),
        )
        for one in newest.values()
        if one.verdict == "batch" and one.state != "merged" and attempt in (None, one.attempt)
        for step in one.skip_steps
    )  # fmt: skip
