"""`sentinel import`: what another tool logged or recorded as a run of ours, and its configuration as ours."""

from __future__ import annotations

import click

from sentinel.cli.import_config import msprobe_config
from sentinel.cli.import_log import log
from sentinel.cli.import_msprobe import msprobe


@click.group("import")
def import_() -> None:
    """Read what another tool logged or recorded, or its configuration."""


import_.add_command(log)
import_.add_command(msprobe)
import_.add_command(msprobe_config)
