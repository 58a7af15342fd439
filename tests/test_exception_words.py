"""What went wrong in somebody else's code is one line, with the place in their code and in nobody else's."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from sentinel.detect import Declaration
from sentinel.errors import ConfigError
from sentinel.exception_words import described, raised_at


def test_the_innermost_place_of_theirs_is_named(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text("def inner():\n    raise ValueError('two\\n  lines')\n\n\ndef outer():\n    inner()\n")

    with pytest.raises(ValueError) as raised:
        runpy.run_path(str(file))["outer"]()

    assert described(raised.value) == f"ValueError: two lines ({file}:2)"


def test_a_place_in_sentinel_or_in_a_library_is_no_place_of_theirs() -> None:
    with pytest.raises(ConfigError) as ours:
        Declaration(summary="any", over="nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError) as library:
        np.broadcast_to(np.zeros(3), (2, 2))

    assert f"({__file__}:" in raised_at(ours.value) and f"({__file__}:" in raised_at(library.value)


def test_what_was_never_raised_has_no_place_and_what_cannot_be_printed_is_escaped() -> None:
    assert described(OSError("no \x1b[31m sensor")) == "OSError: no \\u001b[31m sensor"
