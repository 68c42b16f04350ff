#!/usr/bin/env bash
# Train on this host's GPUs: bash train.sh --section.option value …   (bash train.sh -h explains every option)
#
# NGPU: how many ranks to start here; all visible GPUs by default, one rank where there is none.
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: for several hosts, the same command on each.
set -euo pipefail

if [[ -z "${NGPU:-}" ]]; then
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        NGPU=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
    else
        NGPU=$({ nvidia-smi --list-gpus 2> /dev/null || true; } | grep -c '^GPU' || true)
    fi
fi
export NGPU=$((NGPU > 0 ? NGPU : 1))

exec flame-train "$@" # so that signals reach the launcher, and its exit code is ours
