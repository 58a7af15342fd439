#!/bin/bash
# TaskProlog of slurm.conf: what it prints as `export NAME=VALUE` is in the environment of every task. With it a job is recorded
# without a line in its script, where the trainer calls sentinel.attach. A job that says SENTINEL_DIR itself keeps its own.
[ -n "${SENTINEL_DIR:-}" ] || echo "export SENTINEL_DIR=${SENTINEL_HOME:-$HOME/sentinel}/$SLURM_JOB_ID"
[ -n "${SENTINEL_RUN:-}" ] || echo "export SENTINEL_RUN=${SLURM_JOB_NAME:-job}-$SLURM_JOB_ID"
