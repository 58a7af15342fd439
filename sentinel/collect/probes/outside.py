"""Probes of other packages: found by entry point, imported where the trainer's configuration names one, and then alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sentinel.collect.probes.context import Probe, ProbeContext
from sentinel.entry_points import named_parts
from sentinel.errors import ConfigError
from sentinel.monitor_config import PROBE_GROUP


def outside_probes(names: Sequence[str]) -> list[Probe]:
    """Return the probes that are named, in that order.

    ConfigError for one that no package offers, or that cannot be loaded.

    names: `MonitorConfig.outside_probes`.
    """
    found: list[Probe] = []
    for at, part in enumerate(named_parts(PROBE_GROUP, names, "probe")):
        if isinstance(part, str):
            raise ConfigError(f"outside_probes[{at}]: {part}")
        try:
            probe = part.load()
        except ConfigError as error:
            raise ConfigError(f"outside_probes[{at}]: {part.where} {error}") from error
        if not callable(probe):
            what = f"expected a class that is given a ProbeContext, got {probe!r:.100}"
            raise ConfigError(f"outside_probes[{at}]: {part.where} is no probe: {what}")
        found.append(probe)
    return found


def made(probes: Sequence[Probe], context: ProbeContext) -> Iterator[object]:
    """Yield each probe constructed with the context; one that raises is reported and left out, the others go on."""
    for probe in probes:
        try:
            yield probe(context)
        except Exception as error:  # another package's code may fail in any way
            name = getattr(probe, "__qualname__", repr(probe))
            context.guard(name, error, probe=name, lost=f"probe {name} measures nothing")
