"""From a rank to the daemon: frames, the spool on disk, the control folder, the pulse. Bytes only.

In: the payloads of one rank, in order. Out: files that any number of readers follow, whole up to the last frame.
Never: folds rows, reads a value of one, or decides what is left out.
"""
