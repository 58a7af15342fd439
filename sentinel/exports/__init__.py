"""Tables out of what a run recorded, for people and for other tools; and what other tools recorded, read as a run of ours.

In: step views and the spool. Out: CSV, JSON lines, Parquet, TensorBoard, msProbe, Megatron stats, tensors.
Never: judges, or writes where a run is kept. A file is there whole or not at all.
"""
