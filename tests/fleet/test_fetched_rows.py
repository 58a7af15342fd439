"""Spools that come without their rows: these are asked for, come before a node ends, and are taken from no stranger."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from nats.errors import OutboundBufferLimitError

from sentinel.errors import StoreError, WireError
from sentinel.fleet import fetched_rows, node_run, sealed
from sentinel.fleet.broker import BrokerConfig
from sentinel.fleet.heard_nodes import SILENT_S
from sentinel.fleet.node_digests import GONE_AFTER_S, RunDigests
from sentinel.fleet.node_runs import NodeRuns
from sentinel.fleet.node_spool import RESEND_S
from sentinel.fleet.packed_digest import decode_digest
from sentinel.fleet.sealed import (
    DigestPiece,
    Published,
    RowsPiece,
    SpoolChunk,
    in_messages,
    seal,
    seal_published,
    unseal_published,
)
from sentinel.fleet.shipping import WINDOW_BYTES, Shipping
from sentinel.fleet.spool_cursor import frames_of_rows
from sentinel.ingest import follow
from sentinel.ingest.step_parts import AwayFrame
from sentinel.messages import Heartbeat
from sentinel.record import ROW_DTYPE
from sentinel.testing import SyntheticRun
from sentinel.wire.frame import Buffer, Frame, FrameType, scan
from sentinel.wire.spool import write_ack
from sentinel.wire.spool_files import file_name

from ..support.serving import small_run
from ..support.waiting import wait_for
from .test_copies_of_spools import Fleet


class ThinFleet(Fleet):
    """One node that publishes a run of four ranks without its rows, and a join that has taken all of it."""

    def __init__(self, where: Path) -> None:
        super().__init__(where, "n0")
        self.nodes["n0"] = NodeRuns(
            where / "n0", "n0", digested_kinds=frozenset(), clock=lambda: self.now, on_problem=self.problems.append
        )
        self.run: SyntheticRun = small_run(where / "n0" / "run")
        self.run.write(3)
        self.published: list[Published] = []
        for _ in range(4):
            self.turn()
        assert self.missing()

    def turn(self) -> None:
        self.talk()
        for published in in_messages(self.nodes["n0"].next()):
            self.published += published
            self.take(*published)
        self.copies.release()

    def take(self, *published: Published) -> None:
        for found in unseal_published(seal_published(published)):
            self.copies.take(found)

    def missing(self) -> list[str]:
        """Return the files whose copies are not what they are at the node, though as long."""
        found = []
        for path in sorted(self.run.directory.rglob("*.spool")):
            copy = (self.joined / "run" / "spool" / path.parent.name / path.name).read_bytes()
            assert len(copy) == path.stat().st_size
            if copy != path.read_bytes():
                found.append(f"{path.parent.name}/{path.name}")
        return found

    def frames(self) -> list[AwayFrame]:
        """Return all frames of rows, as a step asks for them."""
        found = []
        for folder in sorted((self.run.directory / "spool").iterdir()):
            for one in frames_of_rows(folder, (0, 0)):
                data = (folder / file_name(one.file_index)).read_bytes()[one.offset :]
                frame = scan(data)
                assert isinstance(frame, Frame)
                found.append(msgspec.structs.replace(one, incarnation=frame.header.incarnation, seq=frame.header.seq))
        return found

    def fetched(
        self, until: Callable[[], None], frames: Sequence[AwayFrame] | None = None
    ) -> Mapping[tuple[bytes, int], Buffer]:
        """Have all rows fetched, or those of some frames, as the thread that judges does, while something else happens again
        and again."""
        found: list[Mapping[tuple[bytes, int], Buffer]] = []
        wanted = self.frames() if frames is None else frames
        thread = threading.Thread(target=lambda: found.append(self.copies.rows_of("run").fetch(wanted)))
        thread.start()
        wait_for(lambda: until() or not thread.is_alive())
        return found[0]


@pytest.fixture
def thin(tmp_path: Path) -> ThinFleet:
    return ThinFleet(tmp_path)


def test_rows_that_are_asked_for_come_and_stay(thin: ThinFleet) -> None:
    assert sum(len(seal(one)) for one in thin.published) < sum(
        path.stat().st_size for path in thin.run.directory.rglob("*.spool")
    )
    found = thin.fetched(thin.turn)
    assert {key: bytes(payload) for key, payload in found.items()} == {
        (one.incarnation, one.seq): (thin.run.directory / "spool" / one.folder / file_name(one.file_index)).read_bytes()[
            one.offset + 96 : one.offset + one.num_bytes
        ]
        for one in thin.frames()
    }
    assert not thin.missing() and not thin.problems
    # What is here is not asked for again.
    assert thin.fetched(lambda: None).keys() == found.keys() and not thin.copies.rows_of("run").wanted("n0")


def selected(thin: ThinFleet, some: list[AwayFrame]) -> dict[tuple[bytes, int], bytes]:
    """Return what of these frames is wanted, as their machine has it."""
    found = {}
    for one in some:
        data = (thin.run.directory / "spool" / one.folder / file_name(one.file_index)).read_bytes()
        found[one.incarnation, one.seq] = one.select(data[one.offset : one.offset + one.num_bytes])
    return found


def of_tensors(thin: ThinFleet, *ids: int) -> list[AwayFrame]:
    """Return all frames of rows, of which the rows of these tensors are wanted."""
    tensors = b"".join(one.to_bytes(4, "little") for one in ids)
    return [msgspec.structs.replace(one, tensors=tensors, row_bytes=ROW_DTYPE.itemsize) for one in thin.frames()]


def test_some_rows_are_asked_for_alone(thin: ThinFleet) -> None:
    thin.published.clear()
    some = of_tensors(thin, 1, 3)
    found = thin.fetched(thin.turn, some)
    expected = selected(thin, some)
    assert {key: bytes(payload) for key, payload in found.items()} == expected
    rows = np.frombuffer(b"".join(expected.values()), ROW_DTYPE)
    assert set(rows["tensor"].tolist()) == {1, 3} and len(rows) >= 2 * len(expected)
    pieces = [one for one in thin.published if isinstance(one, RowsPiece)]
    assert sum(len(one.data) for one in pieces) == rows.nbytes
    # They are not kept: their frames lack their rows as before, and can be had whole.
    assert thin.missing() and not thin.problems and not thin.copies.rows_of("run").wanted("n0")
    assert thin.fetched(thin.turn).keys() == found.keys() and not thin.missing()
    # What is here whole is asked of nobody.
    thin.published.clear()
    assert {key: bytes(payload) for key, payload in thin.fetched(lambda: None, some).items()} == expected


def test_of_tensors_without_rows_nothing_comes_and_nobody_waits(thin: ThinFleet) -> None:
    found = thin.fetched(thin.turn, of_tensors(thin, 10**6))
    assert len(found) == len(thin.frames()) and set(found.values()) == {b""}
    assert thin.copies.rows_of("run").num_gone == 0


def test_some_rows_that_are_too_many_for_a_message_come_in_parts(thin: ThinFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_run, "CHUNK_BYTES", 100)
    monkeypatch.setattr(fetched_rows, "LEAST_PART_BYTES", 100)
    monkeypatch.setattr(fetched_rows, "MAX_WANTED_BYTES", 24)
    some = of_tensors(thin, 0, 1, 2)
    found = thin.fetched(thin.turn, some)
    assert {key: bytes(payload) for key, payload in found.items()} == selected(thin, some)


WRONG: list[dict[str, object]] = [
    {"row_bytes": 7}, {"row_bytes": 0}, {"id_at": 10**6}, {"id_at": -3}, {"id_at": 133}, {"tensors": b"123"}, {"seq": 10**6},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_rows_that_no_frame_has_so_are_known_to_be_gone(thin: ThinFleet, change: dict[str, object]) -> None:
    some = [msgspec.structs.replace(one, **change) for one in of_tensors(thin, 1)]
    assert not thin.fetched(thin.turn, some) and thin.copies.rows_of("run").num_gone == len(some)


def test_a_part_of_some_rows_that_lies_beyond_them_is_refused(thin: ThinFleet) -> None:
    one = of_tensors(thin, 1)[0]
    rows = thin.copies.rows_of("run")
    rows._wanted["n0"][one] = False
    row = bytes(136)
    for size, at, data in (
        (96 + 136, 4, row), (95, 0, b""), (96 + 136, -1, b"1"), (96 + 136, 0, b""), (96 + 7, 0, bytes(7)), (96, 1, b""),
    ):  # fmt: skip
        piece = RowsPiece(2, "n0", "run", one.folder, one.file_index, one.offset, size, at, data, tensors=one.tensors)
        with pytest.raises(WireError, match="expected a part"):
            rows.take_rows(piece, lambda *_: False)
    assert rows.wanted("n0") == (one,)
    # Nothing is kept of what nobody asked for, nor of crumbs without end.
    stranger = RowsPiece(2, "n1", "run", one.folder, one.file_index, one.offset, 96 + 2 * 136, 0, row, tensors=one.tensors)
    assert rows.take_rows(stranger, lambda *_: False) == 0 and "n1" not in rows._begun
    with pytest.raises(WireError, match="in parts of"):
        for at in range(2 * 136):
            crumb = msgspec.structs.replace(stranger, node="n0", at=at, data=b"1")
            rows.take_rows(crumb, lambda *_: False)
    assert not rows._begun["n0"]


def test_of_a_backlog_no_step_ends_at_the_join_before_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_BYTES", 20_000)
    monkeypatch.setattr(follow, "MIN_WINDOW_BYTES", 4_000)
    fleet = Fleet(tmp_path)
    (tmp_path / "n0").mkdir()
    node = fleet.nodes["n0"] = NodeRuns(tmp_path / "n0", "n0", digested_kinds=frozenset(), clock=lambda: fleet.now)
    run = small_run(tmp_path / "n0" / "run", file_bytes=40_000)
    run.write(60)
    ended: dict[int, set[int]] = {}
    digests = dict[int, int]()
    for turn in range(500):
        fleet.talk()
        for one in node.next():
            fleet.copies.take(one)
            if isinstance(one, DigestPiece):
                digests[decode_digest(one.data).step] = turn
            elif isinstance(one, SpoolChunk):
                whole, at = bytearray(one.num_bytes), 0
                for offset, data in one.pieces():
                    whole[offset - one.offset : offset - one.offset + len(data)] = data
                while isinstance(frame := scan(whole, at), Frame):
                    at = frame.offset_after
                    if frame.header.type == FrameType.END_STEP:
                        ranks = ended.setdefault(frame.header.step, set())
                        ranks.add(frame.header.rank)
                        assert len(ranks) < 4 or frame.header.step in digests, frame.header.step
        fleet.copies.release()
        if sum(map(len, ended.values())) == 4 * 60:
            break
    assert digests.keys() == set(range(60)) and len(set(digests.values())) > 10


def digested(published: list[Published]) -> list[int]:
    """Return the steps of which digests are among these."""
    return [decode_digest(one.data).step for one in published if isinstance(one, DigestPiece)]


def test_no_digest_is_made_before_anybody_answers(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    node = NodeRuns(tmp_path / "n0", "n0", digested_kinds=frozenset())
    small_run(tmp_path / "n0" / "run").write(3)
    node.discover()
    assert not list(node.next()) and list(node.beats())


def made(digests: RunDigests) -> list[tuple[int, list[int]]]:
    """Return (step, ranks) of the digests that are new."""
    found = [decode_digest(data).unpack() for data in digests.next()]
    return [(one.step, [rank.rank for rank in one.ranks]) for one in found]


def test_after_a_restart_with_other_ranks_nobody_waits_for_those_that_were_killed(tmp_path: Path) -> None:
    before = small_run(tmp_path / "run", pp=1, dp=4, layers=2, ranks=(2, 3), attempt=0)
    before.write(3)
    digests = RunDigests(tmp_path / "run", frozenset())
    assert made(digests) == [(0, [2, 3]), (1, [2, 3]), (2, [2, 3])]
    after = small_run(tmp_path / "run", pp=1, dp=2, layers=2, attempt=1, first_step=3, clock=before.clock, seed=1)
    for step in range(3, 7):
        after.write()
        assert made(digests) == [(step, [0, 1])]


def test_where_no_attempts_are_counted_who_is_silent_for_long_is_waited_for_no_more(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=4, layers=2, attempt=None)
    run.write()
    digests = RunDigests(tmp_path / "run", frozenset())
    assert made(digests) == [(0, [0, 1, 2, 3])]
    run.write(4, skip=(2, 3))
    assert made(digests) == [(1, [0, 1]), (2, [0, 1])]
    # One of them stands still and beats.
    run.clock.advance(GONE_AFTER_S)
    run.report(2, Heartbeat(step=1, call_id=0, activity="train"))
    run.write(skip=(2, 3))
    assert made(digests) == [(3, [0, 1])]
    run.clock.advance(GONE_AFTER_S)
    run.write(skip=(2, 3))
    assert made(digests) == [(4, [0, 1]), (5, [0, 1]), (6, [0, 1])]


def test_ranks_of_a_slow_job_that_write_one_after_the_other_are_all_waited_for(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", pp=1, dp=2, layers=2, attempt=None, step_time_s=2 * GONE_AFTER_S)
    digests = RunDigests(tmp_path / "run", frozenset())
    run.write()
    assert made(digests) == [(0, [0, 1])]
    for step in range(1, 4):
        run.clock.advance(2 * GONE_AFTER_S)
        run.write_rank(0, step)
        assert not made(digests)
        run.write_rank(1, step)
        assert made(digests) == [(step, [0, 1])]


def test_digests_that_no_broker_took_are_sent_again_before_what_comes_after(thin: ThinFleet) -> None:
    node = thin.nodes["n0"]
    thin.run.write(3)
    lost = list(node.next())
    assert digested(lost) == [3, 4, 5]
    for one in lost:
        node.take_back(one)
    thin.run.write(1)
    again = list(node.next())
    assert digested(again) == [3, 4, 5, 6]
    assert all(isinstance(one, DigestPiece) for one in again[:4]) and any(isinstance(one, SpoolChunk) for one in again[4:])
    assert not digested(list(node.next()))


def test_what_comes_back_while_it_goes_out_is_not_tried_at_once_again(thin: ThinFleet) -> None:
    node = thin.nodes["n0"]
    thin.run.write(3)
    for one in list(node.next()):
        node.take_back(one)
    tried = []
    for one in itertools.islice(node.next(), 100):
        tried.append(one)
        node.take_back(one)
    assert digested(tried) == [3, 4, 5] and len(tried) < 100
    assert digested(list(node.next())) == [3, 4, 5]


class LosingBroker:
    """A connection and its stream, of which the third message and what follows is not taken."""

    def __init__(self, on_third: Callable[[LosingBroker], None]) -> None:
        self.is_connected = True
        self.taken: list[Published] = []
        self.num_tried = 0
        self._on_third = on_third

    async def publish(self, subject: str, data: bytes, **_: object) -> None:
        self.num_tried += 1
        if self.num_tried > 2:
            self._on_third(self)
            raise OutboundBufferLimitError
        self.taken += unseal_published(data)


@pytest.mark.parametrize("is_away", [True, False])
def test_a_broker_that_is_lost_while_digests_go_out_is_not_tried_further_and_nothing_is_lost(
    thin: ThinFleet, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    monkeypatch.setattr(sealed, "TOGETHER_BYTES", 0)
    node = thin.nodes["n0"]
    thin.run.write(6)
    lost = [one for one in node.next() if isinstance(one, DigestPiece)]
    for one in lost:
        node.take_back(one)
    broker = LosingBroker(lambda it: setattr(it, "is_connected", not is_away))
    shipping = Shipping(node, BrokerConfig(server="nats://nowhere"))

    async def publish() -> bool:
        return await asyncio.wait_for(shipping._publish_next(broker, broker), 10.0)  # type: ignore[arg-type]

    assert asyncio.run(publish())
    assert broker.num_tried == 3 and broker.taken == lost[:2]
    assert [one for one in node.next() if isinstance(one, DigestPiece)] == lost[2:]


@pytest.mark.parametrize("is_full", [True, False])
def test_what_a_full_window_or_an_end_keeps_back_goes_next(
    thin: ThinFleet, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr(sealed, "TOGETHER_BYTES", 0)
    node, broker = thin.nodes["n0"], LosingBroker(lambda it: None)
    thin.run.write(6)
    lost = [one for one in node.next() if isinstance(one, DigestPiece)]
    for one in lost:
        node.take_back(one)
    shipping = Shipping(node, BrokerConfig(server="nats://nowhere"))

    async def publish() -> None:
        task = asyncio.ensure_future(shipping._publish_next(broker, broker))  # type: ignore[arg-type]
        while not broker.num_tried:
            await asyncio.sleep(0)
        if is_full:
            shipping._flying_bytes = WINDOW_BYTES
        else:
            shipping.stop()
        assert await asyncio.wait_for(task, 10.0)

    asyncio.run(publish())
    # One was read ahead.
    assert broker.taken == lost[:2]
    assert [one for one in node.next() if isinstance(one, DigestPiece)] == lost[2:]


def test_of_what_no_broker_takes_so_much_is_kept(thin: ThinFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    node = thin.nodes["n0"]
    thin.run.write(6)
    lost = [one for one in node.next() if isinstance(one, DigestPiece)]
    monkeypatch.setattr(node_run, "MAX_UNSENT_BYTES", sum(len(one.data) for one in lost[2:]))
    for one in lost:
        node.take_back(one)
    assert digested(list(node.next())) == [5, 6, 7, 8]


def test_a_join_in_another_s_place_gets_digests_of_all_that_is_not_judged_and_of_nothing_else(thin: ThinFleet) -> None:
    assert digested(thin.published) == [0, 1, 2]
    thin.published.clear()
    thin.run.write(5)
    thin.turn()
    assert digested(thin.published) == [3, 4, 5, 6, 7]
    # The former has judged up to the end of step 4, but for one rank's: of that none can be spared.
    folders = sorted(path.name for path in (thin.run.directory / "spool").iterdir())
    for folder in folders:
        judged = 3 if folder == folders[-1] else 4
        write_ack(thin.joined / "run" / "spool" / folder, 0, behind_step(thin.run.directory / "spool" / folder, judged))
    thin.restarted("j2")
    thin.published.clear()
    thin.turn()
    thin.turn()
    assert digested(thin.published) == [4, 5, 6, 7]
    thin.run.write(1)
    thin.turn()
    assert digested(thin.published) == [4, 5, 6, 7, 8]
    assert not thin.problems


def test_where_what_was_published_is_lost_its_digests_come_again_too(thin: ThinFleet) -> None:
    node = thin.nodes["n0"]
    thin.run.write(2)
    assert digested(list(node.next())) == [3, 4]
    thin.now += RESEND_S
    for _ in range(2):
        thin.talk()
    found = list(node.next())
    assert digested(found) == [0, 1, 2, 3, 4] and any(isinstance(one, SpoolChunk) for one in found)


def behind_step(folder: Path, step: int) -> int:
    """Return the offset behind the end of a step in the first file of a spool."""
    data, at = (folder / file_name(0)).read_bytes(), 0
    while isinstance(frame := scan(data, at), Frame):
        at = frame.offset_after
        if (frame.header.type, frame.header.step) == (FrameType.END_STEP, step):
            return at
    raise AssertionError(f"no end of step {step}")


def test_a_join_that_begins_again_knows_which_rows_it_has_not_got(thin: ThinFleet) -> None:
    before = {folder: copy.away for folder, copy in thin.copies._runs["run"].copies.items()}
    thin.restarted("j2")
    assert {folder: copy.away for folder, copy in thin.copies._runs["run"].copies.items()} == before
    assert sum(map(len, before.values())) == len(thin.frames())


def test_a_node_that_ends_leaves_all_rows_behind(thin: ThinFleet) -> None:
    node = thin.nodes["n0"]
    thin.talk()
    assert node.num_away == len(thin.frames()) and not node.num_waiting_bytes
    for _ in range(3):
        node.send_rows()
        thin.turn()
        thin.now += RESEND_S
    assert not node.num_away and not thin.missing() and not thin.problems


def test_rows_that_are_gone_or_of_a_silent_node_are_not_waited_for(thin: ThinFleet) -> None:
    frames = thin.frames()
    gone = thin.run.directory / "spool" / frames[0].folder / file_name(0)
    found: list[Mapping[tuple[bytes, int], Buffer]] = []
    gone.rename(gone.with_name("away"))
    rows = thin.copies.rows_of("run")
    thread = threading.Thread(target=lambda: found.append(rows.fetch(frames)))
    thread.start()
    wait_for(lambda: thin.turn() or not thread.is_alive())
    assert rows.num_gone == sum(one.folder == frames[0].folder for one in frames)
    assert len(found[0]) == len(frames) - rows.num_gone

    thin.now += SILENT_S + 1.0
    assert not rows.fetch(frames[:1])


def test_a_node_that_speaks_and_sends_no_rows_is_not_waited_for_for_good(
    thin: ThinFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fetched_rows, "STALLED_S", 0.3)
    assert not thin.fetched(thin.talk)
    assert thin.copies.rows_of("run").num_gone == len(thin.frames())
    assert "says nothing, or sends none; that step is judged without them" in caplog.text


def test_nobody_waits_for_rows_at_the_end_of_a_join(thin: ThinFleet) -> None:
    frames = thin.frames()
    thin.copies.end("the lease was lost")
    with pytest.raises(StoreError, match="the lease was lost"):
        thin.copies.rows_of("run").fetch(frames)


def test_rows_and_digests_of_strangers_are_refused(thin: ThinFleet) -> None:
    one, other = thin.frames()[0], thin.frames()[-1]
    path = thin.run.directory / "spool" / one.folder / file_name(one.file_index)
    frame = path.read_bytes()[one.offset : one.offset + one.num_bytes]
    mine = RowsPiece(2, "n0", "run", one.folder, one.file_index, one.offset, one.num_bytes, 0, frame)
    before = thin.missing()
    for wrong in (
        msgspec.structs.replace(mine, node="n1"), msgspec.structs.replace(mine, folder="../n0"),
        msgspec.structs.replace(mine, run="../run"), msgspec.structs.replace(mine, folder=other.folder),
        msgspec.structs.replace(mine, offset=one.offset + 8),
        msgspec.structs.replace(mine, num_bytes=one.num_bytes + 1), msgspec.structs.replace(mine, at=1),
        msgspec.structs.replace(mine, data=frame[:-1] + b"x"), msgspec.structs.replace(mine, data=bytes(len(frame))),
    ):  # fmt: skip
        thin.take(wrong)
        assert thin.missing() == before
    thin.take(mine)
    assert thin.copies.counts["rows_bytes"] == one.num_bytes
    digest = next(piece for piece in thin.published if isinstance(piece, DigestPiece))

    def nodes() -> set[str]:
        return {node for of_step in thin.copies.rows_of("run")._book._of_step.values() for node in of_step}

    assert nodes() == {"n0"}
    for piece in (
        msgspec.structs.replace(digest, run=".run"), msgspec.structs.replace(digest, data=digest.data[:-4]),
        msgspec.structs.replace(digest, part=1), msgspec.structs.replace(digest, data=b""),
    ):  # fmt: skip
        thin.take(msgspec.structs.replace(piece, node="n1"))
        assert nodes() == {"n0"}


def test_a_chunk_that_contradicts_itself_is_none(thin: ThinFleet) -> None:
    chunk = next(one for one in thin.published if isinstance(one, SpoolChunk) and one.away)
    for away in (((0, 8),), ((96, 0),), ((200, 8), (200, 8)), ((96, 2**30),), ((96 + len(chunk.data), 8),), ((96, -1),)):
        with pytest.raises(WireError):
            unseal_published(seal(_forged(chunk, away)))


def _forged(chunk: SpoolChunk, away: tuple[tuple[int, int], ...]) -> SpoolChunk:
    """Return a chunk as only a forger makes one: whoever makes one of these is told."""
    with pytest.raises(ValueError, match="expected"):
        msgspec.structs.replace(chunk, away=away)
    found = msgspec.structs.replace(chunk)
    msgspec.structs.force_setattr(found, "away", away)
    return found


@pytest.mark.parametrize("others", [0, 4])
def test_a_node_whose_digest_is_of_other_ranks_is_named(
    thin: ThinFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: int
) -> None:
    rows = thin.copies.rows_of("run")
    data = next(one.data for one in thin.published if isinstance(one, DigestPiece))
    packed = decode_digest(data)
    found = packed.unpack()
    folders = sorted(path.name for path in (thin.run.directory / "spool").iterdir())
    lied = msgspec.structs.replace(
        found, ranks=tuple(msgspec.structs.replace(one, rank=one.rank + others) for one in found.ranks)
    )
    monkeypatch.setattr(rows._book, "find", lambda node, step, of: lied)
    told = rows.digest(packed.step, packed.of, folders)
    if others:
        assert (
            "node n0: digest of step 0: expected one of ranks [0, 1, 2, 3], got [4, 5, 6, 7]; its rows are asked"
            in caplog.text
        )
    else:
        assert told is lied and not caplog.text
