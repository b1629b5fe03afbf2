#!/usr/bin/env bash
# Runs a command, and keeps a copy of its run directory in a folder that takes whole files alone, such as a bucket's mount.
#
#   launch/copy_runs.sh RUN COPIES COMMAND...
#
# RUN         the run directory, on a local disk. Where it is missing or empty, the newest copy is put there first.
# COPIES      a folder for the copies of this run; one machine at a time
# COPY_EVERY  (60) seconds between two looks for a new checkpoint
#
# A copy is N.STEP.tar: the checkpoint of that step, and all else from which `bapo_jax.train` continues. N.STEP.whole says that it is
# whole; only then do those before it go. Every file is written once, from beginning to end, under a new name. A last copy is made when
# COMMAND has ended. The exit status is COMMAND's, or 1 if that is 0 and the last copy failed. SIGTERM, SIGHUP and Ctrl-C reach COMMAND as SIGTERM. Needs GNU tar.
set -euo pipefail

: "${3:?usage: copy_runs.sh RUN COPIES COMMAND...}"
run=$(realpath -m "$1") copies=$(realpath -m "$2") every=${COPY_EVERY:-60}
[[ $every =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "error: COPY_EVERY=$every: give a number of seconds, such as 60" >&2 && exit 1; }
links=$run.copying
shift 2

# The highest N of the names DIR/N (checkpoints), or DIR/N.STEP.tar or .whole; 0 where there is none.
highest() { # DIR, and '', .tar or .whole
  local path name most=0
  for path in "$1"/*"$2"; do
    name=${path##*/} && name=${name%"$2"}
    [[ ! $name =~ ^([1-9][0-9]*)(\.[0-9]+)?$ ]] || ((BASH_REMATCH[1] <= most)) || most=${BASH_REMATCH[1]}
  done
  echo "$most"
}

# Copies the run with the checkpoint of a step. Fails where it could not; the copy before is whole then.
copy() { # STEP
  local path number=$(($(highest "$copies" .tar) + 1))
  # The trainer may remove the checkpoint meanwhile; links keep its files, which nobody changes once they have their place. Where a
  # newer one is there by now, this one may have lost some.
  rm -rf "$links" && mkdir -p "$links/checkpoints" "$copies" && cp -al "$run/checkpoints/$1" "$links/checkpoints/" || return 1
  [ "$(highest "$run/checkpoints" '')" = "$1" ] || return 1
  # The rest comes after it: `train` drops what is later than its checkpoint. Of a file that grows, tar takes what was there, with
  # status 1.
  tar -c -f "$copies/$number.$1.tar" --exclude=./checkpoints --exclude=./lock --exclude=./policy --exclude=./servers \
    --warning=no-file-changed -C "$run" . -C "$links" checkpoints || [ $? = 1 ] || return 1
  echo whole >"$copies/$number.$1.whole" || return 1
  for path in "$copies"/*.whole "$copies"/*.tar; do # the marks first: none may stay without its copy
    [[ ! $path =~ /([1-9][0-9]*)\.[0-9]+\.(tar|whole)$ ]] || ((BASH_REMATCH[1] >= number)) || rm -f "$path"
  done
  rm -rf "$links"
}

newest=$(highest "$copies" .whole) copied=0
for whole in "$copies/$newest".*.whole; do [ "$newest" = 0 ] || { copied=${whole%.whole} && copied=${copied##*.}; }; done
if ((copied > 0)) && [ -z "$(ls -A "$run" 2>/dev/null)" ]; then
  # Under another name first: a run directory is there whole or not at all.
  rm -rf "$run.restored" && mkdir -p "$run.restored"
  tar -x -f "$copies/$newest.$copied.tar" -C "$run.restored" ||
    { echo "error: $copies/$newest.$copied.tar cannot be unpacked; see tar's error above, or remove $copies to start again" >&2 && exit 1; }
  rm -rf "$run" && mv "$run.restored" "$run"
  echo "$run was empty; restored the copy of step $copied from $copies"
elif (($(highest "$run/checkpoints" '') < copied)); then
  echo "error: $run is older than its copy of step $copied in $copies; remove $run to continue from the copy, or remove the copy" >&2
  exit 1
fi

command='' watching=''
# shellcheck disable=SC2329 # the trap calls it
interrupted() { [ -n "$command" ] || exit 143; kill -TERM "$command" 2>/dev/null || true; }
trap interrupted INT TERM HUP
set -m # each process below leads a group of its own, so that Ctrl-C reaches this script alone

watch() {
  local step
  trap 'exit 0' TERM
  # All that takes time runs behind `wait`, which the trap ends: bash would tell of what it waits for that a signal ended it.
  while sleep "$every" & wait $! && kill -0 $$ 2>/dev/null; do
    step=$(highest "$run/checkpoints" '')
    ((step > copied)) || continue
    copy "$step" &
    { wait $! && copied=$step; } ||
      echo "step $step was not copied to $copies; trying again in $every s" >&2
  done
}
watch &
watching=$!
"$@" </dev/null &
command=$!
while kill -0 "$command" 2>/dev/null; do wait "$command" || true; done # a signal ends `wait` before the command has ended
status=0
wait "$command" || status=$?
kill -TERM -- "-$watching" 2>/dev/null || true # a copy that it was making stays without its mark
wait "$watching" || true
step=$(highest "$run/checkpoints" '')
((step == 0)) || copy "$step" || {
  rm -rf "$links" # they hold the disk of a checkpoint that may be gone
  echo "error: the last copy of $run in $copies is incomplete, the previous one is kept; make room, then run the same command" >&2
  [ "$status" != 0 ] || status=1
}
exit "$status"
