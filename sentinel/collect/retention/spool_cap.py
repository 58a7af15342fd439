"""SpoolCap: keeps the closed files of one rank's spool below a number of bytes, and knows what that cost."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from sentinel.collect.retention.losses import Losses
from sentinel.collect.retention.thinning import LEFT_OUT, SpoolFile, Thinned, next_to_thin, thin
from sentinel.messages import Health
from sentinel.wire.spool import read_ack

log = logging.getLogger("sentinel")

SPOOL_BYTES = 4 * 2**30
"""Most bytes of spool that one process of a rank keeps, unless said otherwise."""


class SpoolCap:
    """The `ClosedFiles` of a spool with a cap: what the daemon committed goes first, then what is worth least."""

    def __init__(self, directory: Path, rank: int, *, max_bytes: int = SPOOL_BYTES) -> None:
        """directory: that of the `SpoolWriter`."""
        self.max_bytes = max_bytes
        self.cut = Losses()
        """Steps that lost rows at the cap before the daemon had committed them, since the beginning."""
        self.gone = Losses()
        """Steps that were lost whole, likewise."""
        self._directory = Path(directory)
        self._rank = rank
        self._files: list[SpoolFile] = []
        """Oldest first."""
        self._num_unreported = 0
        """Files that were thinned since the spool last said so."""
        self._logged_level = 0

    def add(self, index: int, num_bytes: int) -> None:
        """Take in the whole file of this index, which is closed now."""
        self._files.append(SpoolFile(first=index, last=index, num_bytes=num_bytes))

    def make_room(self, file_bytes: int) -> None:
        """Have room for one more file of so many bytes below the cap, as far as there is anything that may go."""
        while self._files and sum(one.num_bytes for one in self._files) + file_bytes > self.max_bytes:
            if not self.drop_committed() and not self._thin(file_bytes):
                return

    def drop_committed(self) -> bool:
        """Delete the oldest file if the daemon has committed all of it; True when it did."""
        if not self._files or self._files[0].last >= read_ack(self._directory)[0]:
            return False
        self._delete(self._files.pop(0))
        return True

    def news(self, step: int) -> Health | None:
        """Return the record that says how many files were thinned since the last one; None: none was."""
        if not self._num_unreported:
            return None
        text = (
            f"rank {self._rank}: spool.max_bytes {self.max_bytes} is used up: {self._num_unreported} files were thinned "
            f"before they were judged; is the daemon running?"
        )
        return Health(code="spool_full", message=text, count=self._num_unreported, step=step)

    def mark_reported(self, news: Health) -> None:
        """Take note that these news were written; what was thinned to write them is in the next."""
        self._num_unreported -= news.count

    def _thin(self, file_bytes: int) -> bool:
        """Keep less of the oldest among the files of which most is kept; False: nothing more can be left out."""
        found = next_to_thin(self._files, file_bytes)
        if found is None:
            return False
        at, num_files = found
        former = self._files[at : at + num_files]
        try:
            thinned = thin(self._directory, former)
        except OSError:
            return False
        self._files[at : at + num_files] = [thinned.file]
        # The newest first: a reader that finds the oldest goes through what is whole before it comes to what is not.
        for one in reversed(former):
            self._delete(one)
        self.cut.merge(thinned.cut)
        self.gone.merge(thinned.gone)
        self._num_unreported += num_files
        self._log_loss(thinned)
        return True

    def _log_loss(self, thinned: Thinned) -> None:
        """Say in the trainer's own log, once for each level, what goes now: where there is no daemon nobody else says it."""
        losses = thinned.cut or thinned.gone
        if losses and thinned.file.level > self._logged_level:
            self._logged_level = thinned.file.level
            log.warning(
                "sentinel: rank %d: the spool has reached spool.max_bytes (%d) and no daemon has judged it: %s go "
                "from now on, those of steps %d to %d first; run `sentinel serve %s`, or raise spool.max_bytes",
                self._rank, self.max_bytes, LEFT_OUT[thinned.file.level], losses.first_step, losses.last_step,
                self._directory.parent.parent,
            )  # fmt: skip

    def _delete(self, one: SpoolFile) -> None:
        with contextlib.suppress(OSError):
            (self._directory / one.name).unlink()
