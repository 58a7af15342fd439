"""Layouts that change: whatever the disk does, each row is read with the very descriptor that its writer had in force."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sentinel.ingest import descriptor_lookup as looking_back
from sentinel.ingest import incarnation
from sentinel.ingest.follow import RunFollower
from sentinel.messages import Descriptor, LayoutChange, TensorInfo
from sentinel.place import Place
from sentinel.record import ROW_DTYPE
from sentinel.testing import FakeClock
from sentinel.wire import layouts
from sentinel.wire.frame import FrameType, encode_message, row_fields, run_id_of
from sentinel.wire.spool import SpoolWriter, incarnation_folder
from sentinel.wire.spool_files import file_name, list_files
from sentinel.wire.spool_reader import SpoolReader

from .test_spool import Disk

LIFE = bytes(range(16))
ROWS = np.zeros(1, ROW_DTYPE)


def descriptor(num_tensors: int) -> Descriptor:
    return Descriptor(
        version="0", place=Place(), chunks=(), row_fields=row_fields(ROW_DTYPE), row_bytes=ROW_DTYPE.itemsize,
        tensors=tuple(TensorInfo(id=at, name=f"{at}.fc", kind="activation", site_pos=at) for at in range(num_tensors)),
    )  # fmt: skip


def changed(known: Descriptor, at: int, **what: object) -> Descriptor:
    tensors = list(known.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **what)
    return msgspec.structs.replace(known, tensors=tuple(tensors))


def grown(known: Descriptor, by: int) -> Descriptor:
    more = descriptor(len(known.tensors) + by).tensors[len(known.tensors) :]
    return msgspec.structs.replace(known, tensors=known.tensors + more)


def spool(run_dir: Path, **more: int) -> SpoolWriter:
    return SpoolWriter(incarnation_folder(run_dir, 0, LIFE), LIFE, 0, run_id_of(run_dir.name), 0, clock=FakeClock(), **more)


def frames_of(run_dir: Path) -> list[tuple[FrameType, int, int]]:
    """(type, layout id, bytes) of all frames."""
    reader, found = SpoolReader(incarnation_folder(run_dir, 0, LIFE)), []
    while frames := reader.poll(final=True):
        found += [(FrameType(f.header.type), f.header.layout_id, memoryview(f.payload).nbytes) for f in frames]
    return found


def read(run_dir: Path, follower: RunFollower | None = None) -> dict[int, Descriptor]:
    """Step -> the descriptor that its rows are read with."""
    follower, found = follower or RunFollower(run_dir), {}
    while records := follower.poll(final=True):
        for record in records:
            if record.frame.header.type == FrameType.ROWS:
                assert record.descriptor is not None
                found[record.frame.header.step] = record.descriptor
    return found


def test_what_was_said_before_is_named_again_and_growth_costs_what_it_adds(tmp_path: Path) -> None:
    out = spool(tmp_path)
    first = descriptor(200)
    second = changed(first, 7, site_pos=999)
    third = grown(second, 3)
    said = [first, first, second, first, second, third, first, msgspec.structs.replace(third, first_step=5)]
    for step, one in enumerate(said):
        assert out.describe(one)
        out.append_rows(ROWS, step=step)

    frames = frames_of(tmp_path)
    described = [frame for frame in frames if frame[0] is not FrameType.ROWS]
    assert [kind.name for kind, *_ in described] == ["DESCRIPTOR", *["CHANGE"] * 6]
    whole, change, again, again_2, growth, again_3, head = (size for *_, size in described)
    assert max(again, again_2, again_3) < 48 < change < 300 < growth < 800 < head < whole / 10
    ids = [number for kind, number, _ in frames if kind is FrameType.ROWS]
    assert ids[0] == ids[1] == ids[3] == ids[6] and ids[2] == ids[4] and len(set(ids)) == 4
    found = read(tmp_path)
    assert [found[step] for step in range(len(said))] == said
    assert found[0] is found[6] and found[2] is found[4], "the plans of a layout are found by the very object"


def test_a_table_that_doubles_or_shrinks_is_written_whole(tmp_path: Path) -> None:
    out = spool(tmp_path)
    for step, one in enumerate((descriptor(2), descriptor(5), descriptor(4))):
        out.describe(one)
        out.append_rows(ROWS, step=step)

    assert [kind for kind, *_ in frames_of(tmp_path)] == [FrameType.DESCRIPTOR, FrameType.ROWS] * 3
    assert [len(one.tensors) for one in read(tmp_path).values()] == [2, 5, 4]


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_read_with_the_descriptor_of_its_writer(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth, changes, returns; a disk that fills up, small files, short memories, restarts of the reader."""
    rng = random.Random(seed)
    short = seed % 3
    monkeypatch.setattr(layouts, "MAX_KNOWN", (2, 16, 5)[short])
    monkeypatch.setattr(layouts, "MAX_CHANGES", (3, 64, 64)[short])
    monkeypatch.setattr(looking_back, "MAX_CHANGES", (3, 64, 64)[short])
    monkeypatch.setattr(incarnation, "MAX_LAYOUTS", (1, 64, 2)[short])
    disk = Disk(monkeypatch)
    out = spool(tmp_path, file_bytes=rng.choice((3000, 30_000)))
    known, said, follower = [descriptor(20)], {}, RunFollower(tmp_path)
    found: dict[int, Descriptor] = {}
    lost = 0
    for step in range(80):
        action = rng.random()
        disk.room = rng.randrange(0, 400) if rng.random() < 0.1 else None
        disk.can_truncate = rng.random() < 0.7
        if action < 0.15:
            known.append(grown(known[-1], rng.randint(1, 4)))
        elif action < 0.4:
            one = rng.choice(known[-3:])
            known.append(changed(one, rng.randrange(3), site_pos=step, consumers=(f"blocks.{step}",)))
        elif action < 0.45:
            known.append(msgspec.structs.replace(known[-1], config_hash=str(step)))
        elif action < 0.6:
            known.append(rng.choice(known))
        out.describe(known[-1])
        if out.append_rows(ROWS, step=step):
            said[step] = known[-1]
        else:
            lost += 1
        if rng.random() < 0.1:
            found |= read(tmp_path, follower)
        if rng.random() < 0.07:
            positions = follower.positions()
            follower = RunFollower(tmp_path)
            follower.restore(positions)
    disk.room = None
    out.append_rows(ROWS, step=80)
    said[80] = known[-1]

    found |= read(tmp_path, follower)
    assert found == said
    assert len(said) > 40 and lost
    assert read(tmp_path) == said, "in one go, too"
    for index in list_files(incarnation_folder(tmp_path, 0, LIFE)):
        alone = tmp_path / f"alone-{index}"
        folder = incarnation_folder(alone, 0, LIFE)
        folder.mkdir(parents=True)
        shutil.copy(incarnation_folder(tmp_path, 0, LIFE) / file_name(index), folder)
        part = read(alone)
        assert part == {step: said[step] for step in part}, "each file can be read alone"


