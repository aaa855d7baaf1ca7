#!/usr/bin/env bash
# Proves and measures everything on this machine's card, in less than 9 minutes, and ends in one
# table: tests/gpu/README.md. Options go on to tests/gpu/suite.py (--cpu: a CPU stand-in, in small).
#
# Needs this folder's tree, a Python with torch and transformers (PYTHON, else that of .venv, else
# python3) and no network. What that Python lacks comes from the archive that tests/gpu/wheels.sh made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
python=${PYTHON:-$python}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
archive=${CARRIED:-build/gpu/carried-$version.tar.xz}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$PWD:$PWD/backend_src PYTHONUNBUFFERED=1
if [[ -f $archive ]]; then
  "$python" -m tarfile --filter data -e "$archive" "$scratch"
  export PYTHONPATH=$PYTHONPATH:$scratch/site CARRIED_SERVER=$scratch/server
  echo "unpacked $archive after $SECONDS s"
else
  echo "no $archive: the machine's own packages only"
fi
"$python" -m tests.gpu.suite "$@"
