"""Vectors of the user's own that traces project tokens onto: read from safetensors files that the trainer's config names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from sentinel.collect.probes.dump_writer import DTYPES
from sentinel.errors import WireError
from sentinel.tensor_file import Stored, read_tensor_file
from sentinel.trace import MOST_SIZES

log = logging.getLogger("sentinel")

MOST_WIDTH = 2**20
"""Numbers of one vector; a bound on memory: 64 of them have 256 MiB."""
_TORCH = {DTYPES[one]: one for one in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


class OwnVectors:
    """The vectors of a rank, read once, when it attaches. What cannot be read is said then, and where it is asked for."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """files: name -> file, `MonitorConfig.trace.vectors`."""
        self._files = dict(files)
        self._read: dict[str, torch.Tensor] = {}
        """Name -> [number, width] fp32, on the host."""
        self._why_not: dict[str, str] = {}
        self._placed: dict[tuple[str, torch.device], torch.Tensor] = {}
        for name, file in self._files.items():
            try:
                self._read[name] = _vectors_of(Path(file))
            except (OSError, ValueError, WireError) as error:
                self._why_not[name] = f"trace.vectors.{name}: {error}"
                log.warning("%s; nothing is projected onto them", self._why_not[name])

    def directions(self, name: str, width: int, device: torch.device) -> torch.Tensor:
        """Return [width, number] fp32 on a device: a column each vector. Copied there once; does not wait for it.

        ValueError where there are none of this name, and where they are not as long as a token of the tensor.
        """
        if name not in self._read:
            known = ", ".join(sorted(self._files)) or "none"
            raise ValueError(
                self._why_not.get(name, f'expected vectors that trace.vectors names ({known}), got "{name[:80]}"')
            )
        found = self._read[name]
        if found.shape[1] != width:
            raise ValueError(
                f"expected vectors of {width} numbers, as many as a token of it has, got {found.shape[1]} in "
                f"{self._files[name]} (trace.vectors.{name})"
            )
        if (name, device) not in self._placed:
            self._placed[name, device] = found.to(device, non_blocking=True).T
        return self._placed[name, device]


def _vectors_of(path: Path) -> torch.Tensor:
    """Return [number, width] fp32. ValueError, WireError and OSError say what is wrong with the file."""
    file = read_tensor_file(path)
    if len(file.tensors) != 1:
        raise ValueError(f"{path}: expected one tensor, got {len(file.tensors)}")
    [stored] = file.tensors.values()
    number = stored.shape[0] if len(stored.shape) == 2 else 0
    if not 1 <= number <= MOST_SIZES["projection"] or not 1 <= stored.shape[1] <= MOST_WIDTH or stored.dtype not in _TORCH:
        raise ValueError(
            f"{path}: expected a tensor of {', '.join(_TORCH)} and shape [1 to {MOST_SIZES['projection']} vectors, hidden "
            f"size], got {stored.dtype} {list(stored.shape)}"
        )
    return _elements(path, stored)


def _elements(path: Path, stored: Stored) -> torch.Tensor:
    with path.open("rb") as stream:
        stream.seek(stored.begin)
        data = bytearray(stream.read(stored.num_bytes))
    if len(data) != stored.num_bytes:
        raise ValueError(f"{path}: torn: expected {stored.num_bytes} bytes, got {len(data)}")
    vectors = torch.frombuffer(data, dtype=_TORCH[stored.dtype]).reshape(stored.shape)
    return vectors.to(device="cpu", dtype=torch.float32)
