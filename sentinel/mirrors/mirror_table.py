"""The table of mirrors: the `mirrors:` section of the daemon's configuration."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.errors import ConfigError
from sentinel.mirrors.mirror import MirrorSettings
from sentinel.mirrors.mlflow_mirror import MlflowConfig
from sentinel.mirrors.otlp_mirror import OtlpConfig
from sentinel.mirrors.tensorboard_mirror import TensorBoardConfig
from sentinel.mirrors.wandb_mirror import WandbConfig
from sentinel.outside_structs import OutsideStructs

ENTRY_POINTS = "sentinel.mirrors"
"""Group of entry points: the `type` of a mirror -> its configuration, a struct that keeps `mirror.MirrorSettings`."""

MirrorConfig = TensorBoardConfig | WandbConfig | MlflowConfig | OtlpConfig
"""Distinguished by `type`, as in MIRRORS; those of other packages by the names of entry points."""

MIRRORS: dict[str, type[MirrorSettings]] = {
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "otlp": OtlpConfig,
}
"""`type` -> configuration of the mirrors that come with Sentinel."""


def outside_mirrors() -> OutsideStructs:
    """Return the mirrors of other packages, by `type`; none is imported before it is asked for."""
    return OutsideStructs(ENTRY_POINTS, "a mirror", fields=("name", "select"), methods=("problem", "build"), taken=MIRRORS)


def check_names(mirrors: Sequence[MirrorSettings]) -> None:
    """Raise ConfigError where two mirrors have one name, or one that cannot be a file's."""
    names = [one.name for one in mirrors]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"mirrors: expected every name once, got {name!r} {names.count(name)} times")
        if not name.strip(".") or not all(char.isascii() and (char.isalnum() or char in "-_.") for char in name):
            raise ConfigError(f"mirrors: expected a name of letters, digits, '-', '_', '.', got {name!r}")
