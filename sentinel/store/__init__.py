"""What outlives the process: the journal (SQLite)."""
