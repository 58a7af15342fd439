"""Where a daemon listens: what is refused before it starts, and who is asked for a token."""

from __future__ import annotations

import pytest

from sentinel.cli.listening import Listening
from sentinel.errors import ConfigError


@pytest.mark.parametrize(
    ("listen", "given", "people", "are_open"),
    [
        ("127.0.0.1:0", None, [], True),
        ("127.0.0.1:0", None, ["bob"], False),
        ("127.0.0.1:0", False, ["bob"], True),
        ("127.0.0.1:0", True, [], False),
        ("unix:/run/s", None, ["bob"], True),
        ("unix:/run/s", True, [], False),
    ],
)
def test_reads_need_a_token_where_others_use_the_machine(
    listen: str, given: bool | None, people: list[str], are_open: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Listening(listen=listen, token_reads=given).config(lambda: people)

    assert config.are_reads_open is are_open
    assert ("(bob); --open-reads" in capsys.readouterr().err) is (bool(people) and not are_open)


@pytest.mark.parametrize("listen", ["0.0.0.0:9464", "[::]:9464", "10.0.0.1:1", "node17:9464"])
def test_tokens_never_cross_a_network_in_the_clear_unless_that_is_allowed_by_name(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.listen .*--tls-cert .*--insecure-tokens"):
        Listening(listen=listen).config()

    assert not Listening(listen=listen, insecure_tokens=True).config().are_reads_open
    assert Listening(listen=listen, tls_cert="c.pem", tls_key="k.pem").config().has_tls


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"listen": "127.0.0.1:1", "tls_cert": "c.pem"}, r"http\.tls_key must name a file"),
        ({"listen": "127.0.0.1:1", "tls_key": "k.pem"}, r"http\.tls_cert must name a file"),
        ({"listen": "unix:run/s"}, r"unix:/PATH with a whole path"),
        ({"listen": "unix:"}, r"unix:/PATH with a whole path"),
    ],
)
def test_half_an_answer_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Listening(**options).config()


def test_what_run_was_given_reaches_its_daemon() -> None:
    given = Listening(listen="h:1", tls_cert="/c", tls_key="/k", insecure_tokens=True, token_reads=False, hosts=("a", "b"))

    assert given.arguments == [
        "--listen", "h:1", "--tls-cert", "/c", "--tls-key", "/k", "--insecure-tokens", "--open-reads",
        "--allow-host", "a", "--allow-host", "b",
    ]  # fmt: skip
