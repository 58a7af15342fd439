"""What is said of ranks that are all gone at once, and nobody was there to see."""

from __future__ import annotations

from sentinel.ingest.decision import RankFacts
from sentinel.rules.wording import ended
from sentinel.run_end import ALL_TOGETHER, SIGNAL, RankEnd, RunEnd


def test_ranks_gone_at_once_are_no_proof_that_somebody_ended_all() -> None:
    gone = RankEnd(how=SIGNAL, detail="without a word")
    ranks = [RankFacts(rank=rank, life=bytes([rank]), heard_at=0.0, moved_at=0.0, end=gone) for rank in range(2)]
    told = ended(None, RunEnd(how=SIGNAL, step=11, detail=f"{ALL_TOGETHER}, 2 ranks within 0.036 s of one another"), ranks)

    assert told.startswith("ranks 0, 1, in step 11, are gone without a word, all together, 2 ranks within 0.036 s")
    assert "either somebody ended all at once (SIGTERM or SIGKILL" in told
    assert "or one was killed and its launcher ended the others at once" in told
