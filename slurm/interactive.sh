#!/usr/bin/env bash
# Trains a recipe in an interactive allocation, in the terminal:
#
#   slurm/interactive.sh --nodes=1 --gpus-per-node=8 --time=1:00:00 -- [options] RECIPE [key=value ...]
#   slurm/interactive.sh [options] RECIPE [key=value ...]
#
# The first form asks salloc for the nodes, with the options before `--`, and gives them back at the end.  The second
# one runs inside an allocation that is there already.  Options are those of slurm/grpo_omni.sh.  Ctrl-C saves and
# ends; nothing is requeued, and the same command goes on.

set -euo pipefail

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
allocation=()
for argument in "$@"; do
    if [[ $argument == -- ]]; then
        while [[ $1 != -- ]]; do
            allocation+=("$1")
            shift
        done
        shift
        break
    fi
done

if [[ " $* " == *" --dry-run "* || (-n ${SLURM_JOB_ID:-} && ${#allocation[@]} == 0) ]]; then
    exec "$here/grpo_omni.sh" --no-requeue "$@"
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    echo "megarl: error: options of salloc (${allocation[*]} --) inside the allocation $SLURM_JOB_ID" >&2
    exit 2
fi
exec salloc --exclusive --mem=0 "${allocation[@]}" "$here/grpo_omni.sh" --no-requeue "$@"
