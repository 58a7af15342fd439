#!/bin/bash
# Prolog of slurm.conf, run by root on each node before a job, where nodes share no disk: makes the job's directory of runs on a
# disk of the node, and starts a shipper for it as the user. A job that cannot be shipped is not held up: its spools stay.
# SENTINEL_SHIP=--to-workers: for the workers of workers.sbatch, on nodes on which digests are too much.
set -u

user=${SLURM_JOB_USER:?expected the variables of a Slurm prolog}
runs=${SENTINEL_HOME:-/var/lib/sentinel/jobs}/$SLURM_JOB_ID
etc=${SENTINEL_ETC:-/etc/sentinel}

say() { logger -t sentinel-prolog -- "$*" 2> /dev/null || echo "sentinel prolog: $*" >&2; }

as_user=()
[ "$(id -un)" = "$user" ] || as_user=(runuser -u "$user" --)
# Root makes the directory alone: what lies in that of a job that is requeued is its user's, symbolic links too.
# shellcheck disable=SC2016  # the inner shell expands it
if ! mkdir -p "$(dirname "$runs")" || ! install -d -m 0700 -o "$user" "$runs" ||
    ! "${as_user[@]}" bash -c 'umask 077; mkdir -p "$1/.ship"; rm -f "$1/.ship/code"; cat > "$1/.ship/login"' login "$runs" \
        < "$etc/login"; then
    say "job $SLURM_JOB_ID is not shipped: $runs cannot be made, or $etc/login is missing"
    exit 0
fi
# Of a session of its own: Slurm ends what a prolog leaves behind in its process group. Its exit code says whether all is held.
# shellcheck disable=SC2016  # the inner shell expands it
"${as_user[@]}" setsid bash -c '
    sentinel ship "$1" --server "$2" --tls-ca "$3" --login "$1/.ship/login" --node "$4" --drain-s "$5" $6 \
        > "$1/.ship/log" 2>&1 &
    echo $! > "$1/.ship/pid"
    wait $!
    echo $? > "$1/.ship/code"
' ship "$runs" "${SENTINEL_BROKER:-tls://broker:4222}" "$etc/ca.pem" "${SLURMD_NODENAME:-$(hostname -s)}" "${SENTINEL_DRAIN_S:-60}" \
    "${SENTINEL_SHIP:-}" < /dev/null > /dev/null 2>&1 &
exit 0
