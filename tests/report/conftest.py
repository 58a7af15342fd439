import os
import shutil

import pytest


@pytest.fixture
def needs():
    """Return a function that skips a test where a program is missing; under CI a missing program is a failure."""

    def check(*names):
        missing = [name for name in names if shutil.which(name) is None]
        if missing and os.environ.get("CI"):
            pytest.fail(f"CI installs {', '.join(missing)} by apt, and it is not there")
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")

    return check
