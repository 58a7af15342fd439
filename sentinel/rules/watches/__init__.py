"""Rules bound to what they watch: series of tensors, of scalars, of ranks, or rows one by one.

In: a rule, its detector, one closed step after another. Out: the onsets of anomalies, with their evidence.
Never: holds an algorithm of its own about numbers (`detect/`), or knows of incidents.
"""
