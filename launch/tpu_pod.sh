#!/usr/bin/env bash
# Cloud TPU pod: a trainer on every host of the pod, vLLM servers on GPU machines.
#
#   TPU=my-v4-32 ZONE=us-central2-b SERVERS='gpu-a gpu-b' SERVER_ZONE=us-central1-a REPO=/shared/bapo_jax MODEL=/shared/models/DIR \
#       SERVE_ARGS='--dtype=bfloat16' launch/tpu_pod.sh -- --config=configs/math.py --workdir=/shared/runs/math \
#       --config.learner.micro_batch_rows=16
#
# TPU, ZONE    the pod (`gcloud compute tpus tpu-vm list`)
# SERVERS      Compute Engine instances with GPUs, for one server each, in SERVER_ZONE (ZONE)
# REPO         the repository, on a file system that all these machines see under one path, as they see MODEL and WORKDIR
# MODEL        Hugging Face directory that trainers (model.path) and servers start from
# SERVER_GPUS  the GPUs of an instance over which its server splits the model, as in 0,1,2,3 (all)
# SERVE_ARGS   words for bapo_jax.rollout.serve, after -- for vLLM: '--dtype=bfloat16 -- --enforce-eager'
# PLATFORM (tpu) that trainers must compute on
# PORT (8000) · COORDINATOR_PORT (8476) · SERVER_DEADLINE (900) seconds to start · PYTHON (REPO/.venv/bin/python)
#
# Needs gcloud with project and ssh keys set up here; in REPO `make env JAX=tpu`, and `make vllm-env VLLM=cuda` from a GPU machine; bash
# and curl there; a network where hosts reach each other and the servers. What follows -- goes to bapo_jax.train. Servers write to
# WORKDIR/servers/. Ctrl-C and SIGTERM stop the trainers with a checkpoint. The servers end with this script, however it ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=/dev/null
. launch/checks.sh

: "${TPU:?set it to the name of the TPU}"
: "${ZONE:?set it to the zone of the TPU}"
: "${SERVERS:?set it to the names of the instances for the vLLM servers}"
: "${REPO:?set it to the path of the repository on all machines}"
: "${MODEL:?set it to the Hugging Face directory to start from, a path on all machines}"
server_zone=${SERVER_ZONE:-$ZONE} python=${PYTHON:-$REPO/.venv/bin/python} SERVER_GPUS=${SERVER_GPUS:-all} PLATFORM=${PLATFORM:-tpu}
PORT=${PORT:-8000} COORDINATOR_PORT=${COORDINATOR_PORT:-8476} SERVER_DEADLINE=${SERVER_DEADLINE:-900}
# shellcheck disable=SC2086 # a word for each server
twice=$(printf '%s\n' $SERVERS | sort | uniq -d)
[ -z "$twice" ] || { echo "error: SERVERS names ${twice//$'\n'/ } twice; name each instance only once" >&2 && exit 1; }
[ "$SERVER_GPUS" = all ] || check_gpus SERVER_GPUS "$SERVER_GPUS"
check_port PORT
check_port COORDINATOR_PORT
check_seconds SERVER_DEADLINE
check_word PLATFORM cpu gpu tpu
[ "${1:-}" != -- ] || shift
config='' workdir=''
for arg in "$@"; do case $arg in --workdir=*) workdir=${arg#*=} ;; --config=*) config=${arg#*=} ;; esac done
: "${config:?give --config=FILE after --}" "${workdir:?give --workdir=DIR after --, a path on all machines}"
read -r -a serve_args <<<"${SERVE_ARGS:-}"
: "${BAPO_ROLLOUT_TOKEN:=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}"
on_tpu() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1" </dev/null; }

IFS=';, ' read -r -a hosts <<<"$(gcloud compute tpus tpu-vm describe "$TPU" --zone="$ZONE" --format='value(networkEndpoints[].ipAddress)')"
((${#hosts[@]})) || { echo "error: TPU=$TPU in ZONE=$ZONE has no network endpoints; wait until it is READY, or correct TPU and ZONE" >&2 && exit 1; }
addresses=() urls=() servers=''
for server in $SERVERS; do
  address=$(gcloud compute instances describe "$server" --zone="$server_zone" --format='value(networkInterfaces[0].networkIP)')
  addresses+=("$address") urls+=("http://$address:$PORT") && servers+="'http://$address:$PORT',"
done

started='' trainer='' token_file=$(mktemp) # readable by its owner alone
stop() {
  rm -f "$token_file"
  for pid in $started; do kill -TERM -- "-$pid" 2>/dev/null || true; done
}
# shellcheck disable=SC2016 # for the hosts' shells to expand
interrupted() { [ -n "$trainer" ] || exit 143; on_tpu 'kill -TERM "$(cat "$HOME/.bapo_trainer")"' || true; }
trap stop EXIT
trap interrupted INT TERM HUP USR1 USR2
set -m # each process below leads a group of its own, so that Ctrl-C reaches this script alone

# A server gets the token as its first line of stdin, and is told to end by the end of stdin: also when this machine is gone.
printf -v at '%q' "$REPO" && printf -v logs '%q' "$workdir/servers" && i=0
for server in $SERVERS; do
  printf -v serve '%q ' "$python" -m bapo_jax.rollout.serve --model="$MODEL" --host="${addresses[i]}" --port="$PORT" \
    --gpus="$SERVER_GPUS" \
    ${serve_args[@]+"${serve_args[@]}"}
  remote="IFS= read -r BAPO_ROLLOUT_TOKEN && export BAPO_ROLLOUT_TOKEN && cd $at && mkdir -p $logs || exit 1; exec 3<&0
    $serve </dev/null >$logs/$i.log 2>&1 & server=\$!
    { cat <&3 >/dev/null; kill \$server; } >/dev/null 2>&1 & wait \$server"
  { printf '%s\n' "$BAPO_ROLLOUT_TOKEN" && while kill -0 $$ 2>/dev/null; do sleep 5; done; } |
    gcloud compute ssh "$server" --zone="$server_zone" --command="$remote" &
  started+="$(jobs -p %+) "
  i=$((i + 1))
done

# gcloud gives stdin to no particular one of many hosts, so they get the token as a file, which they read and remove.
printf '%s\n' "$BAPO_ROLLOUT_TOKEN" >"$token_file"
gcloud compute tpus tpu-vm scp "$token_file" "$TPU:.bapo_token" --zone="$ZONE" --worker=all
rm -f "$token_file"
printf -v wait_for_servers '%q ' launch/wait_for_servers.sh "$SERVER_DEADLINE" "${urls[@]}"
printf -v train '%q ' "$python" -m bapo_jax.train "$@" --config.model.path="$MODEL" --config.mesh.platform="$PLATFORM" \
  --config.rollout.engine=vllm --config.rollout.servers="($servers)" --coordinator="${hosts[0]}:$COORDINATOR_PORT" --hosts="${#hosts[@]}"
on_tpu "echo \$\$ >\"\$HOME/.bapo_trainer\" && cd $at &&
  IFS= read -r BAPO_ROLLOUT_TOKEN <\"\$HOME/.bapo_token\" && export BAPO_ROLLOUT_TOKEN && rm -f \"\$HOME/.bapo_token\" &&
  host=\$(curl --silent --fail --noproxy '*' --header Metadata-Flavor:Google \\
    http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number) &&
  { $wait_for_servers & } && waiting=\$! && trap 'kill \$waiting; exit 143' TERM && wait \$waiting && exec $train --host=\"\$host\"" &
trainer=$!
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" || true; done # a signal ends `wait` before the trainers have ended
wait "$trainer"
