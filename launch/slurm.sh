#!/usr/bin/env bash
#SBATCH --job-name=bapo
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@600
# Slurm: trainer hosts on the first nodes, vLLM servers on the last.
#
#   MODEL=/shared/DIR SERVER_NODES=2 SERVER_GPUS='0 1 2 3 4 5 6 7' SERVE_ARGS='--dtype=bfloat16' \
#       sbatch --nodes=6 --exclusive --gpus-per-node=8 launch/slurm.sh -- --config=configs/math.py --workdir=/shared/runs/math \
#       --config.learner.micro_batch_rows=32
#
# MODEL         Hugging Face directory that trainers (model.path) and servers start from
# SERVER_NODES  how many nodes, the last ones, are for servers (1)
# SERVER_GPUS   a server on each of them for each word, its model split over the GPUs that the word lists: '0,1,2,3 4,5,6,7'; unset: one
#               server, split over all GPUs of its node (on nodes without GPUs: 0)
# SERVE_ARGS    words for bapo_jax.rollout.serve, after -- for vLLM: '--dtype=bfloat16 -- --enforce-eager'
# REQUEUE       0: a run that a signal stopped stays stopped; else the job is queued again (exit status 75, docs/reference/operations.md)
# PLATFORM (gpu) that trainers must compute on; cpu for a try without GPUs
# PORT (8000) of a node's first server · COORDINATOR_PORT (8476) · SERVER_DEADLINE (900) seconds to start · PYTHON (.venv/bin/python)
#
# Submit from the repository, on a file system that all nodes see, as they see MODEL and WORKDIR. Needs `make env vllm-env`, and curl
# on the first node. What follows -- goes to bapo_jax.train. Servers write to WORKDIR/servers/. 600 seconds before the time limit, or
# by `scancel --batch --signal=TERM JOB`, the trainers stop with a checkpoint; the job is queued again and continues.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

