"""What a node may do at a broker that knows its users: publish as itself. All else the server refuses, and the join too."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout
from nats.js.errors import APIError, NotFoundError

from sentinel.cli.logged_command import LoggedCommand
from sentinel.cli.main import BAD_USAGE, run_cli
from sentinel.fleet import subjects
from sentinel.fleet.broker import STREAM_BYTES, BrokerConfig, connect, ensure_streams, ensure_worker_streams
from sentinel.fleet.broker_certificates import RENEWED_DAYS, VALID_DAYS, BrokerCertificates
from sentinel.fleet.copied_runs import CopiedRuns
from sentinel.fleet.ended_tasks import within
from sentinel.fleet.join_intake import JoinIntake
from sentinel.fleet.join_lease import JoinLease, LeaseTimes
from sentinel.fleet.own_broker import OwnBroker
from sentinel.fleet.partition_leases import PartitionLeases
from sentinel.fleet.sealed import VERSION, FilePlace, SpoolChunk, seal
from sentinel.fleet.stream_reader import StreamReader

from ..support.broker_acts import act_as, until_refused
from ..support.certificates import write_pair
from ..support.ports import free_port
from ..support.servers import need

NOW = datetime.datetime(2026, 11, 27, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    need("nats-server")
    directory = tmp_path_factory.mktemp("fleet")
    own = OwnBroker(directory, ["node-1", "node-2"], free_port())
    own.prepare()
    server = LoggedCommand(own.command, directory / "log")
    server.start()
    yield own
    server.end(20.0)


async def has_streams(client: Client) -> bool:
    jetstream = client.jetstream()
    return [(await jetstream.stream_info(name)).config.name for name in (subjects.STREAM, subjects.LEASES)] == [
        subjects.STREAM, subjects.LEASES,
    ]  # fmt: skip


@pytest.mark.server
@pytest.mark.slow
def test_a_node_publishes_as_itself_and_as_no_other(broker: OwnBroker) -> None:
    async def make(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)
        assert await has_streams(client)

    async def publish(client: Client, refused: list[str]) -> None:
        # What is its own goes through, and is acknowledged into its own inbox.
        assert (await client.jetstream().publish(subjects.raw("run", "node-1"), b"mine", timeout=60.0)).seq == 1
        for other in (
            subjects.raw("run", "node-2"), subjects.beat("run", "node-2"), subjects.answer("run", "node-1"), subjects.LEASE,
            # The partition is not what the right is by.
            subjects.raw("run", "node-1").replace("node-1", "node-3"),
        ):  # fmt: skip
            await client.publish(other, b"forged")
            await until_refused(refused, f'publish to "{other}"')
        for subject in (subjects.answer("run", "node-2"), subjects.BEATS, f"{subjects.inbox('node-2')}.>", "_INBOX.>", ">"):
            await client.subscribe(subject)
            await until_refused(refused, f'subscription to "{subject}"')

    async def count(client: Client, refused: list[str]) -> None:
        assert (await client.jetstream().stream_info(subjects.STREAM)).state.messages == 1

    assert not act_as(broker.access("join"), make)
    assert act_as(broker.access("node-1"), publish)
    assert not act_as(broker.access("join"), count)


@pytest.mark.server
@pytest.mark.slow
def test_a_node_makes_deletes_and_purges_no_stream(broker: OwnBroker) -> None:
    async def administer(client: Client, refused: list[str]) -> None:
        jetstream = client.jetstream(timeout=0.2)
        for act, subject in (
            (jetstream.add_stream(name="MINE", subjects=["mine"]), "$JS.API.STREAM.CREATE.MINE"),
            (jetstream.delete_stream(subjects.STREAM), f"$JS.API.STREAM.DELETE.{subjects.STREAM}"),
            (jetstream.purge_stream(subjects.STREAM), f"$JS.API.STREAM.PURGE.{subjects.STREAM}"),
            (jetstream.get_msg(subjects.LEASES, 1), f"$JS.API.STREAM.MSG.GET.{subjects.LEASES}"),
        ):
            with contextlib.suppress(NatsTimeout, TimeoutError, APIError, Error):
                await act
            await until_refused(refused, f'publish to "{subject}"')

    async def look(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)
        assert await has_streams(client)

    assert not act_as(broker.access("join"), look)
    assert act_as(broker.access("node-1"), administer)
    assert act_as(broker.access("status"), administer)
    assert not act_as(broker.access("join"), look)


@pytest.mark.server
@pytest.mark.slow
def test_a_worker_has_its_two_streams_and_no_other(broker: OwnBroker) -> None:
    async def work(client: Client, refused: list[str]) -> None:
        jetstream = client.jetstream(timeout=60.0)
        await ensure_worker_streams(jetstream, STREAM_BYTES >> 8)
        assert await PartitionLeases("host/1", LeaseTimes.of(1.0)).step(jetstream) is False
        taken: list[bytes] = []
        reader = StreamReader(
            subjects.FRAMES_STREAM, subjects.in_partition(subjects.FRAMES, subjects.partition_of("node-1")),
            take=lambda message: taken.append(message.data), has_room=lambda: True, may_act=lambda: not taken,
            is_shared=True,
        )  # fmt: skip
        async with asyncio.timeout(60.0):
            await reader.read(jetstream)
        assert taken == [b"mine"]
        await jetstream.purge_stream(subjects.FRAMES_STREAM, subject=subjects.frames(None, "node-1"))
        await client.publish(subjects.beat("run", "node-1"), b"in its name")
        await client.publish(subjects.raw("run", "node-1"), b"in its name")
        await client.subscribe(subjects.FRAMES_BEATS)
        await client.subscribe(subjects.ANSWERS)
        await client.flush()
        assert not refused

    async def administer(client: Client, refused: list[str]) -> None:
        jetstream = client.jetstream(timeout=0.2)
        for act, subject in (
            (jetstream.delete_stream(subjects.FRAMES_STREAM), f"$JS.API.STREAM.DELETE.{subjects.FRAMES_STREAM}"),
            (jetstream.purge_stream(subjects.STREAM), f"$JS.API.STREAM.PURGE.{subjects.STREAM}"),
            (jetstream.get_msg(subjects.LEASES, 1), f"$JS.API.STREAM.MSG.GET.{subjects.LEASES}"),
        ):
            with contextlib.suppress(NatsTimeout, TimeoutError, APIError, Error):
                await act
            await until_refused(refused, f'publish to "{subject}"')
        for other in (subjects.LEASE, subjects.answer("run", "node-1"), subjects.frames("run", "node-1")):
            await client.publish(other, b"forged")
            await until_refused(refused, f'publish to "{other}"')

    async def ship(client: Client, refused: list[str]) -> None:
        sent = await client.jetstream().publish(subjects.frames("run", "node-1"), b"mine", timeout=60.0)
        assert sent.stream == subjects.FRAMES_STREAM
        await client.publish(subjects.frames("run", "node-2"), b"forged")
        await until_refused(refused, f'publish to "{subjects.frames("run", "node-2")}"')

    async def prepare(client: Client, refused: list[str]) -> None:
        await ensure_worker_streams(client.jetstream(timeout=60.0), STREAM_BYTES >> 8)

    assert not act_as(broker.access("worker"), prepare)
    assert act_as(broker.access("node-1"), ship)
    assert not act_as(broker.access("worker"), work)
    assert act_as(broker.access("worker"), administer)


@pytest.mark.server
@pytest.mark.slow
def test_an_acknowledgement_that_is_asked_for_elsewhere_goes_nowhere(broker: OwnBroker) -> None:
    async def fill(client: Client, refused: list[str]) -> None:
        await ensure_streams(client.jetstream(), STREAM_BYTES >> 8)
        await client.jetstream().publish(subjects.LEASE, b"record")

    async def ask(client: Client, refused: list[str]) -> None:
        for elsewhere in (f"$JS.API.STREAM.PURGE.{subjects.LEASES}", subjects.LEASE, subjects.raw("run", "node-2")):
            await client.publish(subjects.raw("run", "node-1"), b"mine", reply=elsewhere)
        # Behind them: what is acknowledged here was answered there.
        assert (await client.jetstream().publish(subjects.raw("run", "node-1"), b"last", timeout=60.0)).stream

    async def look(client: Client, refused: list[str]) -> None:
        jetstream = client.jetstream()
        state = (await jetstream.stream_info(subjects.LEASES)).state
        record = await jetstream.get_msg(subjects.LEASES, state.last_seq)
        assert (record.data, state.messages) == (b"record", state.last_seq)
        found = await jetstream.get_last_msg(subjects.STREAM, subjects.raw("run", "node-1"))
        assert found.data == b"last"
        with pytest.raises(NotFoundError):
            await jetstream.get_last_msg(subjects.STREAM, subjects.raw("run", "node-2"))

    for user, act in (("join", fill), ("node-1", ask), ("join", look)):
        assert not act_as(broker.access(user), act)


@pytest.mark.server
@pytest.mark.slow
def test_whoever_has_no_login_is_not_let_in(broker: OwnBroker, tmp_path: Path) -> None:
    login = tmp_path / "login"
    login.write_text("node-1\nguessed\n")
    login.chmod(0o600)
    access = broker.access("node-1")

    for other in (
        BrokerConfig(server=access.server, ca_file=access.ca_file),
        BrokerConfig(server=access.server, ca_file=access.ca_file, login_file=str(login)),
    ):
        with pytest.raises(TimeoutError):
            asyncio.run(within(1.0, connect(other, "test")))


@pytest.mark.server
@pytest.mark.slow
def test_status_says_why_it_hears_nobody(broker: OwnBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(server: str, *options: str) -> str:
        assert run_cli(["fleet", "status", "--server", server, "--listen-s", "0.5", *options]) == BAD_USAGE
        return capsys.readouterr().err

    node, (other, _) = broker.access("node-1"), write_pair(tmp_path)
    untrusted = said(node.server, "--login", node.login_file)
    assert (
        "unable to get local issuer certificate; name" in untrusted
        and "with --tls-ca" in untrusted
        and "no answer" not in untrusted
    )
    untrusted = said(node.server, "--login", node.login_file, "--tls-ca", str(other))
    assert f'in --tls-ca "{other}", got: ' in untrusted

    (line,) = said(node.server, "--login", node.login_file, "--tls-ca", node.ca_file).splitlines()
    assert f"got {node.login_file}, which may not hear sn.*.beat.*" in line and "that of the user status" in line


@pytest.mark.server
@pytest.mark.slow
def test_whoever_has_a_login_of_another_or_none_is_told_what_to_give(
    broker: OwnBroker, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    node = broker.access("node-1")

    async def speak_as_another() -> None:
        client = await within(60.0, connect(node, "test"))
        await client.publish(subjects.beat("run", "node-2"), b"")
        async with asyncio.timeout(60.0):
            while "violation" not in caplog.text:
                await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(speak_as_another())
    assert f"the user of {node.login_file} may not: give --login" in caplog.text and "the node of --node" in caplog.text

    assert run_cli(["fleet", "status", "--server", node.server, "--tls-ca", node.ca_file]) == BAD_USAGE
    assert "it lets nobody in with no --login: give --login" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["fleet", "status", "--server", "tls://127.0.0.1:1", "--tls-ca", "nope.pem"]) == BAD_USAGE

    said = capsys.readouterr().err
    assert '--tls-ca "nope.pem": expected certificates in PEM, got: No such file or directory' in said


@pytest.mark.server
@pytest.mark.slow
def test_a_stream_of_an_earlier_version_takes_the_subjects_of_this_one(broker: OwnBroker) -> None:
    async def exchange(client: Client, refused: list[str]) -> None:
        jetstream = client.jetstream()
        await ensure_streams(jetstream, STREAM_BYTES >> 8)
        former = (await jetstream.stream_info(subjects.STREAM)).config
        former.subjects = ["sn.*.raw.*"]
        await jetstream.update_stream(former)

        await ensure_streams(jetstream, STREAM_BYTES >> 8)

        assert (await jetstream.stream_info(subjects.STREAM)).config.subjects == [subjects.RAW]

    assert not act_as(broker.access("join"), exchange)


class Came:
    """A message as the client hands it over."""

    def __init__(self, subject: str, data: bytes) -> None:
        self.subject, self.data = subject, data
        self.metadata = self
        self.sequence = self
        self.stream = 1


def test_the_join_takes_from_a_subject_what_is_its_nodes_alone(tmp_path: Path) -> None:
    problems: list[str] = []
    copies = CopiedRuns(tmp_path, "j1", on_problem=problems.append)
    intake = JoinIntake(copies, BrokerConfig(server="nats://127.0.0.1:9"), JoinLease("j1"))
    folder = "r00000-0123abcd"
    chunk = SpoolChunk(
        version=VERSION, node="node-1", run="run", folder=folder, file="000000.spool", offset=0, after=FilePlace(), size=0,
        data=b"x",
    )  # fmt: skip

    for subject in (subjects.raw("run", "node-2"), subjects.raw("other", "node-1"), "sn.run"):
        intake._take_message(Came(subject, seal(chunk)))  # type: ignore[arg-type]
    assert copies.counts["refused"] == 3 and not copies.counts["chunks"]
    assert len(problems) == 3 and "node-1" in problems[0]
    intake._take_message(Came(subjects.raw("run", "node-1"), seal(chunk)))  # type: ignore[arg-type]
    assert copies.counts["chunks"] == 1


def test_certificates_are_made_anew_before_they_expire(tmp_path: Path) -> None:
    certificates = BrokerCertificates(tmp_path)

    assert certificates.renew(NOW)
    before = certificates.certificate.read_bytes()
    assert not certificates.renew(NOW + datetime.timedelta(days=VALID_DAYS - RENEWED_DAYS - 1))
    assert certificates.certificate.read_bytes() == before
    assert certificates.renew(NOW + datetime.timedelta(days=VALID_DAYS - RENEWED_DAYS + 1))
    assert certificates.certificate.read_bytes() != before
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.iterdir())
