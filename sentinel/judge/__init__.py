"""One step through rules, order and incidents: live, again from a journal, or over logs and runs that are there already.

In: closed steps, and the moments that time decides. Out: a judgement each: anomalies, revisions of incidents, proposals.
Never: follows a run (`ingest`), serves it or sends messages (`daemon`, `report`). `judge.py` has no clock, I/O or thread.
"""
