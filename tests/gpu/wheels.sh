#!/usr/bin/env bash
# Makes build/gpu/carried-3.12.tar.xz: what tests/gpu/run.sh needs on a machine without a network that
# has that Python (PYTHON_VERSION names another), torch and transformers. Run it where pip works;
# packages given are added to it.
#
#   site/     pydantic and what it needs
#   server/   NVIDIA's tritonserver with the stub of that Python, and numpy 1.26, which the stub needs
#   server/libs/  a libpython for the stub, if LIBPYTHON names one (libpython3.12.so.1.0, 64-bit x86)
#
# What the server's wheel has for other Pythons is left out. With the tree it must stay below 64 MiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
archive=build/gpu/carried-$version.tar.xz
most_bytes=$((64 << 20))

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fetch() { # FOLDER PACKAGE...: wheels for that Python, unpacked
  local folder=$scratch/carried/$1 platforms=() tag
  shift
  for tag in manylinux_2_35 manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
  done
  "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile \
    --only-binary=:all: --implementation cp --python-version "$version" "${platforms[@]}" \
    -c constraints.txt --target "$folder" "$@"
}

fetch site pydantic pydantic-core annotated-types typing-inspection typing-extensions "$@"
fetch server nvidia-pytriton numpy

server=$scratch/carried/server
stubs=$server/pytriton/tritonserver/python_backend_stubs
find "$stubs" -mindepth 1 -maxdepth 1 ! -name "$version" -exec rm -r {} +
find "$server/nvidia_pytriton.libs" -name 'libpython3-*' -delete # 3.13's
find "$server/numpy" -type d -name tests -prune -exec rm -r {} +
if [[ -n ${LIBPYTHON:-} ]]; then
  mkdir "$server/libs"
  cp -L "$LIBPYTHON" "$server/libs/libpython$version.so.1.0"
  strip --strip-unneeded "$server/libs/libpython$version.so.1.0"
fi

mkdir -p "$(dirname "$archive")"
tar -C "$scratch/carried" -cf - site server | xz -T0 >"$archive"
carried=$(stat -c %s "$archive")
tree=$(git ls-files -z | xargs -0 stat -c %s | awk '{sum += $1} END {print sum}')
printf '%s: %d bytes; with the tree %d of %d\n' "$archive" "$carried" $((carried + tree)) $most_bytes
((carried + tree < most_bytes)) || {
  echo "error: too large to travel: name fewer packages" >&2
  exit 1
}
