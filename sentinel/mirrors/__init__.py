"""What is measured and found, shown where a team looks already: TensorBoard, Weights & Biases, MLflow, OpenTelemetry.

In: judged steps (`MergedStep`), and anomalies and incidents out of the journal, each run's by itself.
Out: batches that a `Mirror` writes, from a thread of its own; what was left out, counted.
Never: judges, runs in a trainer, or makes the thread that judges wait for a network, a disk or a library.
"""
