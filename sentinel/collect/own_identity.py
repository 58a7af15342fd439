"""What this rank adds to its identity: the GPU that its model is on, and the labels of its configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sentinel.collect.environment import Environment
from sentinel.monitor_config import MonitorConfig
from sentinel.rank_identity import LABEL


def own_labels(config: MonitorConfig) -> dict[str, str]:
    """Return the labels of the configuration as entries of a descriptor's `environment`."""
    return {LABEL + name: value for name, value in config.labels.items()}


def own_gpu(models: Sequence[nn.Module], environment: Environment) -> dict[str, str]:
    """Return `gpu` and `gpu_uuid` of the first parameter's device; nothing of a model that is on no GPU of CUDA.

    Asks the driver for what it knows by heart; does not synchronize. Never initialises CUDA: it is before anything is on it.
    """
    device = next((one.device for model in models for one in model.parameters()), None)
    if device is None or device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = [one.strip() for one in environment.visible_gpus.split(",") if one.strip()]
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    number = visible[index] if index < len(visible) else str(index)
    # One may be named by its own id there, which says nothing of its number.
    found = {
        "gpu": number if number.isdigit() else "",
        "gpu_uuid": uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" if uuid else "",
    }
    return {name: value for name, value in found.items() if value}
