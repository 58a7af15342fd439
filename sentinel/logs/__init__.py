"""Other people's logs and metrics, read as closed steps of one rank that measures no tensor.

In: CSV, JSON lines, Hugging Face's trainer_state.json, TensorBoard events, offline runs of Weights &
Biases, Neptune's Parquet, lines that trainers print. Out: step views.
Never: guesses what a number means: what it is called says so, or the user.
"""
