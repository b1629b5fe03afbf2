#!/usr/bin/env bash
# What the launch scripts check of their variables before they start anything; they source this file.
set -euo pipefail

# The variable is a whole number from LEAST to MOST. WHAT, optional, is what the bounds are for.
check_whole() { # VARIABLE LEAST MOST [WHAT]
  if [[ ! ${!1} =~ ^(0|[1-9][0-9]{0,8})$ ]] || ((${!1} < $2 || ${!1} > $3)); then
    echo "error: $1=${!1}: give a whole number from $2 to $3${4:+ $4}" >&2
    exit 1
  fi
}

check_seconds() { check_whole "$1" 1 999999999; } # VARIABLE

# The variable is a port, and so are the SERVERS - 1 after it.
check_port() { check_whole "$1" 1 "$((65536 - ${2:-1}))" "${2:+for $2 servers at consecutive ports}"; } # VARIABLE [SERVERS]

# The variable is one of these words.
check_word() { # VARIABLE WORD...
  [[ " ${*:2} " == *" ${!1} "* ]] || { echo "error: $1=${!1}: choose one of ${*:2}" >&2 && exit 1; }
}

# The file of --config=VALUE is here, where FILE is FILE:METHOD's, and NAME one of configs/.
check_config() { # VALUE
  local file=${1%%:*}
  [[ $file == */* || $file == *.py ]] || file=configs/$file.py
  [ -f "$file" ] || { echo "error: --config=$1: there is no file $file in $PWD; give a file of your own, or a name in configs/" >&2 && exit 1; }
}

# Each LIST of the variable names GPUs as CUDA does, and none that was named before, here or in another variable.
named=' '
check_gpus() { # VARIABLE LIST...
  local list gpu name='(0|[1-9][0-9]*|(GPU|MIG)-[A-Za-z0-9/_-]+)'
  (($# > 1)) || set -- "$1" ''
  for list in "${@:2}"; do
    [[ $list =~ ^$name(,$name)*$ ]] ||
      { echo "error: $1=${!1}: '$list' is not a list of GPUs; give their numbers, with commas between those of one process" >&2 && exit 1; }
    for gpu in ${list//,/ }; do
      [[ $named != *" $gpu "* ]] ||
        { echo "error: $1=${!1}: GPU $gpu is named twice; give each GPU to only one server, or to the trainer" >&2 && exit 1; }
      named+="$gpu "
    done
  done
}
