#!/bin/bash
# Epilog of slurm.conf, run by root on each node after a job, however it ended: has the shipper of fleet_prolog.sh drain, and
# deletes the job's directory once the join holds all of it. What it does not hold stays on the node, and is said.
set -u

user=${SLURM_JOB_USER:?expected the variables of a Slurm epilog}
runs=${SENTINEL_HOME:-/var/lib/sentinel/jobs}/$SLURM_JOB_ID
[ -d "$runs/.ship" ] || exit 0

say() { logger -t sentinel-epilog -- "$*" 2> /dev/null || echo "sentinel epilog: $*" >&2; }

as_user=()
[ "$(id -un)" = "$user" ] || as_user=(runuser -u "$user" --)
# As the user, who can write the file that names the process.
if "${as_user[@]}" bash -s "$runs/.ship" "$((${SENTINEL_DRAIN_S:-60} + 10))" << 'DRAIN'; then
pid=$(cat "$1/pid" 2> /dev/null) && kill -TERM "$pid" 2> /dev/null
for ((tenth = 0; tenth < 10 * $2; tenth++)); do
    [ -e "$1/code" ] && exit "$(cat "$1/code")"
    sleep 0.1
done
exit 1
DRAIN
    rm -rf -- "$runs"
else
    say "job $SLURM_JOB_ID: the join does not hold all of $runs on $(hostname -s); sentinel ship $runs sends the rest; see .ship/log"
fi
exit 0
