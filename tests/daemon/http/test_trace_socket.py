"""`/ws/trace`: a client of MegaScope's shape sees what ranks trace while they train; nobody else sees anything."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from sentinel.command import TraceTensors, WithdrawCommand
from sentinel.control.command_files import CommandFiles
from sentinel.daemon.http import trace_socket
from sentinel.daemon.http.tokens import Tokens, load_tokens
from sentinel.trace import Compressor

from ...support.serving import small_run
from ...support.traces import TracingRank
from ...support.waiting import wait_for
from ..test_daemon import daemon, url

pytestmark = [pytest.mark.server, pytest.mark.slow]
RUN = "train"
ASKS = {
    "type": "run_training_step", "visualization_flags": {"HiddenStates": True, "InputTokens": True},
    "compressor_config": {"type": "TileCompressor", "tiles": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def training_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Tokens, Path]]:
    directory = tmp_path_factory.mktemp("runs")
    small_run(directory / RUN).write(3)
    with daemon(directory) as one:
        wait_for(one.api.is_ready, what="the daemon")
        yield url(directory).replace("http", "ws") + "/ws/trace", load_tokens(directory / ".daemon"), directory / RUN


@contextmanager
def client(address: str, token: str, **others: Any) -> Iterator[ClientConnection]:
    with connect(address, open_timeout=60, close_timeout=60) as one:
        one.send(json.dumps({"token": token, "run": RUN, **ASKS, **others}))
        yield one


def problem(one: ClientConnection) -> str:
    """Return the next error that a client is told, whatever it is shown before."""
    while (message := json.loads(one.recv(60)))["type"] != "error":
        pass
    return str(message["message"])


def commands(run_dir: Path) -> list[Any]:
    return [command for _, command in CommandFiles(run_dir / "control").fresh()]


def test_a_client_sees_what_it_asked_for_and_the_ranks_stop_when_it_leaves(training_run: tuple[str, Tokens, Path]) -> None:
    address, tokens, run_dir = training_run
    before = len(commands(run_dir))
    ranks = [TracingRank(run_dir, rank) for rank in range(2)]
    with client(address, tokens.control) as one:
        wait_for(lambda: len(commands(run_dir)) > before, what="an order")
        order = commands(run_dir)[before]
        assert isinstance(order, TraceTensors) and order.for_steps == 200 and order.trace.tokens
        assert order.trace.compressor == Compressor(name="tile", size=4) and order.kinds == ("activation",)
        ranks[0].step(7)
        start = json.loads(one.recv(60))
        assert start == {"type": "start", "micro_batch_size": 2, "seq_length": 16, "num_layers": 4}
        ranks[1].step(7)  # Later than the other rank, and of the same step.
        ranks[0].step(8)
        updates = [json.loads(one.recv(60)) for _ in range(6)]
    told = {(one["rank"], one["step"], one["update_type"]): one for one in updates}
    assert set(told) == {(rank, step, flag) for rank, step in ((0, 7), (1, 7), (0, 8)) for flag in (7, 8)}
    hidden = told[1, 7, 7]
    assert (hidden["layer_id"], hidden["args"], hidden["name"]) == (3, [2, 16, 32], "layers.3")
    assert hidden["result"] == [["nan", 107.0], [107.0, "-inf"]] or hidden["result"] == [[["nan", 107.0], [107.0, "-inf"]]]
    assert told[0, 8, 8]["result"] == [list(range(16)), list(range(16, 32))]
    wait_for(lambda: isinstance(commands(run_dir)[-1], WithdrawCommand), what="the withdrawal")
    assert commands(run_dir)[-1].withdraws == order.id
    for rank in ranks:
        rank.writer.thread.close(10.0)


def test_ranks_are_chosen_and_a_client_is_told_how_many_it_is_not_shown(
    training_run: tuple[str, Tokens, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, tokens, run_dir = training_run
    before = len(commands(run_dir))
    ranks = [TracingRank(run_dir, rank, attempt=1) for rank in range(4)]
    for rank in ranks:
        rank.step(20)
        rank.writer.thread.close(60.0)
    with client(address, str(tokens.control), ranks="2-3") as one:
        told = json.loads(one.recv(60))
        assert (told["type"], told["num_ranks"], told["num_not_shown"]) == ("ranks", 4, 2)
        while (message := json.loads(one.recv(60)))["type"] != "update":
            pass
        shown = {message["rank"], *(json.loads(one.recv(60))["rank"] for _ in range(3))}
        assert shown == {2, 3} and commands(run_dir)[before].ranks == (2, 3)
        one.send(json.dumps({**ASKS, "ranks": "0-4000"}))
        assert "ranks: expected at most 200 ranks" in problem(one)


def test_who_only_reads_orders_nothing(training_run: tuple[str, Tokens, Path]) -> None:
    address, tokens, run_dir = training_run

    def orders() -> list[Any]:
        """Withdrawals left out: that of a client before may still come."""
        return [one for one in commands(run_dir) if isinstance(one, TraceTensors)]

    before = orders()
    with client(address, str(tokens.read)) as one:
        assert "reads only" in problem(one)
        one.send(json.dumps({**ASKS, "visualization_flags": {"Nothing": True}}))
        assert 'unknown flag "Nothing"' in problem(one)
        one.send("[[")  # No JSON: passed over.
        one.send(json.dumps({**ASKS, "compressor_config": {"type": "__import__('os')"}}))
        assert "compressor_config" in problem(one)
    assert orders() == before


def test_a_run_that_is_not_there_is_told_to_who_only_reads_too(training_run: tuple[str, Tokens, Path]) -> None:
    address, tokens, _ = training_run
    for token in (str(tokens.read), str(tokens.control)):
        with client(address, token, run="trian") as one:
            while "trian" not in (said := problem(one)):
                assert "reads only" in said


def test_what_nobody_obeys_is_ordered_anew_and_said(
    training_run: tuple[str, Tokens, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, tokens, run_dir = training_run
    monkeypatch.setattr(trace_socket, "QUIET_S", 0.5)
    before = len(commands(run_dir))
    with client(address, str(tokens.control)) as one:
        assert "nothing came" in (said := problem(one)) and "allow_commands" in said
        wait_for(lambda: len(commands(run_dir)) >= before + 3, "the order, its withdrawal, and the next order")
        first, withdrawn, second = commands(run_dir)[before : before + 3]
    assert isinstance(first, TraceTensors) and isinstance(second, TraceTensors)
    assert isinstance(withdrawn, WithdrawCommand) and withdrawn.withdraws == first.id


@pytest.mark.parametrize("first", [{}, {"token": "x" * 32}, {"token": None}, []])
def test_without_a_token_nothing_is_shown(training_run: tuple[str, Tokens, Path], first: Any) -> None:
    with connect(training_run[0], open_timeout=60) as one:
        one.send(json.dumps(first))
        with pytest.raises(ConnectionClosed) as closed:
            one.recv(60)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401


@pytest.mark.parametrize(("host", "origin"), [
    ("127.0.0.1", "http://evil.example"), ("127.0.0.1", "null"), ("evil.example", None),
    ("evil.example", "http://evil.example"),
])  # fmt: skip
def test_a_page_of_others_is_refused(training_run: tuple[str, Tokens, Path], host: str, origin: str | None) -> None:
    port = int(training_run[0].rpartition(":")[2].partition("/")[0])
    there = socket.create_connection(("127.0.0.1", port), 60)
    address = training_run[0].replace("127.0.0.1", host)
    with pytest.raises(InvalidStatus) as refused, connect(address, sock=there, origin=Origin(origin) if origin else None):
        pass
    assert refused.value.response.status_code == 403
