"""For tests of rules, detectors, sinks and daemons, here and elsewhere: a clock, runs with planted faults, a battery.

In: what a test plants. Out: spools, steps, frames. Never: torch, sleeping, the network.

    run = SyntheticRun(tmp_path / "run", pp=2, dp=2)
    run.plant(Nan(step=5, module="layers.2.mlp", rank=2, micro_step=1))
    run.write(8)
    run.end()

writes the spools of four ranks as a trainer would, byte for byte through the same writer, without torch.
"""

from sentinel.testing.battery import BATTERY, DetectorUnderTest
from sentinel.testing.clock import EPOCH_S, FakeClock
from sentinel.testing.faults import BitFlip, BlowUp, Fault, LossJump, Nan
from sentinel.testing.synthetic_run import SyntheticRun
from sentinel.wire.frame import Message

__all__ = [
    "BATTERY",
    "EPOCH_S",
    "BitFlip",
    "BlowUp",
    "DetectorUnderTest",
    "FakeClock",
    "Fault",
    "LossJump",
    "Message",
    "Nan",
    "SyntheticRun",
]
