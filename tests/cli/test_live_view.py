"""`sentinel watch`: into a pipe, over a terminal, of a run that is not there yet, and how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.live_view import Watcher, follow
from sentinel.cli.main import CLEAN, FOUND, run_cli
from sentinel.cli.picture_outputs import OnePerChange, output_on
from sentinel.cli.run_picture import RunPicture
from sentinel.testing import Nan

from ..support.hostile_run import write_hostile_run
from ..support.serving import judge_run, small_run

CONTROL = re.compile(r"\x1b|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are well, ill and over, and one whose names are hostile; the newest is `ill`."""
    home = tmp_path_factory.mktemp("runs")
    write_hostile_run(home / "evil")
    judge_run(home / "evil")
    small_run(home / "well").write(5)
    over = small_run(home / "over")
    over.write(5)
    over.end()
    judge_run(home / "over", is_over=True)
    ill = small_run(home / "ill")
    ill.plant(Nan(step=5, module="layers.1")).write(10)
    judge_run(home / "ill")
    for at, name in enumerate(("evil", "well", "over", "ill")):
        os.utime(home / name / "spool", (at, at))
    return home


@pytest.fixture(autouse=True)
def _in_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_DIR", str(home))


@pytest.mark.parametrize(("run", "code"), [("well", CLEAN), ("over", CLEAN), ("ill", FOUND), ("evil", FOUND)])
def test_once_prints_one_picture_and_its_code_says_whether_the_run_is_well(
    run: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["watch", run, "--once"]) == code
    assert run_cli(["status", run]) == code, "as status says it"
    out, err = capsys.readouterr()
    assert out.startswith(f"{run}  step ") and err == ""
    assert CONTROL.search(out) is None


def test_json_is_one_object_a_picture_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["watch", "ill", "--once", "--json"]) == FOUND

    (line,) = capsys.readouterr().out.splitlines()
    picture = json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert (picture["run"], picture["step"], picture["state"]) == ("ill", 9, "running")
    assert picture["incidents"][0]["severity"] == "critical" and len(picture["ranks"]) == 4


def test_without_a_run_it_is_the_newest_also_of_the_directory_that_one_stands_in(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, where in ((str(home), tmp_path), (None, home), (None, home / "ill")):
        monkeypatch.setenv("SENTINEL_DIR", setting) if setting else monkeypatch.delenv("SENTINEL_DIR")
        monkeypatch.chdir(where)
        run_cli(["watch", "--once"])
        assert capsys.readouterr().out.startswith("ill  step 9")
        monkeypatch.setenv("SENTINEL_DIR", str(home))
    run_cli(["watch", str(home), "--once"])
    assert capsys.readouterr().out.startswith("ill  step 9"), "of a directory of runs the newest"
    monkeypatch.delenv("SENTINEL_DIR")
    monkeypatch.chdir(tmp_path)
    assert run_cli(["watch"]) == 2
    assert "expected runs, found none; name a run's directory" in capsys.readouterr().err


def test_once_of_a_run_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "spool").mkdir(parents=True)

    assert run_cli(["watch", "nope", "--once"]) == 2
    assert '"nope": expected a run, found none' in capsys.readouterr().err
    assert run_cli(["watch", str(tmp_path), "--once"]) == 2
    assert run_cli(["watch", str(tmp_path / "empty"), "--once"]) == 2
    assert "no rank has written anything yet" in capsys.readouterr().err
    assert run_cli(["watch", "ill", "--every", "0"]) == 2


