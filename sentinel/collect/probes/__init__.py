"""Probes: what is measured beyond weights, gradients and activations, one file each.

In: the events of a step. Out: rows and vectors of kinds of their own. Never: waits for the device, or communicates.

A probe is a class that takes a ProbeContext, subscribes to the events it needs, and measures only what the plan selects:
a kind that is not wanted costs neither a hook nor a call in a step.
"""

from __future__ import annotations

from sentinel.collect.probes.alignment import Alignment
from sentinel.collect.probes.attention import Attention
from sentinel.collect.probes.channel import Channel
from sentinel.collect.probes.comm import Communication
from sentinel.collect.probes.context import Event, Events, Probe, ProbeContext
from sentinel.collect.probes.histogram import Histogram
from sentinel.collect.probes.optimizer_state import OptimizerState
from sentinel.collect.probes.precision import Precision
from sentinel.collect.probes.raw_tensors import TensorDump
from sentinel.collect.probes.router import RouterProbe
from sentinel.collect.probes.saturation import SaturationProbe
from sentinel.collect.probes.structure_print import StructurePrint
from sentinel.collect.probes.tensor_trace import TensorTrace
from sentinel.collect.probes.update import Update
from sentinel.collect.probes.weight_spectrum import WeightSpectrum
from sentinel.collect.probes.wgrad_unreduced import WgradUnreduced

PROBES: tuple[Probe, ...] = (
    Histogram,
    WeightSpectrum,
    WgradUnreduced,
    Alignment,
    Update,
    OptimizerState,
    Communication,
    TensorDump,
    TensorTrace,
    StructurePrint,
    Attention,
    RouterProbe,
    Precision,
    SaturationProbe,
    Channel,
)
"""The probes, in the order in which each event calls them."""

__all__ = ["PROBES", "Event", "Events", "Probe", "ProbeContext"]
