#!/usr/bin/env bash
# Trains a recipe in a Slurm job that saves before its time is up, requeues itself and goes on, until the run has ended:
#
#   sbatch --nodes=2 --gpus-per-node=8 slurm/grpo_omni.sh [options] RECIPE [key=value ...]
#
# It is started from the root of megarl, with sbatch's own options before the script's name; they override the lines
# below.  GPUs are asked for there: a line for them here would keep the job off CPU nodes.
#
# options
#   --dry-run            print what would be run, and run nothing; needs no job
#   --ranks-per-node=N   processes on each node; default: one a GPU, or one on a node without GPUs
#   --python=PATH        default: .venv/bin/python, or python3 where that is not there or in a container
#   --container=IMAGE    run in this image (needs NVIDIA's pyxis); the current folder is mounted at its own path
#   --mounts=SRC:DST,..  more folders for the container; run_dir must have the same path inside and outside
#   --no-requeue         when the job is told to stop: save and end, with exit code 75
#
# docs/slurm.md says more.

#SBATCH --job-name=megarl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

# First of all, since USR1 ends a shell that does not expect it.  srun passes it on to the ranks.
stopping=0 step=''
trap 'stopping=1; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true' USR1 INT TERM

STOPPED=75 # EX_TEMPFAIL: the same command goes on

say() {
    echo "megarl: $(date +%FT%T) job ${SLURM_JOB_ID:-none}, restart ${SLURM_RESTART_COUNT:-0}: $1"
}

refuse() {
    echo "megarl: error: $1" >&2
    exit 2
}

# On the head node: what the ranks need to know about it

free_port() {
    # A port below those that the kernel gives out by itself; jobs that share a node begin at different ones.
    local number port
    for ((number = 0; number < 10000; number++)); do
        port=$((20000 + (SLURM_JOB_ID + number) % 10000))
        if ! grep -q ":$(printf %04X "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null; then
            echo "$port"
            return
        fi
    done
    refuse "no free port from 20000 to 29999 on $(hostname)"
}

ranks_here() {
    local gpus=${SLURM_GPUS_ON_NODE:-}
    if [[ -z $gpus ]]; then
        gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
    fi
    if ((gpus == 0)) && [[ -n $(ls /proc/driver/nvidia/gpus 2>/dev/null) ]]; then
        refuse "$(hostname) has GPUs and the job has none: sbatch --gpus-per-node=N, or --ranks-per-node=N to use CPUs"
    fi
    echo $((gpus ? gpus : 1))
}

# look NODES RANKS_PER_NODE PYTHON RECIPE [key=value ...]: a line with port and ranks a node, then megarl.check's report
look() {
    local nodes=$1 ranks=$2 python=$3 port
    shift 3
    ranks=${ranks:-$(ranks_here)}
    port=$(free_port)
    echo "$port $ranks"
    "$python" -m megarl.check --world-size "$((nodes * ranks))" "$@"
}

# The end of an attempt

job_state() {
    squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T
}

time_is_up() {
    [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L) =~ ^0:[01][0-9]$ ]] # less than 20 seconds are left
}

# The run is not over: requeues the job, but not for a third time from one checkpoint
go_on() {
    local saved now
    saved=$(cat "$run_dir/checkpoints/latest" 2>/dev/null || echo "its beginning")
    if [[ -z $requeue ]]; then
        say "the run stopped at $saved: the same command goes on"
        exit "$STOPPED"
    fi
    now=$(job_state)
    if [[ $now != RUNNING ]]; then
        say "the run stopped at $saved; Slurm ends the job ($now)"
        exit "$STOPPED"
    fi
    say "stopped at $saved" >>"$run_dir/slurm.log"
    if (($(tail -n 3 "$run_dir/slurm.log" | grep -c " job $SLURM_JOB_ID,.*: stopped at $saved\$") == 3)); then
        say "three times in a row the run has stopped at $saved: not requeued; does a step fit into --time?"
        exit 1
    fi
    if ! scontrol requeue "$SLURM_JOB_ID"; then
        say "the run stopped at $saved and the job may not be requeued: the same command goes on"
        exit "$STOPPED"
    fi
    say "the run stopped at $saved: requeued"
    exit 0
}

# Options

dry_run='' requeue=yes ranks='' python='' image='' mounts=''
while (($#)); do
    case $1 in
        --dry-run) dry_run=yes ;;
        --no-requeue) requeue='' ;;
        --ranks-per-node=*) ranks=${1#*=} ;;
        --python=*) python=${1#*=} ;;
        --container=*) image=${1#*=} ;;
        --mounts=*) mounts=${1#*=} ;;
        -*) refuse "unknown option $1: should be --dry-run, --ranks-per-node=N, --python=PATH, --container=IMAGE, --mounts=SRC:DST or --no-requeue, before RECIPE" ;;
        *) break ;;
    esac
    shift
