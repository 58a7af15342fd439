"""What the config wants measured, and what code has switched off of it."""

from __future__ import annotations

from sentinel.collect.schedule.wishes import Wish
from sentinel.monitor_config import Measurement, ProbeSchedule
from sentinel.record import Kind

NOT_ADJUSTABLE = frozenset({Kind.RESIDUAL, Kind.COMM})
"""Kinds that are measured as their schedule says whatever they cost: rows of the black box, and calls whose two ends are
compared."""


class ConfigWishes:
    """The config in force, as wishes that are due at their own steps."""

    def __init__(self, measurement: Measurement, text_hash: str) -> None:
        self.put_in_force(measurement, text_hash)

    def put_in_force(self, measurement: Measurement, text_hash: str) -> None:
        """Replace the config: measured steps are counted anew.

        An edit is the newest wish: what code had switched off of the former config is on again where this one asks for it.
        """
        self.measurement = measurement
        self.text_hash = text_hash
        self.gone: frozenset[Kind] = frozenset()
        """Kinds that code has switched off."""
        schedules: dict[tuple[ProbeSchedule, bool, bool], set[Kind]] = {}
        for label in dict.fromkeys((*measurement.kinds, *measurement.probes)):
            schedule, kind = measurement.schedule_of(label), Kind.of(label)
            is_free = measurement.is_interval_free(label) and kind not in NOT_ADJUSTABLE
            schedules.setdefault((schedule, label in measurement.probes, is_free), set()).add(kind)
        self.all = [
            Wish(frozenset(kinds), one.targets or (), one, is_adjustable=is_free)
            for (one, _, is_free), kinds in schedules.items()
        ]

    def switch_off(self, kinds: frozenset[Kind]) -> bool:
        """Measure these kinds no more until the config is edited; True when one of them was on."""
        before, self.gone = self.gone, self.gone | kinds
        return before != self.gone

    @property
    def adjustable(self) -> list[Kind]:
        """Kinds whose interval nobody set."""
        return [kind for wish in self.all if wish.is_adjustable and wish.is_open for kind in wish.kinds - self.gone]

    @property
    def is_default(self) -> bool:
        """Whether the config leaves it to Sentinel what is measured."""
        return self.measurement.kinds == Measurement().kinds and not self.measurement.probes

    @property
    def is_exhausted(self) -> bool:
        """Whether the `collect_times` of everything that the config names are over."""
        return bool(self.all) and all(
            wish.schedule is not None
            and wish.schedule.collect_times is not None
            and wish.num_collected >= wish.schedule.collect_times
            for wish in self.all
        )

    @property
    def num_collected(self) -> int:
        """Measured steps since the config came in force, of the kind that has most."""
        return max((wish.num_collected for wish in self.all), default=0)

    def schedule_of(self, kind: Kind) -> ProbeSchedule:
        """Return what the config says of a kind."""
        return self.measurement.schedule_of(kind.label)
