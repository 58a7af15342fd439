"""Post-mortems: what happened in a run or in one of its incidents, in one file that is read without Sentinel.

In: a run's directory, as it lies on disk, and what the command line knows of how the run stands. Out: a document of parts,
as HTML, Markdown or PDF.
Never: judges, asks a daemon, writes into the run, or says what the run did not record.
"""
