"""`attach`: checks its arguments, agrees with the other ranks on run and attempt, and makes the rank's monitor.

A failure of Sentinel never ends the training: only a ConfigError leaves `attach`.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sentinel.collect.assembly import assemble
from sentinel.collect.attempt import agree
from sentinel.collect.environment import read_environment
from sentinel.collect.hooks.optimizers import inner_optimizers
from sentinel.collect.hooks.structure import unwrap
from sentinel.collect.lifecycle.fork_guard import is_alive_in
from sentinel.collect.lifecycle.session import MonitorSession
from sentinel.collect.monitor import Monitor
from sentinel.collect.parallel.several_models import listed
from sentinel.collect.parallel.topology import Topology
from sentinel.collect.unmeasured import Unmeasured
from sentinel.errors import ConfigError, SentinelError
from sentinel.monitor_config import ConfigSource, MonitorConfig, read_source
from sentinel.place import Place

log = logging.getLogger("sentinel")

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[MonitorSession]] = weakref.WeakKeyDictionary()
"""Model -> the session that measures it; its hooks keep the session alive."""


def attach(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module | Sequence[nn.Module]],
    optimizer: Any = None,
    config: ConfigSource | MonitorConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    place: Place | None = None,
    grad_acc_steps: int | None = None,
    first_step: int = 0,
) -> Monitor | Unmeasured:
    """Attach Sentinel to a model (or a list of pipeline chunks) and its optimizer (one, a list, a mapping by name, or None).

    Several models that are no pipeline are given by name, `{"G": generator, "D": discriminator}`: a model's name is the
    prefix of its tensors' names, and each model has its own layers and its own forward order.

    Waits at most 5 s for rank 0, to agree on run and attempt; launches nothing on the device. Returns the monitor, or one
    that measures nothing when SENTINEL_DISABLE is set or the run directory cannot be used (the log names the reason).
    Raises ConfigError for what only the caller can correct: an unknown key, an argument that is no model.
    """
    environment = read_environment()
    if environment.is_disabled:
        return Unmeasured("SENTINEL_DISABLE is set", is_wanted=True)
    for problem in environment.label_problems:
        log.warning("sentinel: %s; it is left out", problem)
    models, names = listed(model)
    if first_step < 0:
        raise ConfigError(f"attach: first_step must be at least 0, got {first_step}")
    if grad_acc_steps is not None and grad_acc_steps < 1:
        raise ConfigError(f"attach: grad_acc_steps must be at least 1, got {grad_acc_steps}")
    several = isinstance(optimizer, (list, tuple, Mapping)) and not callable(getattr(optimizer, "step", None))
    optimizers = optimizer if several else [] if optimizer is None else [optimizer]
    for one in optimizers.values() if isinstance(optimizers, Mapping) else optimizers:
        if not callable(getattr(one, "step", None)) and next(inner_optimizers(one), None) is None:
            raise ConfigError(f"attach: optimizer must have a step method, got {type(one).__name__}")
    source = read_source(config)
    for one in models:
        reference = _attached.get(unwrap(one))
        former = None if reference is None else reference()
        if former is not None and former.is_alive:
            log.info(
                "sentinel: this model is watched already, as run %s: that ends, this takes its place", former.attempt.run
            )
            former.end("detached")
    incarnation = secrets.token_bytes(16)
    try:
        attempt = agree(source.config, environment, incarnation, is_alive_in)
        monitor = assemble(
            models, optimizers, source, Topology(environment, place, names), attempt, incarnation,
            grad_acc_steps=grad_acc_steps, first_step=first_step,
        )  # fmt: skip
    except ConfigError:
        raise
    except (OSError, SentinelError) as error:
        return Unmeasured(str(error))
    except Exception as error:  # The trainer never dies for Sentinel: a model that nobody foresaw trains unmeasured.
        log.warning("sentinel: attach failed", exc_info=True)
        return Unmeasured(f"{type(error).__name__}: {error}")
    for one in models:
        _attached[unwrap(one)] = weakref.ref(monitor.session)
    return monitor