: "${SLURM_JOB_NODELIST:?Slurm sets it in a job; submit this script with sbatch, or run it under salloc}"
: "${MODEL:?set it to the Hugging Face directory to start from, seen by all nodes}"
export MODEL PYTHON=${PYTHON:-.venv/bin/python} PORT=${PORT:-8000} SERVER_GPUS=${SERVER_GPUS:-all}
SERVER_NODES=${SERVER_NODES:-1} COORDINATOR_PORT=${COORDINATOR_PORT:-8476} SERVER_DEADLINE=${SERVER_DEADLINE:-900} PLATFORM=${PLATFORM:-gpu}
[ -f bapo_jax/train.py ] || { echo "error: $PWD is not the repository; submit this script from the repository" >&2 && exit 1; }
# shellcheck source=/dev/null
. launch/checks.sh
[ -x "$PYTHON" ] || { echo "error: PYTHON=$PYTHON is not executable; run make env, or set PYTHON" >&2 && exit 1; }
[ -f "$MODEL/config.json" ] || { echo "error: MODEL=$MODEL has no config.json; give a Hugging Face directory" >&2 && exit 1; }
# shellcheck disable=SC2086 # a word for each server
[ "$SERVER_GPUS" = all ] || check_gpus SERVER_GPUS $SERVER_GPUS
check_whole SERVER_NODES 1 999999999
check_port PORT "$(wc -w <<<"$SERVER_GPUS")"
check_port COORDINATOR_PORT
check_seconds SERVER_DEADLINE
check_word PLATFORM cpu gpu tpu
[ "${1:-}" != -- ] || shift
config='' workdir=''
for arg in "$@"; do case $arg in --workdir=*) workdir=${arg#*=} ;; --config=*) config=${arg#*=} ;; esac done
: "${config:?give --config=FILE after --}" "${workdir:?give --workdir=DIR after --, seen by all nodes}"
check_config "$config"
read -r -d '' -a nodes <<<"$(scontrol show hostnames "$SLURM_JOB_NODELIST")" || true
hosts=$((${#nodes[@]} - SERVER_NODES))
((SERVER_NODES > 0 && hosts > 0)) || {
  echo "error: ${#nodes[@]} nodes with SERVER_NODES=$SERVER_NODES leave no node for a trainer or for a server; request more, or set SERVER_NODES" >&2
  exit 1
}
read -r -a per_node <<<"$SERVER_GPUS"
read -r -a serve_args <<<"${SERVE_ARGS:-}"
: "${BAPO_ROLLOUT_TOKEN:=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
export BAPO_ROLLOUT_TOKEN # srun hands the environment on; command lines can be read by others

started='' trainer=''
# shellcheck disable=SC2329 # the trap calls it
stop() { # srun hands the signal on, and ends when its tasks have; what is left then ends with the job
  for pid in $started; do kill -TERM "$pid" 2>/dev/null || true; done
  for _ in {1..100}; do
    alive=''
    for pid in $started; do ! kill -0 "$pid" 2>/dev/null || alive+="$pid "; done
    [ -n "$alive" ] || return 0
    sleep 0.2
  done
  for pid in $alive; do kill -KILL "$pid" 2>/dev/null || true; done
}
# shellcheck disable=SC2329 # the trap calls it
interrupted() { [ -n "$trainer" ] || exit 143; kill -TERM "$trainer" 2>/dev/null || true; }
trap stop EXIT
trap interrupted INT TERM HUP USR1 USR2
comma_list() { local IFS=,; echo "$*"; }
set -m # under salloc, Ctrl-C reaches this script alone

mkdir -p "$workdir/servers"
urls=() servers=''
for node in "${nodes[@]:hosts}"; do
  for i in "${!per_node[@]}"; do urls+=("http://$node:$((PORT + i))") && servers+="'http://$node:$((PORT + i))',"; done
done
# shellcheck disable=SC2016 # for the task's shell to expand
serve='read -r -a gpus <<<"$SERVER_GPUS"
  exec "$PYTHON" -m bapo_jax.rollout.serve --model="$MODEL" --host="$SLURMD_NODENAME" --port=$((PORT + SLURM_LOCALID)) \
    --gpus="${gpus[SLURM_LOCALID]}" "$@"'
srun --export=ALL --cpu-bind=none --nodes="$SERVER_NODES" --ntasks="${#urls[@]}" --ntasks-per-node="${#per_node[@]}" \
  --nodelist="$(comma_list "${nodes[@]:hosts}")" --kill-on-bad-exit=0 --output="$workdir/servers/%t.log" \
  bash -c "$serve" serve ${serve_args[@]+"${serve_args[@]}"} </dev/null &
started+="$! "
WATCH=$started launch/wait_for_servers.sh "$SERVER_DEADLINE" "${urls[@]}" &
started+="$! "
wait $! || exit 1

# JAX would take SLURM_LOCALID for the one GPU of a process; a host's trainer has all of them.
# shellcheck disable=SC2016 # for the task's shell to expand
train='unset SLURM_LOCALID && exec "$PYTHON" -m bapo_jax.train "$@" --host="$SLURM_PROCID"'
srun --export=ALL --cpu-bind=none --nodes="$hosts" --ntasks="$hosts" --ntasks-per-node=1 --distribution=block \
  --nodelist="$(comma_list "${nodes[@]:0:hosts}")" --kill-on-bad-exit=1 \
  bash -c "$train" train "$@" --config.model.path="$MODEL" --config.mesh.platform="$PLATFORM" --config.rollout.engine=vllm \
  --config.rollout.servers="($servers)" \
  --coordinator="${nodes[0]}:$COORDINATOR_PORT" --hosts="$hosts" </dev/null &
trainer=$!
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" || true; done # a signal ends `wait` before the trainers have ended
status=0
wait "$trainer" || status=$?
[ "$status" != 75 ] || [ "${REQUEUE:-1}" = 0 ] || scontrol requeue "$SLURM_JOB_ID" # stopped before its end: the same command continues
exit "$status"
