"""AlertContexts: where the ranks of a run run, and when its incidents began, for those who are notified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from sentinel.incident import Incident
from sentinel.ingest.incarnation import Incarnation
from sentinel.rank_identity import RankIdentity
from sentinel.report.alert_context import AlertContext, context_of
from sentinel.store.journal import Journal

_INCIDENT = msgspec.json.Decoder(Incident)


class AlertContexts:
    """Of one run. May be asked from any thread."""

    def __init__(
        self,
        journal: Journal,
        incarnations: Callable[[], Iterable[Incarnation]],
        labels: Mapping[str, str] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """incarnations: the processes that are followed; after a restart they are described from the spool again.
        labels: of every run; those of the run itself take precedence.
        """
        self._file_system = "" if run_dir is None else f"{run_dir.stat().st_dev:x}"
        self.labels: Mapping[str, str] = labels or {}
        """Labels of every run that the daemon serves."""
        self._journal = journal
        self._incarnations = incarnations

    def of(self, incident: Incident) -> AlertContext:
        """Return what messages say of an incident beside its judgement."""
        # The loop may add processes meanwhile.
        identities = identities_of(list(self._incarnations()), incident.attempt)
        found = context_of(incident, identities, self._opened(incident))
        return msgspec.structs.replace(found, file_system=self._file_system, labels={**self.labels, **found.labels})

    def _opened(self, incident: Incident) -> float:
        first = self._journal.found.first_revision(incident.id)
        return incident.time if first is None else _INCIDENT.decode(first).time


def identities_of(incarnations: Iterable[Incarnation], attempt: int) -> dict[int, RankIdentity]:
    """Return rank -> identity of the newest process of each rank that took part in an attempt."""
    newest: dict[int, Incarnation] = {}
    for one in incarnations:
        is_of_it = one.attempt in (None, attempt)
        if is_of_it and one.descriptor is not None and one.first_wall_ns >= _began(newest.get(one.rank)):
            newest[one.rank] = one
    return {
        rank: RankIdentity.reported_by(rank, one.descriptor.environment)
        for rank, one in sorted(newest.items())
        if one.descriptor is not None
    }


def _began(incarnation: Incarnation | None) -> int:
    return -1 if incarnation is None else incarnation.first_wall_ns
