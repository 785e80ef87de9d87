#!/bin/bash
#SBATCH --job-name=ray-yolo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#
# One training on a SLURM allocation; all arguments are flags of ray_yolo.train:
#
#   sbatch cluster/slurm.sh --data coco.yaml --model yolov5s --epochs 300
#
# It uses whole nodes, with their GPUs if they have any. Flags of sbatch come before the script:
#
#   sbatch --nodes=4 --partition=gpu cluster/slurm.sh --data coco.yaml
#
# Shortly before its time limit, the job requeues itself; it then continues from its newest checkpoint.
# --exclusive is required: `ray symmetric-run` ends with `ray stop`, which stops every Ray process of the
# node. The submitting environment (an activated venv) and $HOME must exist on every node.
set -euo pipefail

gpus=${SLURM_GPUS_ON_NODE:-0}
workers_per_node=$(( gpus > 0 ? gpus : 1 ))
head_ip=$(hostname -I | cut -d' ' -f1)  # this script runs on the first node; its name often resolves to 127.0.1.1
port=$(( 20000 + SLURM_JOB_ID % 10000 ))  # above the ports of Ray's workers (10002-19999)

private=$(mktemp -d "$HOME/.ray_yolo-$SLURM_JOB_ID.XXXXXX")  # mode 0700
trap 'rm -rf "$private"' EXIT
(umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$private/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$private/token" RAY_USAGE_STATS_ENABLED=0

train=(
    python -m ray_yolo.train
    --num-workers "$(( SLURM_JOB_NUM_NODES * workers_per_node ))"
    --cpus-per-worker "$(( SLURM_CPUS_ON_NODE / workers_per_node ))"
    --storage-path "$SLURM_SUBMIT_DIR"
    --name "slurm-$SLURM_JOB_ID"  # stays the same when the job is requeued
    "$@"                          # so these flags can override the ones above
)
# Before Ray starts on any node, end the processes that an interrupted start has left on all nodes. If SLURM tracks
# processes without cgroups, Ray's daemons survive, and a node that finds the old head with the new token gives up.
srun --export=ALL --ntasks-per-node=1 bash -c 'ray stop --force; rm -rf /tmp/ray_yolo-slurm.*' > /dev/null 2>&1 || true
# Since SLURM 22.05, srun inherits no --cpus-per-task and would give the task one core.
# On each node, Ray's folder has a random name and mode 0700: in /tmp/ray, every user may write.
srun --export=ALL --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c '
    RAY_TMPDIR=$(mktemp -d /tmp/ray_yolo-slurm.XXXXXX)
    export RAY_TMPDIR
    trap "rm -rf \"$RAY_TMPDIR\"" EXIT
    "$@"' node \
    ray symmetric-run --address "$head_ip:$port" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="$gpus" -- \
    bash -c 'echo $$ > "$1"; shift; exec "$@"' driver "$private/driver.pid" "${train[@]}" &
step=$!  # in the background, since bash runs a trap only between commands or in `wait`

# Only the driver gets SIGTERM, and has 90 s to save and exit. `scontrol requeue` alone would also signal Ray's
# processes, which the driver still needs.
stop_and_requeue() {
    echo "slurm.sh: the time limit is near; stopping and requeueing job $SLURM_JOB_ID"
    local driver
    driver=$(cat "$private/driver.pid" || true)
    kill -TERM "$driver" || true
    for _ in {1..90}; do kill -0 "$driver" 2>/dev/null || break; sleep 1; done
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
}
trap stop_and_requeue USR1

status=0  # of the first node's task: the others end with 0, a minute after the head is gone
wait "$step" || status=$?
if [[ ! -s $private/driver.pid ]]; then  # symmetric-run exits 0 when Ray could not be started
    echo "slurm.sh: the training did not start; see the lines above" >&2
    exit 1
fi
exit "$status"
