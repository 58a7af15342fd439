"""From a rank to the daemon: frames, the spool on disk, and the hand-over to the thread that writes it. Bytes only."""
