"""Episodes: anomalous points of one series that belong together: one onset, one end, a count."""

from __future__ import annotations

import msgspec
import numpy as np

from sentinel.anomaly import Anomaly

MAX_ONGOING = 1024
"""Most ongoing episodes of a watch whose ids are read in one step, a bound on time: whether any goes on matters, not whether
all do."""


class EndedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that is over."""

    onset: Anomaly
    count: int
    """Steps it showed in."""
    last_step: int
    settled: bool


class Episodes:
    """The open episodes of one watch, by integer key; arrays, so that a thousand open ones cost no Python a step.

    Memory is bounded by the number of keys: series, or (row series, micro-step) for non-finite values.
    """

    def __init__(self) -> None:
        self.key = np.zeros(0, dtype=np.int64)
        self.last_step = np.zeros(0, dtype=np.int64)
        self.count = np.zeros(0, dtype=np.int64)
        self.streak = np.zeros(0, dtype=np.int64)
        """Points in a row, the newest included, that were anomalous."""
        self.raised = np.zeros(0, dtype=bool)
        """Its onset record carries the rule's full severity."""
        self.onset: dict[int, Anomaly] = {}

    def __len__(self) -> int:
        return len(self.key)

    def locate(self, keys: np.ndarray) -> np.ndarray:
        """Return the position of each key among the open ones, -1 for those that are not open."""
        if not len(self.key):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self.key, keys), len(self.key) - 1)
        return np.where(self.key[at] == keys, at, -1)

    def continue_at(self, at: np.ndarray, step: int) -> None:
        """Count one more step for the open episodes at positions `at`."""
        fresh = at[self.last_step[at] != step]
        self.count[fresh] += 1
        self.streak[fresh] += 1
        self.last_step[fresh] = step

    def ongoing(self, step: int) -> list[str]:
        """Return the ids of the onsets of those that show in `step`, of at most `MAX_ONGOING`."""
        keys = self.key[self.last_step == step][:MAX_ONGOING]
        return [self.onset[key].id for key in keys.tolist()]

    def interrupt(self, at: np.ndarray) -> None:
        """End the streaks at positions `at`: their series was seen and is well, for now."""
        self.streak[at] = 0

    def open(self, keys: np.ndarray, step: int, raised: np.ndarray, onsets: list[Anomaly]) -> None:
        """Open an episode for each key; none of them is open."""
        key = np.concatenate([self.key, keys])
        order = np.argsort(key, kind="stable")
        ones = np.ones(len(keys), dtype=np.int64)
        self.key = key[order]
        self.last_step = np.concatenate([self.last_step, ones * step])[order]
        self.count = np.concatenate([self.count, ones])[order]
        self.streak = np.concatenate([self.streak, ones])[order]
        self.raised = np.concatenate([self.raised, raised])[order]
        self.onset.update(zip(keys.tolist(), onsets, strict=True))

    def raise_to(self, key: int, onset: Anomaly, is_raised: bool = True) -> EndedEpisode:
        """Give an open episode a new onset record, of full severity or only worse; return the old one as ended."""
        at = int(self.locate(np.array([key]))[0])
        old = self.onset[key]
        self.onset[key] = onset
        self.raised[at] = is_raised
        return EndedEpisode(onset=old, count=int(self.count[at]), last_step=int(self.last_step[at]), settled=False)

    def end_quiet(self, step: int, quiet_steps: int) -> list[EndedEpisode]:
        """Close what has been quiet for `quiet_steps`."""
        if not len(self.key):
            return []
        return self._close(step - self.last_step >= quiet_steps, settled=False)

    def end_settled(self, keys: np.ndarray) -> list[EndedEpisode]:
        """Close the episodes of series that came to rest at a new level."""
        return self._close(np.isin(self.key, keys), settled=True) if len(self.key) else []

    def end_all(self) -> list[EndedEpisode]:
        """Close everything."""
        return self._close(np.ones(len(self.key), dtype=bool), settled=False)

    def _close(self, over: np.ndarray, settled: bool) -> list[EndedEpisode]:
        if not over.any():
            return []
        ended = [
            EndedEpisode(onset=self.onset.pop(int(key)), count=int(count), last_step=int(last), settled=settled)
            for key, count, last in zip(self.key[over], self.count[over], self.last_step[over], strict=True)
        ]
        for name in ("key", "last_step", "count", "streak", "raised"):
            setattr(self, name, getattr(self, name)[~over])
        return ended

    def to_dict(self) -> dict[str, object]:
        """Return everything, for a snapshot."""
        return {
            "key": self.key.tolist(),
            "last_step": self.last_step.tolist(),
            "count": self.count.tolist(),
            "streak": self.streak.tolist(),
            "raised": self.raised.tolist(),
            "onset": [msgspec.to_builtins(self.onset[key]) for key in self.key.tolist()],
        }

    @classmethod
    def from_dict(cls, data: dict[str, list[object]]) -> Episodes:
        """Return what `to_dict` gave."""
        new = cls()
        new.key = np.array(data["key"], dtype=np.int64)
        new.last_step = np.array(data["last_step"], dtype=np.int64)
        new.count = np.array(data["count"], dtype=np.int64)
        new.streak = np.array(data["streak"], dtype=np.int64)
        new.raised = np.array(data["raised"], dtype=bool)
        onsets = msgspec.convert(data["onset"], list[Anomaly])
        new.onset = dict(zip(new.key.tolist(), onsets, strict=True))
        return new
