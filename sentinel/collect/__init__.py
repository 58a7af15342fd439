"""In the trainer: what passes through a model is measured, and handed to the thread that writes it. Alone imports torch.

In: a model, its optimizers, what the config wants. Out: frames of rows and events, through `wire`.
`attach.py` begins, `assembly.py` composes, `monitor.py` is what trainers call; `step.py` decides when a step ends, and
`step_runner.py` ends it; `hooks/` and `compiled/` see tensors pass,
`parallel/` knows where they are placed, `schedule/` what is measured now, `kernels/` and `probes/` measure, `rows/` keep it
for the step, `writing/` folds it and makes frames of it in a thread of its own, `retention/` says what is kept when there is
no room for all, `lifecycle/` watches the process, `adapters/` know the trainers.
Never: waits for the device, communicates, raises into training, judges.
"""
