"""Who speaks, who hears, and as of when it is known what all of them hold."""

from __future__ import annotations

import random

import pytest

from sentinel.fleet.heard_nodes import DEAF_S, SILENT_S, HeardNodes
from sentinel.fleet.sealed import PLAIN_VERSION, Beat


def a_beat(node: str, *, echo: float = 0.0, join: str = "j1", is_leaving: bool = False) -> Beat:
    return Beat(
        version=PLAIN_VERSION, node=node, run="run", echo=(join, int(echo * 1e9)), spools={}, commands=[], blocked="",
        is_leaving=is_leaving,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_node_says_as_of_when_all_is_known(seed: int) -> None:
    rng, heard, now = random.Random(seed), HeardNodes(), 100.0
    names = [f"n{number}" for number in range(8)]
    heard.begin(names[:3], now)
    seen, at, deaf_since = dict[str, float](), dict.fromkeys(names[:3], now), dict[str, float]()
    for _ in range(400):
        now += rng.choice((0.1, 1.0, rng.random() * SILENT_S))
        node, echo = rng.choice(names), now - rng.choice((0.05, 5.0, 40.0))
        join, is_leaving = rng.choice(("j1", "j1", "j1", "j0")), rng.random() < 0.03
        heard.take(a_beat(node, echo=echo, join=join, is_leaving=is_leaving), "j1", now)
        at[node] = now
        if join == "j1" and int(echo * 1e9) / 1e9 > seen.get(node, 0.0):
            seen[node] = int(echo * 1e9) / 1e9
            deaf_since.pop(node, None)
        deaf_since.setdefault(node, now)
        if is_leaving:
            del at[node], deaf_since[node]
        live = [one for one in at if now - at[one] < SILENT_S and now - deaf_since.get(one, now) < DEAF_S]
        assert heard.seen_until(now) == min((seen.get(one, 0.0) for one in live), default=now)
        assert heard.not_seen(now - 2.0, now) == sorted(one for one in live if seen.get(one, 0.0) < now - 2.0)
        assert sorted(live) == sorted(one for one in names if heard.is_live(one, now))
