"""A run of the tests comes to its end whatever one of them does, and says which one it was."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from .support.warm import interpreter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_a_test_that_ends_its_process_is_named_once_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_ends.py").write_text(
        textwrap.dedent("""
        import os

        def test_before(): pass
        def test_ends_it(): os._exit(3)
        def test_after(): pass
        def test_fails(): assert "seven" == "eight"
        """)
    )

    options = ("-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-n", "1", "--dist", "loadfile")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip

    assert "2 failed, 2 passed, 1 error" in done.stdout
    at_once = "\nFAILED test_ends.py::test_fails - in call, after 0 s: AssertionError: assert 'seven' == 'eight'\n"
    assert 0 < done.stdout.find(at_once) < done.stdout.index("= FAILURES =")
    assert "the process of another worker ended in this test" in done.stdout


def test_a_stand_in_that_is_killed_at_any_moment_harms_no_other_one() -> None:
    moments = random.Random(0)
    for _ in range(60):
        killed = subprocess.Popen([interpreter(), "-c", "import time; time.sleep(600)"], stderr=subprocess.DEVNULL)
        time.sleep(0.03 * moments.random())
        killed.kill()
        killed.wait()

    other = subprocess.run([interpreter(), "-c", "print('well')"], capture_output=True, text=True, timeout=200, check=True)

    assert other.stdout == "well\n"
