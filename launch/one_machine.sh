#!/usr/bin/env bash
# One machine: vLLM servers on some of its GPUs, one trainer on the others.
#
#   MODEL=models/DIR SERVER_GPUS='4 5 6,7' TRAINER_GPUS=0,1,2,3 SERVE_ARGS='--dtype=bfloat16' \
#       launch/one_machine.sh -- --config=configs/math.py --workdir=runs/math
#
# MODEL         Hugging Face directory that trainer (model.path) and servers start from
# SERVER_GPUS   a server for each word, its model split over the GPUs that the word lists (on a CPU '0 1' is two servers)
# TRAINER_GPUS  the trainer's GPUs
# SERVE_ARGS    words for bapo_jax.rollout.serve, after -- for vLLM: '--dtype=bfloat16 -- --enforce-eager'
# PLATFORM (gpu) that the trainer must compute on; cpu for a try without GPUs
# PORT (8000) of the first server · SERVER_DEADLINE (900) seconds to start · PYTHON (.venv/bin/python)
#
# Needs `make env vllm-env`, curl. What follows -- goes to bapo_jax.train; paths count from the repository. Servers write to
# WORKDIR/servers/. Ctrl-C and SIGTERM stop the trainer with a checkpoint; the servers end after it, always. The exit status
# is the trainer's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=/dev/null
. launch/checks.sh

: "${MODEL:?set it to the Hugging Face directory to start from}"
: "${SERVER_GPUS:?set it to the GPUs of each server, as in SERVER_GPUS='4 5 6,7'}"
: "${TRAINER_GPUS:?set it to the GPUs of the trainer, as in TRAINER_GPUS=0,1,2,3}"
python=${PYTHON:-.venv/bin/python} PORT=${PORT:-8000} SERVER_DEADLINE=${SERVER_DEADLINE:-900} PLATFORM=${PLATFORM:-gpu}
[ -x "$python" ] || { echo "error: PYTHON=$python is not executable; run make env, or set PYTHON" >&2 && exit 1; }
[ -f "$MODEL/config.json" ] || { echo "error: MODEL=$MODEL has no config.json; give a Hugging Face directory" >&2 && exit 1; }
# shellcheck disable=SC2086 # a word for each server
check_gpus SERVER_GPUS $SERVER_GPUS
check_gpus TRAINER_GPUS "$TRAINER_GPUS"
check_port PORT "$(wc -w <<<"$SERVER_GPUS")"
check_seconds SERVER_DEADLINE
check_word PLATFORM cpu gpu tpu
[ "${1:-}" != -- ] || shift
config='' workdir=''
for arg in "$@"; do case $arg in --workdir=*) workdir=${arg#*=} ;; --config=*) config=${arg#*=} ;; esac done
: "${config:?give --config=FILE after --}" "${workdir:?give --workdir=DIR after --}"
check_config "$config"
read -r -a serve_args <<<"${SERVE_ARGS:-}"
: "${BAPO_ROLLOUT_TOKEN:=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
export BAPO_ROLLOUT_TOKEN

started='' trainer=''
stop() {
  for pid in $started; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for _ in {1..100}; do
    alive=''
    for pid in $started; do ! kill -0 -- "-$pid" 2>/dev/null || alive+="$pid "; done
    [ -n "$alive" ] || return 0
    sleep 0.2
  done
  for pid in $alive; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
interrupted() { [ -n "$trainer" ] || exit 143; kill -TERM "$trainer" 2>/dev/null || true; }
trap stop EXIT
trap interrupted INT TERM HUP USR1 USR2
set -m # each process below leads a group of its own, so that Ctrl-C reaches this script alone

mkdir -p "$workdir/servers"
urls=() servers='' port=$PORT
for gpus in $SERVER_GPUS; do
  "$python" -m bapo_jax.rollout.serve --model="$MODEL" --host=127.0.0.1 --port="$port" --gpus="$gpus" \
    ${serve_args[@]+"${serve_args[@]}"} >"$workdir/servers/$port.log" 2>&1 </dev/null &
  started+="$! "
  urls+=("http://127.0.0.1:$port")
  servers+="'http://127.0.0.1:$port',"
  port=$((port + 1))
done
echo "starting ${#urls[@]} vLLM servers; their logs are in $workdir/servers/"
WATCH=$started launch/wait_for_servers.sh "$SERVER_DEADLINE" "${urls[@]}" &
started+="$! "
wait $! || exit 1

CUDA_VISIBLE_DEVICES=$TRAINER_GPUS "$python" -m bapo_jax.train "$@" --config.model.path="$MODEL" \
  --config.mesh.platform="$PLATFORM" \
  --config.rollout.engine=vllm --config.rollout.servers="($servers)" </dev/null &
trainer=$!
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" || true; done # a signal ends `wait` before the trainer has ended
wait "$trainer"
