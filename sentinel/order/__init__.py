"""What came first: causal order, first causes, incidents, the k earliest anomalies, and the story in words."""
