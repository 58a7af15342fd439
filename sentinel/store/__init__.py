"""What outlives the process: the journal (SQLite), its lock, and where a run keeps what.

In: decisions, judgements, alerts, commands. Out: the same, after kill -9 and full disks.
Never: interprets what it keeps.
"""
