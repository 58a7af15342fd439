#!/bin/bash
# Prolog of slurm.conf, run by root on each node before a job: refuses a node on which Sentinel would be blind or in the way.
# A node whose prolog fails is drained, and the job goes elsewhere.
set -u

# Spools are written to the shared disk of the user; a node that has lost it would hold every rank up.
timeout 10 stat -f "${SENTINEL_SHARED:-/home}" > /dev/null || {
    echo "sentinel prolog: ${SENTINEL_SHARED:-/home} does not answer on $(hostname)" >&2
    exit 1
}
# What a killed job left: state directories of daemons that nobody runs any more.
find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'sentinel-*' -type d -mtime +7 -exec rm -rf {} + 2> /dev/null
exit 0
