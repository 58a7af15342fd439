"""Report: what was judged, told to files, gauges and people."""