def test_a_lost_change_costs_only_what_it_told(tmp_path: Path) -> None:
    out = spool(tmp_path)
    first = descriptor(50)
    second, third = grown(first, 1), grown(first, 2)
    places = []
    for step, one in enumerate((first, second, third)):
        places.append(out.position[1])
        out.describe(one)
        out.append_rows(ROWS, step=step)
    path = incarnation_folder(tmp_path, 0, LIFE) / file_name(0)
    with path.open("r+b") as file:
        file.seek(places[1] + 120)  # In the payload of the first change.
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 4]))

    follower = RunFollower(tmp_path)
    records = [one for one in follower.poll(final=True) if one.frame.header.type == FrameType.ROWS]
    assert follower.num_corrupt == 1 and follower.num_lost == 1
    assert [one.frame.header.step for one in records] == [0, 1, 2]
    assert records[0].descriptor == first
    assert records[1].descriptor is None, "nobody guesses: the reader falls back on the newest it knows"
    assert records[2].descriptor is not None
    assert [one.id for one in records[2].descriptor.tensors] == [*range(50), 51]


def test_an_older_reader_names_a_change_and_knows_all_else(tmp_path: Path) -> None:
    """What protocol 1 does with a frame of protocol 2: see test_frames_of_another_protocol_are_skipped_and_counted."""
    out = spool(tmp_path)
    out.describe(descriptor(9))
    out.describe(grown(descriptor(9), 1))
    out.append_rows(ROWS, step=0)
    out.close()
    raw = (incarnation_folder(tmp_path, 0, LIFE) / file_name(0)).read_bytes()
    versions, at = [], 0
    while at < len(raw):
        versions.append(int.from_bytes(raw[at + 4 : at + 6], "little"))
        at += int.from_bytes(raw[at + 8 : at + 12], "little")
    assert versions == [1, 2, 1]


