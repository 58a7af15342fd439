"""The event files of a mirror, read back by TensorBoard itself."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sentinel.mirrors.mirror import MirrorBatch, MirroredIncident, MirroredStep, MirrorParts
from sentinel.mirrors.tensorboard_mirror import TensorBoardConfig, TensorBoardMirror

from ..support.anomalies import a_nan, an_incident


def steps(*numbers: int, attempt: int = 0, loss: float = 2.0) -> list[MirroredStep]:
    return [MirroredStep(attempt=attempt, step=one, time=1e9 + one, values=(("loss", loss),)) for one in numbers]


def write(folder: Path, *batches: MirrorBatch, mark: str = "") -> str:
    mirror = TensorBoardConfig().build(MirrorParts(run="run", key="", run_dir=folder, mark=mark))
    for batch in batches:
        mark = mirror.write(batch)
    mirror.close(is_over=False)
    return mark


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    return found.Reload()


def points(folder: Path) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read(folder).Scalars("loss")]


def texts(folder: Path, tag: str) -> list[str]:
    return [one.tensor_proto.string_val[0].decode() for one in read(folder).Tensors(tag)]


def test_values_are_read_back_with_their_steps_and_times_nan_among_them(tmp_path: Path) -> None:
    write(tmp_path, MirrorBatch(steps=steps(0, 1)), MirrorBatch(steps=steps(2, loss=math.nan)))

    found = read(tmp_path).Scalars("loss")

    assert [(one.step, one.wall_time) for one in found] == [(0, 1e9), (1, 1e9 + 1), (2, 1e9 + 2)]
    assert [one.value for one in found[:2]] == [2.0, 2.0] and math.isnan(found[2].value)


def test_a_reader_that_looks_while_it_grows_sees_what_is_written(tmp_path: Path) -> None:
    mirror = TensorBoardMirror(tmp_path, "", mode=0o600)
    mirror.write(MirrorBatch(steps=steps(0)))
    reader = EventAccumulator(str(tmp_path)).Reload()
    mirror.write(MirrorBatch(steps=steps(1)))

    assert [one.step for one in reader.Scalars("loss")] == [0]
    assert [one.step for one in reader.Reload().Scalars("loss")] == [0, 1]
    mirror.close(is_over=True)


def test_what_was_written_behind_the_mark_is_written_again_in_its_place(tmp_path: Path) -> None:
    mark = write(tmp_path, MirrorBatch(steps=steps(0, 1)))
    write(tmp_path, MirrorBatch(steps=steps(2, 3)), mark=mark)
    with next((tmp_path / "tensorboard").iterdir()).open("ab") as file:
        file.write(b"half a record")

    mark = write(tmp_path, MirrorBatch(steps=steps(2, 3, 4)), mark=mark)
    write(tmp_path, MirrorBatch(steps=steps(5)), mark=mark)

    assert [step for step, _ in points(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize("harm", ["removed", "cut", "no mark"])
def test_a_file_that_is_not_as_it_was_left_is_left_and_another_one_goes_on(tmp_path: Path, harm: str) -> None:
    mark = write(tmp_path, MirrorBatch(steps=steps(0, 1)))
    (path,) = (tmp_path / "tensorboard").iterdir()
    if harm == "removed":
        path.unlink()
    elif harm == "cut":
        os.truncate(path, 60)

    write(tmp_path, MirrorBatch(steps=steps(2)), mark="" if harm == "no mark" else mark)

    expected = [0, 1, 2] if harm == "no mark" else [2]
    assert [step for step, _ in points(tmp_path)] == expected


def test_a_run_that_goes_back_replaces_what_it_goes_back_over_also_behind_a_restart(tmp_path: Path) -> None:
    first = MirrorBatch(steps=[*steps(0, 1, 2), *steps(1, 2, attempt=1, loss=3.0)])
    mark = write(tmp_path, first)
    assert points(tmp_path) == [(0, 2.0), (1, 3.0), (2, 3.0)]

    mark = write(tmp_path, MirrorBatch(steps=steps(3, attempt=1, loss=3.0)), mark=mark)
    write(tmp_path, MirrorBatch(steps=steps(2, attempt=2, loss=4.0)), mark=mark)

    assert points(tmp_path) == [(0, 2.0), (1, 3.0), (2, 4.0)]


def test_what_was_found_is_told_at_its_step(tmp_path: Path) -> None:
    found = [a_nan(step=5, name=f"blocks.{at}", message=f"blocks.{at} holds NaN") for at in range(30)]
    incident = MirroredIncident(
        change="opened", incident=an_incident(3, evidence=("suspected data: a", "suspected data: to do: b"))
    )
    write(tmp_path, MirrorBatch(anomalies=found, incidents=[incident]))

    assert [(one.step, one.value) for one in read(tmp_path).Scalars("anomalies/onsets")] == [(5, 30.0)]
    (text,) = texts(tmp_path, "anomalies/text")
    assert text.splitlines()[0] == "- **critical** blocks.0 holds NaN"
    assert text.splitlines()[-1] == "- and 10 more (nan 30)" and len(text.splitlines()) == 21
    (told,) = texts(tmp_path, "incidents/text")
    assert told.startswith("i3 **opened** (warning, open): NaN in blocks.3\n") and told.endswith("to do: b")


def test_names_that_hold_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    evil = "\x1b[31m<script>alert(1)</script>\n# *x* [a](javascript:b)"
    write(tmp_path, MirrorBatch(anomalies=[a_nan(message=evil)]))

    (text,) = texts(tmp_path, "anomalies/text")

    assert text == r"- **critical** \\u001b\[31m&lt;script&gt;alert(1)&lt;/script&gt;\\n\# \*x\* \[a\](javascript:b)"


def test_files_go_where_the_configuration_says_with_the_modes_of_its_user(tmp_path: Path) -> None:
    config = TensorBoardConfig(directory=str(tmp_path / "team" / "logs"))
    assert config.problem({}) == ""
    mirror = config.build(MirrorParts(run="run-1", key="", run_dir=tmp_path, mark=""))
    mirror.write(MirrorBatch(steps=steps(0)))
    mirror.close(is_over=True)

    (path,) = (tmp_path / "team" / "logs" / "run-1").iterdir()
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    (tmp_path / "file").write_text("")
    what = f"directory: {tmp_path / 'file'}: expected a directory that can be written"
    assert TensorBoardConfig(directory=str(tmp_path / "file")).problem({}) == what


def _umask() -> int:
    former = os.umask(0)
    os.umask(former)
    return former


def test_a_disk_that_is_full_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = TensorBoardMirror(tmp_path, "", mode=0o600)
    mark = mirror.write(MirrorBatch(steps=steps(0)))
    original = os.write
    calls = []

    def fill(fd: int, data: memoryview) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return original(fd, data[:10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fill)
        with pytest.raises(OSError, match="No space left"):
            mirror.write(MirrorBatch(steps=steps(1)))
    mirror.close(is_over=False)

    assert (tmp_path / mark.split()[0]).stat().st_size == int(mark.split()[1])
