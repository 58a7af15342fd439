"""The daemon: judges runs as they are written, and serves what it found. Needs no torch."""
