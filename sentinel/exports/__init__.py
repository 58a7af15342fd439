"""Tables of what a run recorded, for people and other tools; and what other tools recorded, written as a run.

In: step views and the spool. Out: CSV, JSON lines, Parquet, TensorBoard, msProbe, Megatron stats, tensors.
Never: judges, or writes where a run is kept. A file is there whole or not at all.
"""
