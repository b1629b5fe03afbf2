#!/usr/bin/env bash
# Waits until every vLLM server answers; the other scripts run it between servers and trainers.
#
#   BAPO_ROLLOUT_TOKEN=… launch/wait_for_servers.sh SECONDS URL...
#
# Fails with the server named when SECONDS have passed, or at once when it refuses the token. WATCH='pid pid…', optional: the
# servers' processes here; fails as soon as one has ended. Needs curl.
set -euo pipefail

: "${BAPO_ROLLOUT_TOKEN:?set it to the token that the servers were started with}"
: "${2:?usage: wait_for_servers.sh SECONDS URL...}"
SERVER_DEADLINE=$1
shift
# shellcheck source=/dev/null
. "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
check_seconds SERVER_DEADLINE
deadline=$((SECONDS + SERVER_DEADLINE))

# The token goes by stdin: everyone on a machine can read its command lines.
health() {
  printf 'Authorization: Bearer %s\n' "$BAPO_ROLLOUT_TOKEN" |
    curl --silent --noproxy '*' --max-time 5 --header @- --output /dev/null --write-out '%{http_code}' "$1/health" || true
}

for url in "$@"; do
  until code=$(health "$url") && [ "$code" = 200 ]; do
    if [ "$code" = 401 ]; then
      echo "error: $url refuses this BAPO_ROLLOUT_TOKEN; another server may listen there: stop it, or set PORT" >&2
      exit 1
    fi
    for pid in ${WATCH:-}; do
      kill -0 "$pid" 2>/dev/null || { echo "error: a server ended before $url answered; see its log" >&2 && exit 1; }
    done
    ((SECONDS < deadline)) || { echo "error: no answer from $url in $SERVER_DEADLINE s; see its log, or set SERVER_DEADLINE" >&2 && exit 1; }
    sleep 1
  done
done
echo "$# servers answer"
