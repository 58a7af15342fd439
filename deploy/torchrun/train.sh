#!/bin/bash
# torchrun on one node or several, with a daemon beside it on the first. Called alike on every node:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 deploy/torchrun/train.sh train.py --lr 3e-4
# SENTINEL_DIR is on a disk that all nodes see; with one node any disk will do.
set -euo pipefail

nodes=${NNODES:-1}
node=${NODE_RANK:-0}
export SENTINEL_DIR=${SENTINEL_DIR:-$PWD/sentinel_runs}
if [ "$nodes" -gt 1 ] && [ -z "${SENTINEL_RUN:-}" ]; then
    echo "SENTINEL_RUN: expected one name of the run, the same on all $nodes nodes, got none" >&2
    exit 2
fi
export SENTINEL_RUN=${SENTINEL_RUN:-train-$(date +%Y%m%d-%H%M%S)}

launch=(torchrun --nnodes "$nodes" --node-rank "$node" --nproc-per-node "${NPROC_PER_NODE:-gpu}"
    --rdzv-id "$SENTINEL_RUN" --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29500}")
if [ "$node" -gt 0 ]; then
    exec "${launch[@]}" "$@"
fi
config=()
[ ! -f sentinel.yml ] || config=(--config sentinel.yml)
exec sentinel run --dir "$SENTINEL_DIR" --name "$SENTINEL_RUN" --report "$SENTINEL_DIR/$SENTINEL_RUN.json" "${config[@]}" \
    -- "${launch[@]}" "$@"
