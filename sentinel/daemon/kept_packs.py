"""KeptPacks: the rules that the decisions of a run name, in use or kept in its journal."""

from __future__ import annotations

from itertools import islice

from sentinel.decision import decode_pack_hash
from sentinel.errors import StoreError
from sentinel.judge.packs import RulePacks, decode_pack, encode_pack
from sentinel.rules.language.schema import Pack
from sentinel.store.journal import Journal

DECISIONS_PER_TURN = 4000
"""Most decisions whose rules are looked up at once (chosen): about 10 ms, in which no step is judged."""


class KeptPacks:
    """A replay judges with the rules of the day: each pack is kept before a decision names it, and goes with the last."""

    def __init__(self, journal: Journal, packs: RulePacks) -> None:
        """packs: the rules in use; they are read again now and then."""
        self._journal, self._packs = journal, packs
        self._looked_at = 0
        self._named: set[str] = set()

    @property
    def newest(self) -> Pack:
        """The rules in use."""
        return self._packs.pack

    @property
    def newest_hash(self) -> str:
        """The hash that the next decisions name."""
        return self._packs.pack_hash

    @property
    def problem(self) -> str:
        """Why the rules could not be read again; empty: they could."""
        return self._packs.problem

    def keep(self) -> None:
        """Keep the rules in use."""
        self._journal.keep_pack(self._packs.pack_hash, encode_pack(self._packs.pack))

    def named(self, pack_hash: str) -> Pack:
        """Return the rules of this hash. StoreError where the journal does not have them."""
        if pack_hash == self._packs.pack_hash:
            return self._packs.pack
        body = self._journal.pack(pack_hash)
        if body is None:
            raise StoreError(f"{self._journal.path}: the rules {pack_hash} that it names are not in it")
        return decode_pack(body)

    def prune(self) -> bool:
        """Look at some of the decisions; behind the last one, drop the rules that none names. False: that is done."""
        unnamed = self._journal.pack_hashes() - self._named - {self._packs.pack_hash}
        if unnamed:
            seen = list(islice(self._journal.decisions(after=self._looked_at), DECISIONS_PER_TURN))
            self._named |= {decode_pack_hash(body) for _, _, body in seen}
            if len(seen) == DECISIONS_PER_TURN:
                self._looked_at = seen[-1][0]
                return True
            self._journal.drop_packs(unnamed - self._named)
        self._looked_at, self._named = 0, set()
        return False
