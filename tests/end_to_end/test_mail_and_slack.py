"""E-mail to a real mail server, over TLS and without, and a Slack that answers over HTTP."""

from __future__ import annotations

import email
import email.policy
import io
import socket
import ssl
import subprocess
import threading
import time

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from sentinel.report.links import MessageLinks
from sentinel.report.sample_alert import sample_alert
from sentinel.report.sinks.delivery import SinkParts
from sentinel.report.sinks.mail import EmailConfig
from sentinel.report.sinks.slack_bot import SlackBotConfig

from ..support.ports import free_port
from ..support.servers import need
from ..support.slack_server import TOKEN, FakeSlack

NOW = 1_780_000_000.0
LINKS = MessageLinks(external_url="https://s.example")


class Mailbox:
    """What a mail server took, and what it answers."""

    def __init__(self, answer="250 OK"):
        self.mails = []
        self.answer = answer

    async def handle_DATA(self, server, session, envelope):
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return self.answer


def a_sink(controller, ca_file="", **changes):
    config = {
        "host": "localhost", "port": controller.port, "security": "none", "sender": "sentinel@example.org",
        "to": ("ana@example.org", "ben@example.org"), "timeout_s": 20.0,
    }  # fmt: skip
    parts = SinkParts(environ={"PASSWORD": "s3cret"}, stream=io.StringIO(), links=LINKS, ca_file=str(ca_file))
    return EmailConfig(**{**config, **changes}).build(parts)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for localhost that signs itself: (file, TLS context of a server)."""
    need("openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return folder / "cert.pem", context


def running(box, **options):
    controller = Controller(box, hostname="localhost", port=free_port(), **options)
    controller.start()
    return controller


def test_a_thread_of_mails_arrives_at_a_real_server_over_starttls_with_a_login(certificate):
    file, context = certificate
    logins = []

    def authenticator(server, session, envelope, mechanism, data):
        logins.append((data.login, data.password))
        return AuthResult(success=True)

    box = Mailbox()
    controller = running(box, tls_context=context, require_starttls=True, authenticator=authenticator, auth_required=True)
    try:
        sink = a_sink(controller, file, security="starttls", username="sentinel", password_env="PASSWORD")
        outcomes = [sink.deliver([sample_alert("email", NOW, is_over=over)], NOW).outcome for over in (False, True)]
    finally:
        controller.stop()

    assert outcomes == ["sent", "sent"] and logins == [(b"sentinel", b"s3cret")] * 2
    opened, closed = box.mails
    assert opened["Subject"].startswith("CRITICAL: run notify-test: TEST, nothing is wrong")
    assert closed["References"] == opened["Message-ID"]
    assert "incident: https://s.example/incidents/i7e5700000000?run=notify-test" in opened.get_content()


def test_a_certificate_that_nobody_vouches_for_gets_neither_password_nor_message(certificate):
    box = Mailbox()
    controller = running(box, tls_context=certificate[1])
    try:
        delivery = a_sink(controller, security="starttls").deliver([sample_alert("email", NOW)], NOW)
    finally:
        controller.stop()

    assert (delivery.outcome, box.mails) == ("retry", []) and "TLS failed" in delivery.detail


def test_a_server_without_starttls_is_given_nothing():
    box = Mailbox()
    controller = running(box)
    try:
        delivery = a_sink(controller, security="starttls").deliver([sample_alert("email", NOW)], NOW)
    finally:
        controller.stop()

    assert (delivery.outcome, box.mails) == ("failed", [])


@pytest.mark.parametrize(("answer", "outcome"), [("451 later", "retry"), ("554 never", "failed")])
def test_what_a_server_refuses_is_later_or_never(answer, outcome):
    box = Mailbox(answer)
    controller = running(box)
    try:
        delivery = a_sink(controller).deliver([sample_alert("email", NOW)], NOW)
    finally:
        controller.stop()

    assert delivery.outcome == outcome and answer[:3] in delivery.detail


def test_a_server_that_says_a_byte_a_second_is_cut_off_at_the_deadline():
    listening = socket.create_server(("127.0.0.1", 0))
    is_over = threading.Event()

    def drip():
        connection, _ = listening.accept()
        with connection:
            while not is_over.wait(0.05):
                try:
                    connection.sendall(b"2")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    sink = EmailConfig(
        host="127.0.0.1", port=listening.getsockname()[1], security="none", sender="a@b", to=("c@d",), timeout_s=0.5
    ).build(SinkParts(environ={}, stream=io.StringIO()))

    began = time.monotonic()
    delivery = sink.deliver([sample_alert("email", NOW)], NOW)
    took_s = time.monotonic() - began
    is_over.set()
    thread.join(10)
    listening.close()

    assert delivery.outcome == "retry" and "not taken within 0.5 s" in delivery.detail
    assert took_s < 15.0, "a byte at a time it would never end"


def test_one_message_of_slack_is_edited_over_http():
    slack = FakeSlack()
    with slack.serving() as url:
        parts = SinkParts(environ={"T": TOKEN}, stream=io.StringIO())
        bot = SlackBotConfig(token_env="T", channel="#oncall", api_url=url, timeout_s=20.0).build(parts)
        opened, closed = (bot.deliver([sample_alert("slack-bot", NOW, is_over=over)], NOW) for over in (False, True))

    assert (opened.outcome, closed.outcome) == ("sent", "sent")
    assert [method for method, _ in slack.calls] == ["chat.postMessage", "chat.update", "chat.postMessage"]
    assert [one["text"][:26] for one in slack.messages.values()] == ["CRITICAL closed: run notif"]
    assert len(slack.replies) == 1
