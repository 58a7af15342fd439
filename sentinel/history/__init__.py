"""What was measured and found in a run, as Parquet in `<run>/history/`, and how it is asked.

In: judged steps (`MergedStep`) with their scalars, in the order of their decisions; anomalies.
Out: files of a fixed schema that a manifest publishes; SQL over them, and answers for notebooks, read only.
Never: judge, decide what is kept of the spool, or make the thread that judges wait for a disk.
"""
