import json
import os

import pytest

from sentinel.cli.main import BAD_USAGE, CLEAN, FOUND, run_cli
from sentinel.messages import Bye, EndStep
from sentinel.wire.frame import FrameType, Header, encode_frame, encode_message


@pytest.fixture
def run_dir(tmp_path):
    """A run whose rank 0 has spoken for steps 0 to 9, 0.25 s each."""
    folder = tmp_path / "run" / "spool" / "r00000-0a0a0a0a"
    folder.mkdir(parents=True)
    with (folder / "000000.spool").open("wb") as file:
        for step in range(10):
            header = Header(type=FrameType.END_STEP, incarnation=b"\n" * 16, run_id=1, rank=0, seq=step + 1, step=step)
            message = EndStep(step=step, num_rows=0, num_calls=0, step_time_s=0.25)
            file.writelines(encode_frame(header, encode_message(message)))
    return tmp_path / "run"


def command_file(run_dir, number=1):
    return json.loads((run_dir / "control" / f"{number:06d}.json").read_bytes())


def test_enable_writes_a_command_for_the_first_step_every_rank_can_obey(run_dir, capsys):
    assert run_cli(["enable", "-d", str(run_dir), "--json"]) == CLEAN

    command = command_file(run_dir)
    assert json.loads(capsys.readouterr().out) == command
    # 9 is over; 0.5 s to read it are two steps.
    assert command["at_step"] == 12
    assert command["kinds"] == ["activation", "activation_in", "dgrad", "dgrad_in"]
    assert (command["for_steps"], command["per_micro_step"]) == (20, False)


def test_enable_takes_all_its_options(run_dir):
    options = "--kinds wgrad,dgrad --targets layers.3,head --at-step 50 --for-steps 0 --per-micro-step"

    assert run_cli(["enable", "-d", str(run_dir), *options.split()]) == CLEAN

    command = command_file(run_dir)
    assert (command["kinds"], command["targets"]) == (["wgrad", "dgrad"], ["layers.3", "head"])
    assert (command["at_step"], command["for_steps"], command["per_micro_step"]) == (50, None, True)


def test_disable_means_all_by_default(run_dir):
    assert run_cli(["disable", "-d", str(run_dir)]) == CLEAN

    command = command_file(run_dir)
    assert (command["type"], command["kinds"], command["targets"]) == ("DisableMonitoring", [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kinds", "gradz"], 'unknown kind "gradz"'),
        (["--at-step", "soon"], 'got "soon"'),
        (["--at-step", "-1"], 'got "-1"'),
        (["--at-step", "1" + "0" * 23], "expected a number in [0, 1099511627776] or auto"),
        (["--at-step", "9" * 5000], "expected a number in [0, 1099511627776] or auto"),
    ],
)
def test_nonsense_is_refused(run_dir, capsys, options, message):
    assert run_cli(["enable", "-d", str(run_dir), *options]) == BAD_USAGE
    assert message in capsys.readouterr().err
    assert not (run_dir / "control").exists()


def test_a_step_that_is_over_is_said(run_dir, capsys):
    assert run_cli(["enable", "-d", str(run_dir), "--at-step", "3"]) == CLEAN
    assert "newest known: 9" in capsys.readouterr().err


def test_a_run_that_has_not_begun_needs_a_step(tmp_path, capsys):
    (tmp_path / "run" / "spool").mkdir(parents=True)

    assert run_cli(["enable", "-d", str(tmp_path / "run")]) == BAD_USAGE
    assert "give --at-step N" in capsys.readouterr().err
    assert run_cli(["enable", "-d", str(tmp_path / "run"), "--at-step", "3"]) == CLEAN


def say(run_dir, incarnation, attempt, step, bye=False):
    """One more life of rank 0, in its attempt."""
    folder = run_dir / "spool" / f"r00000-{incarnation.hex()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    messages = [(FrameType.END_STEP, EndStep(step=step, num_rows=0, num_calls=0, step_time_s=0.25))]
    messages += [(FrameType.BYE, Bye(reason="exit", step=step))] if bye else []
    with (folder / "000000.spool").open("ab") as file:
        for seq, (kind, message) in enumerate(messages):
            header = Header(type=kind, incarnation=incarnation, run_id=1, rank=0, seq=seq + 1, step=step, attempt=attempt)
            file.writelines(encode_frame(header, encode_message(message)))
    return folder / "000000.spool"


