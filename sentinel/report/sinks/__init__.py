"""Sinks: where alerts go. One module each; `table.py` names them all."""
