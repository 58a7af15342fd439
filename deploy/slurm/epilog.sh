#!/bin/bash
# Epilog of slurm.conf, run by root on each node after a job, however it ended: leaves a report beside the job's runs.
set -u

user=${SLURM_JOB_USER:?expected the variables of a Slurm epilog}
home=$(getent passwd "$user" | cut -d: -f6)
runs=${SENTINEL_HOME:-$home/sentinel}/$SLURM_JOB_ID
[ -d "$runs" ] || exit 0

# One node is enough, and nothing of the user's is touched as root.
[ "${SLURMD_NODENAME:-$(hostname -s)}" = "$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2> /dev/null | head -n 1)" ] || exit 0
as_user=()
[ "$(id -un)" = "$user" ] || as_user=(runuser -u "$user" --)
"${as_user[@]}" bash -s "$runs" "$SLURM_JOB_ID" "${SLURM_JOB_EXIT_CODE:-unknown}" << 'REPORT'
umask 077
exec > "$1/report.txt" 2>&1
echo "job $2, exit code $3"
timeout 60 sentinel status "$1"
for run in "$1"/*/; do
    [ -d "$run/spool" ] || continue
    timeout 60 sentinel explain worst --dir "$run"
done
REPORT
exit 0
