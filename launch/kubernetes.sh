#!/usr/bin/env bash
# Kubernetes: a JobSet of trainer hosts and vLLM servers, from launch/jobset.yaml.
#
#   NAME=math IMAGE=registry/bapo:1 CLAIM=shared MODEL=/shared/models/DIR TRAINERS=4 SERVERS=2 SERVE_ARGS='--dtype=bfloat16' \
#       launch/kubernetes.sh -- --config=configs/math.py --workdir=/shared/runs/math --config.learner.micro_batch_rows=32
#
# NAME      of the JobSet, and NAME-token of the secret with the servers' token, made unless there
# IMAGE     that of launch/Dockerfile.cluster, or another with the repository in REPO (/bapo_jax), both environments, bash and curl
# CLAIM     a persistent volume claim (ReadWriteMany), mounted at MOUNT (/shared); MOUNT/cache keeps what pods compile and download
# MODEL     Hugging Face directory that trainers (model.path) and servers start from: a path in the pods
# TRAINERS, SERVERS  pods of each (1), with GPUS_PER_TRAINER (8) and GPUS_PER_SERVER (1), over which a server splits its model
# SERVE_ARGS         words for bapo_jax.rollout.serve, after -- for vLLM: '--dtype=bfloat16 -- --enforce-eager'
# PLATFORM (gpu) that trainers must compute on
# RESTARTS (3) after failures; a trainer that stops on SIGTERM (exit status 75), or loses its node, does not count
# PORT (8000) · COORDINATOR_PORT (8476) · SERVER_DEADLINE (1800) seconds to start · PYTHON (REPO/.venv/bin/python)
#
# Needs kubectl, python3 and, in the cluster, JobSet 0.6 or newer and Kubernetes 1.29 or newer. What follows -- goes to bapo_jax.train. A
# run that ended, or was ended with `kubectl delete jobset NAME`, is continued from its last checkpoint by the same command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=/dev/null
. ./checks.sh

: "${NAME:?set it to the name of the JobSet}"
: "${IMAGE:?set it to the image with the repository and its environments}"
: "${CLAIM:?set it to the persistent volume claim with MODEL and WORKDIR}"
: "${MODEL:?set it to the Hugging Face directory to start from, a path in the pods}"
[[ $NAME =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || { echo "error: NAME=$NAME: use a-z, 0-9 and -, with a letter first and no - last" >&2 && exit 1; }
export NAME IMAGE CLAIM REPO=${REPO:-/bapo_jax} MOUNT=${MOUNT:-/shared} TRAINERS=${TRAINERS:-1} SERVERS=${SERVERS:-1} \
  GPUS_PER_TRAINER=${GPUS_PER_TRAINER:-8} GPUS_PER_SERVER=${GPUS_PER_SERVER:-1} RESTARTS=${RESTARTS:-3}
python=${PYTHON:-$REPO/.venv/bin/python} PLATFORM=${PLATFORM:-gpu}
PORT=${PORT:-8000} COORDINATOR_PORT=${COORDINATOR_PORT:-8476} SERVER_DEADLINE=${SERVER_DEADLINE:-1800}
check_whole TRAINERS 1 100000
check_whole SERVERS 1 100000
check_whole GPUS_PER_TRAINER 0 1000
check_whole GPUS_PER_SERVER 0 1000
check_whole RESTARTS 0 999999999
check_seconds SERVER_DEADLINE
check_port PORT
check_port COORDINATOR_PORT
check_word PLATFORM cpu gpu tpu
[ "${1:-}" != -- ] || shift
config='' workdir=''
for arg in "$@"; do case $arg in --workdir=*) workdir=${arg#*=} ;; --config=*) config=${arg#*=} ;; esac done
: "${config:?give --config=FILE after --}" "${workdir:?give --workdir=DIR after --, below $MOUNT}"
[[ $workdir == "$MOUNT"/* ]] || { echo "error: --workdir=$workdir is not below MOUNT=$MOUNT; give a directory that the pods share" >&2 && exit 1; }
read -r -a serve_args <<<"${SERVE_ARGS:-}"

urls=() servers=''
for ((i = 0; i < SERVERS; i++)); do
  urls+=("http://$NAME-server-0-$i.$NAME:$PORT") && servers+="'http://$NAME-server-0-$i.$NAME:$PORT',"
done
# A command as YAML. Kubernetes expands $(…) in it, for which only the two names below are meant: every other $ is doubled.
# shellcheck disable=SC2016 # Python's $
yaml() {
  python3 -c 'import json, re, sys
print(re.sub(r"\$(?!\((POD_IP|JOB_COMPLETION_INDEX)\))", "$$", json.dumps(sys.argv[1:], ensure_ascii=False)))' "$@"
}
gpus='' # a pod has GPUs of its own, and numbers them from 0
for ((i = 0; i < GPUS_PER_SERVER; i++)); do gpus+=${gpus:+,}$i; done
# shellcheck disable=SC2016 # for Kubernetes to expand
SERVE=$(yaml "$python" -m bapo_jax.rollout.serve --model="$MODEL" --host='$(POD_IP)' --port="$PORT" ${gpus:+--gpus=$gpus} \
  ${serve_args[@]+"${serve_args[@]}"})
WAIT=$(yaml "$REPO/launch/wait_for_servers.sh" "$SERVER_DEADLINE" "${urls[@]}")
# shellcheck disable=SC2016 # for Kubernetes to expand
TRAIN=$(yaml "$python" -m bapo_jax.train "$@" --config.model.path="$MODEL" --config.mesh.platform="$PLATFORM" \
  --config.rollout.engine=vllm \
  --config.rollout.servers="($servers)" --coordinator="$NAME-trainer-0-0.$NAME:$COORDINATOR_PORT" --hosts="$TRAINERS" \
  --host='$(JOB_COMPLETION_INDEX)')
export SERVE WAIT TRAIN
manifest=$(python3 -c 'import os, re, sys
print(re.sub("@([A-Z_]+)@", lambda found: os.environ[found[1]], sys.stdin.read()))' <jobset.yaml)

# The token goes by stdin: command lines can be read by others.
kubectl get secret "$NAME-token" >/dev/null 2>&1 || {
  token=${BAPO_ROLLOUT_TOKEN:-$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')}
  printf '%s' "$token" | kubectl create secret generic "$NAME-token" --from-file=token=/dev/stdin
}
kubectl apply -f - <<<"$manifest"
echo "to follow host 0: kubectl logs -f -c trainer -l jobset.sigs.k8s.io/jobset-name=$NAME,jobset.sigs.k8s.io/replicatedjob-name=trainer,batch.kubernetes.io/job-completion-index=0"