done
if (($# == 0)) || [[ $1 == *=* ]]; then
    refuse "usage: sbatch [options of sbatch] slurm/grpo_omni.sh [options] RECIPE [key=value ...]"
fi
if [[ -n $ranks && ! $ranks =~ ^[1-9][0-9]*$ ]]; then
    refuse "--ranks-per-node=$ranks: should be a positive number"
fi
if [[ -n $mounts && -z $image ]]; then
    refuse "--mounts is for --container=IMAGE"
fi
if [[ -z ${SLURM_JOB_ID:-} && -z $dry_run ]]; then
    refuse "no Slurm job here: sbatch slurm/grpo_omni.sh, slurm/interactive.sh, or --dry-run"
fi
container=()
if [[ -n $image ]]; then
    container=(--container-image="$image" --container-mounts="$PWD:$PWD${mounts:+,$mounts}" --container-workdir="$PWD")
fi
if [[ -z $python ]]; then
    python=python3
    if [[ -z $image && -x .venv/bin/python ]]; then
        python=.venv/bin/python
    fi
fi

# The two steps of the job

nodes=NODES head=HEAD
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    nodes=$SLURM_JOB_NUM_NODES
    read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
fi
on_each_node=(
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 "${container[@]}"
)
# On all nodes, for srun refuses one of them where the job's GPUs were asked for as a sum (--gpus).
look_step=(
    "${on_each_node[@]}"
    bash -c "set -euo pipefail; $(declare -f refuse free_port ranks_here look); ((SLURM_NODEID)) || look \"\$@\""
    look "$nodes" "$ranks" "$python" "$@"
)

# USR1 comes to every process of the step, TERM too when a higher job takes the nodes.  They are for the ranks, which
# save and end; torchrun would give them 30 seconds and end with an error, so it ignores both.  A rank hears TERM from
# its first moment on; USR1 is ignored until the rank listens: before that there is nothing to save.
# shellcheck disable=SC2016 # expanded on each node
on_node='trap "" USR1 TERM; export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; exec "$0" -m torch.distributed.run --local-addr="$SLURMD_NODENAME" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" "$@"'

# train_step PORT RANKS_PER_NODE RECIPE [key=value ...]: fills the array `train`
train_step() {
    local port=$1 ranks=$2
    shift 2
    train=(
        "${on_each_node[@]}" bash -c "$on_node" "$python"
        --nnodes="$nodes" --nproc-per-node="$ranks" --rdzv-backend=c10d --rdzv-endpoint="$head:$port"
        --rdzv-id="${SLURM_JOB_ID:-JOB}.${SLURM_RESTART_COUNT:-0}" --signals-to-handle=SIGINT
        --no-python env --default-signal=TERM "$python" -u -m megarl.train "$@"
    )
}

if [[ -n $dry_run ]]; then
    train_step PORT "${ranks:-RANKS}" "$@"
    show() {
        local word
        for word in "$@"; do
            [[ $word =~ ^[[:alnum:]_./:=,%@*+-]+$ ]] || word=${word@Q}
            printf '%s ' "$word"
        done
        echo
    }
    echo "# sbatch's options, where its command line says nothing else"
    grep '^#SBATCH' "${BASH_SOURCE[0]}"
    echo "# on the head node: a free PORT, the RANKS of a node, and"
    show "$python" -m megarl.check --world-size "$nodes*${ranks:-RANKS}" "$@"
    echo "# on every node, started from the first one"
    show "${train[@]}"
    exit 0
fi

found=$("${look_step[@]}" </dev/null)
read -r port ranks <<<"$found"
say "$nodes node(s), $ranks rank(s) on each; rendezvous at $head:$port"
echo "${found#*$'\n'}"
run_dir=$(sed -n 's/^run folder *//p' <<<"$found")
mkdir -p "$run_dir"
rm -f "$run_dir/continue"
if ((stopping)); then
    go_on
fi

train_step "$port" "$ranks" "$@"
"${train[@]}" </dev/null &
step=$!
while kill -0 "$step" 2>/dev/null; do
    if ((stopping)) && [[ -n $requeue ]] && time_is_up; then
        say "the ranks were not done in time: what they did since the last checkpoint is lost"
        go_on
    fi
    sleep $((stopping ? 5 : 1)) || true # Ctrl-C and scancel end it too
done
code=0
wait "$step" || code=$?

if ((code)); then
    say "the ranks ended with code $code ($(job_state)): not requeued"
    exit "$code"
fi
ls "$run_dir" >/dev/null # over NFS: rank 0 may be on another node, and that there was no such file is remembered
if [[ -e $run_dir/continue ]]; then
    go_on
fi
say "the run has ended"
