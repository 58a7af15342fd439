"""Edits of the config file as a rank sees them by itself: followed where they name a future step, without any daemon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sentinel.collect.hooks.weak import weakly
from sentinel.collect.schedule.command_inbox import FROM_FILE, CommandInbox
from sentinel.command import ChangeConfig
from sentinel.config_file import ConfigFile, ConfigText
from sentinel.errors import ConfigError
from sentinel.messages import Ack
from sentinel.monitor_config import ConfigSource, as_reported, refuse_fixed

LOOK_S = 0.5
"""Seconds between two looks at the file: longer than the 0.4 s after which an edit is stable, so the next look takes it;
a step that an edit names lies further off."""
ALONE_S = 10.0
"""An edit that names no step, and that no daemon took up for so long, is said to be unread."""


class ConfigEdits:
    """Looks at the file from a thread of its own: a file system that hangs holds up neither trainer nor writer."""

    def __init__(self, source: ConfigSource, inbox: CommandInbox, report: Callable[[str, str, str], None]) -> None:
        """tell: (code, message, site): notes something for the log and the daemon."""
        self._source = source
        self._inbox = inbox
        self._report = report
        self._file = ConfigFile(source.path)
        self._seen = source.text_hash
        self._unread_since: float | None = None
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to look, where there is a file."""
        if self._source.path:
            turn = weakly(self._turn)
            threading.Thread(target=_look, args=(turn, self._is_over), name="sentinel-config", daemon=True).start()

    def stop(self) -> None:
        """Look no more; does not wait."""
        self._is_over.set()

    def _turn(self) -> bool:
        try:
            self.turn(time.monotonic())
        except Exception as error:
            self._report("config_failed", f"{type(error).__name__}: {error}", self._source.path)
        return True

    def turn(self, mono: float) -> None:
        """Look once. mono: seconds, a clock that never jumps."""
        reading = self._file.look(mono)
        if reading is None:
            return
        if reading.text_hash != self._seen:
            self._seen, self._unread_since = reading.text_hash, None
            self._take(reading, mono)
        elif self._unread_since is not None and mono - self._unread_since >= ALONE_S:
            self._unread_since = None
            if reading.text_hash not in (self._inbox.applied_hash, self._inbox.plan.config.text_hash):
                self._report_once(
                    "config_unread",
                    f"{self._source.path} was edited, and no daemon asks for it; start `sentinel serve`, or name a future "
                    "step in the file (at_step: N) and every rank follows by itself",
                )

    def _take(self, reading: ConfigText, mono: float) -> None:
        try:
            if reading.config is None:
                raise ConfigError(reading.problem)
            refuse_fixed(reading.text, self._source.path, as_reported(self._source.as_read))
        except ConfigError as error:
            self._report_once("config_broken", f"the former config stays in force: {error}")
            return
        for answer in self._inbox.forget_own():
            self._inbox.acknowledge(answer)
        plan, at_step = self._inbox.plan, reading.config.at_step
        if reading.text_hash in (plan.config.text_hash, self._inbox.applied_hash):
            return
        if at_step is None:
            self._unread_since = mono
            return
        armed = self._inbox.receive(
            ChangeConfig(
                id=FROM_FILE + reading.text_hash,
                seq=0,
                at_step=at_step,
                settings=as_reported(reading.config.measurement),
                path=self._source.path,
                text_hash=reading.text_hash,
                reason="read in the file itself",
            )
        )
        assert armed is not None
        self._inbox.acknowledge(armed)
        if armed.state == "missed":
            self._missed(armed)

    def _missed(self, answer: Ack) -> None:
        self._report(
            "config_missed",
            f"rank {self._inbox.rank()} read the edit of {self._source.path} too late: {answer.reason}; other ranks "
            "may have obeyed. Name a later step (at_step)",
            answer.command,
        )

    def _report_once(self, code: str, message: str) -> None:
        # One voice is enough for what every rank reads alike.
        if self._inbox.rank() == 0:
            self._report(code, message, self._seen)


def _look(turn: Callable[[], bool | None], is_over: threading.Event) -> None:
    """Look until it is over, or whoever looks is gone."""
    while not is_over.wait(LOOK_S) and turn():
        pass
