"""What a user of the package runs: python train.py [CONFIG]."""

from __future__ import annotations

import sys

from sentinel_outside.tiny_trainer import TinyTrainer

import sentinel

trainer = TinyTrainer()
monitor = sentinel.attach_tiny(trainer, *sys.argv[1:])
trainer.fit(60, blow_up_at=40)
monitor.detach()
assert not trainer.on_step, "detach takes off what the adapter put on its trainer"
