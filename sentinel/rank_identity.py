"""RankIdentity: the host, the GPU and the job of a rank, as its process reports them, and its user's labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

MAX_LABELS = 16
"""Most labels of a rank; a bound on what travels and on the length of messages."""
MAX_LABEL_CHARS = 256
"""Most characters of a label's value; a bound as above."""
LABEL = "label."
"""What the name of a label begins with among the entries of a descriptor's `environment`."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,62}")


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rank runs, for people; empty fields are not known."""

    rank: int
    host: str = ""
    node: str = ""
    """Name of the machine as the scheduler calls it, where that is not `host`: a pod has a host name of its own."""
    pod: str = ""
    """Name of the pod in Kubernetes."""
    job: str = ""
    """Id of the job at the scheduler, or of the launch at the launcher."""
    gpu: str = ""
    """Number of the GPU on its host, 0-based."""
    gpu_uuid: str = ""
    """The GPU's own id, by which a repair finds it."""
    labels: dict[str, str] = {}
    """What the user calls the run by: team, cluster."""

    @staticmethod
    def reported_by(rank: int, environment: Mapping[str, str]) -> RankIdentity:
        """Return the identity that the `environment` of a rank's descriptor tells."""
        labels = {key.removeprefix(LABEL): value for key, value in environment.items() if key.startswith(LABEL)}
        known = {key: environment.get(key, "") for key in ("host", "node", "pod", "job", "gpu", "gpu_uuid")}
        return RankIdentity(rank=rank, labels=labels, **known)

    @property
    def in_words(self) -> str:
        """`node17, pod trainer-3, GPU 5 (GPU-1f3a...)`; empty where nothing is known."""
        machine = self.node or self.host
        gpu = f"GPU {self.gpu}" if self.gpu else ""
        if self.gpu_uuid:
            gpu = f"{gpu or 'GPU'} ({self.gpu_uuid})"
        return ", ".join(filter(None, [machine, f"pod {self.pod}" if self.pod and self.pod != machine else "", gpu]))


def label_problem(name: str, value: str) -> str:
    """Return why a label cannot be one; empty when it can."""
    if not _NAME.fullmatch(name):
        return f"expected a name of at most 63 letters, digits, '_', '.', '-' that begins with a letter, got {name[:80]!r}"
    if len(value) > MAX_LABEL_CHARS:
        return f"{name}: expected at most {MAX_LABEL_CHARS} characters, got {len(value)}"
    return ""