@pytest.mark.parametrize("verb", ["enable", "disable"])
def test_a_run_that_is_over_is_said_to_hear_nothing(tmp_path, capsys, verb):
    say(tmp_path / "run", b"a" * 16, 0, 9, bye=True)

    assert run_cli([verb, "-d", str(tmp_path / "run")]) == FOUND
    assert "nobody listens: every rank has ended" in capsys.readouterr().err
    assert command_file(tmp_path / "run")["attempt"] == -1


def test_a_run_that_was_killed_is_said_to_hear_nothing(tmp_path, capsys):
    spool = say(tmp_path / "run", b"a" * 16, 0, 9)
    assert run_cli(["enable", "-d", str(tmp_path / "run")]) == CLEAN
    assert capsys.readouterr().err == ""

    os.utime(spool, (1e9, 1e9))
    assert run_cli(["enable", "-d", str(tmp_path / "run")]) == FOUND
    assert "nobody listens: no rank has written anything for" in capsys.readouterr().err


def test_a_command_is_for_the_attempt_that_trains_now(tmp_path):
    say(tmp_path / "run", b"a" * 16, 0, 5000, bye=True)
    say(tmp_path / "run", b"b" * 16, 1, 100)

    assert run_cli(["enable", "-d", str(tmp_path / "run")]) == CLEAN

    command = command_file(tmp_path / "run")
    # Not behind step 5000, which the former attempt had reached.
    assert (command["attempt"], command["at_step"]) == (1, 103)


def test_dump_takes_all_its_options(run_dir, capsys):
    options = "--kinds wgrad,exp_avg --targets layers.3 --at-step 50 --for-steps 4 --step-interval 2 --first 16 --ranks 1,0"

    assert run_cli(["dump", str(run_dir), *options.split(), "--json"]) == CLEAN

    command = command_file(run_dir)
    assert json.loads(capsys.readouterr().out) == command
    assert (command["type"], command["kinds"], command["targets"]) == ("DumpTensors", ["wgrad", "exp_avg"], ["layers.3"])
    assert (command["at_step"], command["for_steps"], command["step_interval"]) == (50, 4, 2)
    assert (command["first_n"], command["ranks"]) == (16, [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kinds", "health"], 'unknown kind "health"'),
        (["--kinds", ","], "--kinds: expected some of"),
        (["--ranks", "1,x"], '--ranks: expected ranks and ranges of them, as in 0,8-15, got "x"'),
        (["--for-steps", "0"], "for-steps"),
        (["--step-interval", "0"], "step-interval"),
    ],
)
def test_nonsense_is_not_dumped(run_dir, capsys, options, message):
    assert run_cli(["dump", str(run_dir), *options]) == BAD_USAGE

    assert message in capsys.readouterr().err
    assert not (run_dir / "control").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["checkpoint"], ("checkpoint", 0, 0.0)),
        (["skip", "20"], ("skip_batches", 20, 0.0)),
        (["pause", "--for", "10min"], ("pause", 0, 600.0)),
    ],
)
def test_a_trainer_is_asked(run_dir, capsys, arguments, expected):
    assert run_cli(["request", *arguments, "-d", str(run_dir), "--why", "a reason", "--json"]) in (CLEAN, FOUND)

    command = json.loads(capsys.readouterr().out)
    assert (command["action"], command.get("num_batches", 0), command.get("for_s", 0.0)) == expected
    assert (command["type"], command["reason"]) == ("RequestAction", "a reason")


def test_resume_ends_every_pause_once(run_dir, capsys):
    for _ in range(2):
        run_cli(["request", "pause", "-d", str(run_dir), "--at-step", "100"])
    capsys.readouterr()

    assert run_cli(["request", "resume", "-d", str(run_dir)]) == CLEAN
    assert capsys.readouterr().out.count(": over") == 2
    assert run_cli(["request", "resume", "-d", str(run_dir)]) == FOUND
    assert "no pause was asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pause", "--for", "soon"], '--for: expected a time above 0 like 90s, 10min, 2h, got "soon"'),
        (["pause", "--for", "0s"], "--for: expected a time above 0"),
        (["pause", "--for", "3w"], '--for: unknown unit "w"; known: s, m, min, h, d'),
        (["skip", "0"], "0 is not in the range x>=1"),
    ],
)
def test_nonsense_is_not_asked(run_dir, capsys, arguments, message):
    assert run_cli(["request", *arguments, "-d", str(run_dir)]) == BAD_USAGE
    assert message in capsys.readouterr().err
    assert not (run_dir / "control").exists()
