"""From the training thread to the thread that writes: whole steps are queued, folded there, and become frames of the spool.

In: one `StepBatch` at a time, and small records beside them. Out: frames, through `wire`; commands the other way.
Never: makes the training thread wait, lets an end of a step vanish, or imports torch.
"""