def test_nonsense_is_refused(tmp_path: Path) -> None:
    """Ids out of range, a base that lies ahead or is itself: no table of 2^32 entries, no endless look back."""
    large = LayoutChange(base=1, base_offset=0, tensors=(TensorInfo(id=2**30, name="a", kind="param"),))
    with pytest.raises(msgspec.ValidationError, match=r"tensors\[0\].id"):
        msgspec.msgpack.decode(encode_message(large), type=LayoutChange)
    out = spool(tmp_path)
    out.describe(descriptor(3))
    for offset in (0, 10**9):
        out._write([(FrameType.CHANGE, encode_message(LayoutChange(base=77, base_offset=offset)), 0)], -1)
    at = out.position[1]
    out._write([(FrameType.CHANGE, encode_message(LayoutChange(base=77, base_offset=at)), 0)], -1)
    out.append_rows(ROWS, step=0)

    assert read(tmp_path) == {0: descriptor(3)}
    assert looking_back.look_back(incarnation_folder(tmp_path, 0, LIFE), LIFE, (0, at), {}) is None


def test_a_change_survives_its_encoding() -> None:
    base = descriptor(4)
    wanted = msgspec.structs.replace(changed(grown(base, 1), 2, also=("x",)), layer_offset=3)
    change = layouts.change_of(base, wanted, 5, 96)
    assert change is not None
    reported = msgspec.msgpack.decode(encode_message(change), type=LayoutChange)
    assert reported == change and reported.applied_to(base) == wanted


def _trainer(run_dir: Path, seed: int, *, num_steps: int) -> dict[int, Descriptor]:
    """Step -> the descriptor in force: the same for each process of a seed."""
    rng, out, known, said = random.Random(seed), spool(run_dir, file_bytes=20_000), [descriptor(30)], {}
    for step in range(num_steps):
        if rng.random() < 0.5:
            known.append(changed(rng.choice(known[-4:]), rng.randrange(5), site_pos=rng.randrange(3)))
        elif rng.random() < 0.2:
            known.append(grown(known[-1], 1))
        out.describe(known[-1])
        out.append_rows(ROWS, step=step)
        said[step] = known[-1]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_trainer_that_is_killed_leaves_what_it_wrote(seed: int, tmp_path: Path) -> None:
    """SIGKILL wherever it strikes, and a torn end: each whole step is read as it was meant, beside a reader that follows."""
    process = os.fork()
    if process == 0:
        try:
            _trainer(tmp_path / "killed", seed, num_steps=10**6)
        finally:
            os._exit(1)
    follower, found = RunFollower(tmp_path / "killed"), {}
    while len(found) < 60 * (seed + 1):
        for record in follower.poll():
            if record.frame.header.type == FrameType.ROWS:
                assert record.descriptor is not None
                found[record.frame.header.step] = record.descriptor
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    folder = incarnation_folder(tmp_path / "killed", 0, LIFE)
    last = folder / file_name(list_files(folder)[-1])
    os.truncate(last, max(0, last.stat().st_size - 50))

    found |= read(tmp_path / "killed", follower)
    said = _trainer(tmp_path / "whole", seed, num_steps=max(found) + 1)
    assert found == said
    alone = read(tmp_path / "killed")
    assert alone == {step: said[step] for step in alone} and len(alone) >= len(said) - 1
