"""Metrics of MoE layers under the methods of Megatron's tracker, without one collective.

A rank knows its own layers and tokens. What it reports is scaled so that the mean over ranks is Megatron's number: the
daemon forms that mean of what every rank ships, and on one rank the two are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sentinel.collect.monitor import Monitor


@dataclasses.dataclass
class MetricEntry:
    """One metric: a value for each layer, summed over the micro-batches since the last report."""

    values: torch.Tensor
    """[num_layers] fp32, on the device of what was recorded first."""
    reduce_group: Any = None
    """Ranks whose values are summands of one."""
    avg_group: Any = None
    """Ranks whose values are averaged."""
    needs_dp_avg: bool = True
    """Whether data-parallel ranks hold different values; averaging equal ones changes nothing."""
    layers: set[int] = dataclasses.field(default_factory=set)
    """Indices of the layers that were recorded here."""


class MoETracker:
    """`record` in the forward of each MoE layer, `report` once a step: mean, percentiles, layers, and a line for people.

    Source of names, arguments and results: megatron-core, transformer/moe/moe_logging.py, MoEMetricsTracker.
    """

    def __init__(self, monitor: Monitor | None = None) -> None:
        """monitor: ships what is reported; None: writers and console only."""
        self._monitor = monitor
        self._metrics: dict[str, MetricEntry] = {}

    @property
    def metrics(self) -> Mapping[str, MetricEntry]:
        """Name -> what was recorded since the last report."""
        return self._metrics

    def record(
        self,
        name: str,
        value: torch.Tensor | float | None,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Any = None,
        avg_group: Any = None,
        needs_dp_avg: bool = True,
    ) -> None:
        """Add a value of one layer, numbered from 1. Does not wait; a value or layer that is None is left out.

        ValueError for a layer that is not there.
        """
        if layer_number is None or value is None:
            return
        if not 1 <= layer_number <= num_layers:
            raise ValueError(f"layer_number {layer_number} out of range [1, {num_layers}]")
        given = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        self.ensure_initialized(name, num_layers, given.device)
        entry = self._metrics[name]
        entry.reduce_group, entry.avg_group, entry.needs_dp_avg = reduce_group, avg_group, needs_dp_avg
        entry.layers.add(layer_number - 1)
        with torch.no_grad():
            entry.values[layer_number - 1] += given.reshape(()).to(entry.values.device, torch.float32, non_blocking=True)

    def report(
        self,
        loss_scale: float,
        iteration: int,
        writer: Any = None,
        wandb_writer: Any = None,
        per_layer_logging: bool = False,
        force_initialize: bool = False,
        track_names: str | Sequence[str] | None = None,
        num_layers: int | None = None,
        moe_layer_freq: int | Sequence[int] | None = None,
        mtp_num_layers: int | None = None,
        total_loss_dict: MutableMapping[str, Any] | None = None,
        percentiles: Mapping[str, Sequence[float]] | None = None,
        pg_collection: Any = None,
    ) -> str:
        """Return the line for the console, ship and write the values, and begin anew.

        loss_scale: usually 1 over the number of micro-batches. Metrics called `...loss` go into `total_loss_dict`, where one
        is given, instead of the line. Waits for the device once: text needs numbers. No collective, whatever the groups:
        of layers that other ranks hold only the daemon knows, so percentiles are of the layers of this rank.
        """
        del pg_collection
        names = list(self._metrics) if track_names is None else track_names
        names = [names] if isinstance(names, str) else names
        if force_initialize:
            if num_layers is None:
                raise ValueError("num_layers must be provided when force_initialize=True")
            for name in names:
                self.ensure_initialized(name, num_layers + (mtp_num_layers or 0))
        found = {name: self._metrics[name] for name in names if name in self._metrics}
        scalars: dict[str, Any] = {}
        layers: dict[str, torch.Tensor] = {}
        for name, entry in found.items():
            values = layers[name] = entry.values * (loss_scale * _size(entry.reduce_group))
            wanted = (percentiles or {}).get(name, ())
            non_zero = values[values > 0] if len(wanted) else values[:0]
            if non_zero.numel():
                at = torch.tensor(list(wanted), device=values.device, dtype=values.dtype)
                for share, value in zip(wanted, torch.quantile(non_zero, at).tolist(), strict=True):
                    scalars[f"{name}_p{int(share * 100)}"] = value
            count = num_moe_layers(num_layers or len(values), moe_layer_freq, mtp_num_layers if num_layers else None)
            scalars[name] = values.sum() * (self._num_stages() / max(1, count))
        reported = dict(scalars)
        if total_loss_dict is not None:
            for name, value in scalars.items():
                if name.lower().endswith("loss"):
                    total_loss_dict[name] = total_loss_dict[name] + value if name in total_loss_dict else value
                    del reported[name]
        _write(scalars, iteration, writer, wandb_writer)
        if per_layer_logging:
            for name, values in layers.items():
                is_sparse = name in (percentiles or {})
                of_layers = {f"moe/{name}_layer_{at}": value for at, value in enumerate(values.tolist())}
                _write({key: one for key, one in of_layers.items() if one or not is_sparse}, iteration, writer, wandb_writer)
        self._ship(found, scalars, layers, per_layer_logging)
        self.clear()
        return "".join(f" {name}: {value:.2f} |" for name, value in _on_host(reported).items())

    def clear(self) -> None:
        """Set all values to zero; what was recorded once keeps its place."""
        for entry in self._metrics.values():
            entry.values.zero_()

    def ensure_initialized(self, name: str, num_layers: int, device: torch.device | str | int | None = None) -> None:
        """Make a metric that is not there yet: a stage without MoE layers reports zeros, and the mean is of all stages."""
        if name not in self._metrics:
            self._metrics[name] = MetricEntry(torch.zeros(num_layers, dtype=torch.float32, device=device))

    def _num_stages(self) -> int:
        return 1 if self._monitor is None else self._monitor.place.pp_size

    def _ship(
        self, found: Mapping[str, MetricEntry], scalars: Mapping[str, Any], layers: Mapping[str, torch.Tensor], each: bool
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        # Percentiles over the layers of one stage have no mean that means anything.
        monitor.log(**{name: value for name, value in scalars.items() if name in found or self._num_stages() == 1})
        if each:
            for name, values in layers.items():
                here = sorted(found[name].layers)
                monitor.log(**{f"moe/{name}_layer_{at}": values[at] for at in here})


def num_moe_layers(num_layers: int, moe_layer_freq: int | Sequence[int] | None, mtp_num_layers: int | None) -> int:
    """Return how many layers are MoE layers. moe_layer_freq: every n-th, from the first; or 1 for each that is."""
    if moe_layer_freq is None:
        count = num_layers
    elif isinstance(moe_layer_freq, int):
        count = sum(at % moe_layer_freq == 0 for at in range(num_layers))
    else:
        count = sum(moe_layer_freq)
    return count + (mtp_num_layers or 0)


def _size(group: Any) -> int:
    """Return the number of ranks of a process group, which is known without asking them."""
    return 1 if group is None else int(group.size())


def _write(values: Mapping[str, Any], iteration: int, writer: Any, wandb_writer: Any) -> None:
    for name, value in values.items():
        if writer is not None:
            writer.add_scalar(name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log({name: value}, iteration)


def _on_host(values: Mapping[str, Any]) -> dict[str, float]:
    """Return plain numbers, with one wait for all of a device."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return dict(values)
    numbers = torch.stack(list(tensors.values())).tolist()
    return {**values, **dict(zip(tensors, numbers, strict=True))}
