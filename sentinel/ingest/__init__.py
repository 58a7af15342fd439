"""From frames of many ranks to closed steps: follow, assemble, merge, compare replicas, detect silence.

In: spools and the table of processes. Out: decisions that a step is closed, and the step as a `StepView`.
Never: knows of rules. What depends on time is a decision, which is kept and repeated by a replay.
"""