class Recorded:
    """An output that keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[RunPicture] = []
        self.last: RunPicture | None = None

    def show(self, picture: RunPicture) -> None:
        self.shown.append(picture)

    def close(self, last: RunPicture | None) -> None:
        self.last = last


def followed(given: str, moves: list[Callable[[], Any]], *, until_end: bool = False) -> Recorded:
    """Follow a run; behind each look the next move happens, behind the last Ctrl-C."""
    output, waiting = Recorded(), iter(moves)

    def sleep(seconds: float) -> None:
        move = next(waiting, None)
        if move is None:
            raise KeyboardInterrupt
        move()

    watcher = Watcher(given)
    try:
        follow(watcher, output, 1.0, until_end=until_end, sleep=sleep)
    except KeyboardInterrupt:
        pass
    finally:
        watcher.close()
    return output


def test_a_run_is_waited_for_followed_lost_and_found_again(tmp_path: Path) -> None:
    where = tmp_path / "later" / "run"
    output = followed(
        str(where),
        [
            lambda: (where / "spool").mkdir(parents=True),
            lambda: small_run(where).write(3),
            lambda: shutil.rmtree(where),
            lambda: small_run(where).write(5),
        ],
    )

    assert [one.state for one in output.shown] == ["waiting", "waiting", "running", "waiting", "running"]
    assert "expected a run, found none" in output.shown[0].note
    assert [one.step for one in output.shown] == [None, None, 2, None, 4]
    assert output.last == output.shown[-1]


def test_a_picture_goes_into_a_pipe_when_something_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run")
    run.write(3)
    pictures = followed(str(run.directory), [lambda: None, lambda: None, lambda: run.write(1)]).shown
    output = output_on(sys.stdout, as_json=False, is_live=True)
    for one in pictures:
        output.show(one)

    text = capsys.readouterr().out
    assert isinstance(output, OnePerChange)
    assert [line for line in text.splitlines() if line.startswith("run  ")] == [
        line for line in text.splitlines() if "step 2," in line or "step 3," in line
    ]
    assert text.count("\n\n") == 1 and len(pictures) == 4
    assert CONTROL.search(text) is None


def test_until_end_ends_with_the_run_and_says_how_it_is(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.write(3)

    output = followed(str(run.directory), [run.write, run.end, time.time, lambda: pytest.fail("it is over")], until_end=True)

    assert [one.state for one in output.shown] == ["running", "running", "ended", "ended"]
    assert output.last is not None and output.last.is_clean
    assert run_cli(["watch", str(run.directory), "--until-end", "--every", "0.1"]) == CLEAN


def test_ctrl_c_ends_it_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OnePerChange, "show", interrupted)

    assert run_cli(["watch", "ill"]) == CLEAN
    assert capsys.readouterr() == ("", "")


class OnTerminal:
    """`sentinel watch` in a terminal of some size, until a signal."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environ: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Whoever started the tests in the background had it ignored.
            # readline, which pytest imports, puts COLUMNS where `os.environ` does not see it.
            known = {name: one for name, one in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
            command = [sys.executable, "-m", "sentinel.cli", "watch", *arguments]
            os.execve(sys.executable, command, {**known, "TERM": "xterm-256color", **environ})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.said = ""

    def read_until(self, words: str) -> str:
        """Return all that it said until there are these words, or it ended."""
        deadline = time.monotonic() + 60
        while words not in self.said and time.monotonic() < deadline:
            if select.select([self._fd], [], [], 1.0)[0]:
                try:
                    self.said += os.read(self._fd, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return self.said

    def ended_by(self, number: int) -> int:
        """Send a signal, and return the exit code."""
        os.kill(self.pid, number)
        self.read_until("words that it never says")
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def terminals() -> Iterator[list[OnTerminal]]:
    started: list[OnTerminal] = []
    yield started
    for one in started:
        try:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.mark.slow
def test_a_terminal_shows_a_picture_and_is_given_back(terminals: list[OnTerminal]) -> None:
    coloured = OnTerminal("evil", "--every", "0.1", columns=40)
    plain = OnTerminal("ill", "--every", "0.1", NO_COLOR="1")
    dumb = OnTerminal("ill", "--every", "0.1", TERM="dumb")
    terminals += [coloured, plain, dumb]

    shown = coloured.read_until("ANOMALIES"), plain.read_until("ANOMALIES"), dumb.read_until("and 8 more")
    codes = coloured.ended_by(signal.SIGINT), plain.ended_by(signal.SIGTERM), dumb.ended_by(signal.SIGINT)

    assert codes == (0, 128 + signal.SIGTERM, 0)
    assert all("OPEN INCIDENTS" in one for one in shown)
    for one in (coloured, plain):
        assert one.said.count("\x1b[?1049h") == one.said.count("\x1b[?1049l") == 1, "the other screen, and back"
        assert one.said.rindex("\x1b[?25h") > one.said.index("\x1b[?25l"), "the cursor is seen again"
    assert "\x1b[1;31m" in coloured.said
    assert not re.search(r"\x1b\[[0-9;]*m", plain.said)
    assert "\x1b" not in dumb.said
    # Nothing of a name came through: what is left without our own codes is visible.
    ours = re.compile(r"\x1b\[(\?1049|\?25)[hl]|\x1b\[[0-9;]*[mH]")
    assert CONTROL.search(ours.sub("", coloured.said).replace("\r\n", "\n")) is None
    assert max(map(len, ours.sub("", coloured.said.partition("\x1b[?1049l")[2]).splitlines())) <= 40
