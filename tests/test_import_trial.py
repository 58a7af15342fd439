"""An import is tried in a process of its own: whatever it does there, this process learns of it in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.import_trial import import_problem

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("Part = 1", ""),
        ("print('hello'); Part = 1", ""),
        ("x = 1", "AttributeError: module 'tried_part' has no attribute 'Part'"),
        ("raise OSError('two\\nlines')", "OSError: two lines ({file}:1)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' ({file}:1)"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence ({file}:1)"),
        ("import os; os._exit(0)", "its import ends the process that imports it, with exit code 0"),
        (
            "import os; os.write(2, b'no \\x1b licence'); os._exit(3)",
            "its import ends the process that imports it, with exit code 3; its last words: \"no \\u001b licence\"",
        ),
        ("import os; os.kill(os.getpid(), 9)", "its import ends the process that imports it, with SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "its import ends the process that imports it, with SIG40"),
    ],
)  # fmt: skip
def test_what_an_import_does_is_said_in_words(body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tried_part.py"
    file.write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert import_problem("tried_part:Part") == says.replace("{file}", str(file))
    assert "tried_part" not in sys.modules


@pytest.mark.parametrize(
    "body", ["import time; time.sleep(600)", "import signal; signal.pthread_sigmask(0, range(1, 32)); signal.pause()"]
)
def test_an_import_that_never_ends_is_given_up(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tried_part.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sentinel.import_trial.SPARE_S", 1.0)

    assert import_problem("tried_part:Part", limit_s=1.0) == "its import does not end within 1 s"


def test_where_no_process_can_be_started_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)

    assert import_problem("no_such_module:Part") == ""
