#!/usr/bin/env bash
# Measures the running server with perf_analyzer: streamed answers of the direct door over gRPC.
#
#   perf_analyzer_configs/run.sh [perf_analyzer options, e.g. -u host:8001 --concurrency-range 8]
#
# Uses the perf_analyzer on PATH, else the one in the wheel tritonclient 2.49.0, the last that has
# the binary. PYTHON says which Python to work with (default: .venv's, else python3).
set -euo pipefail

top=$(cd "$(dirname "$0")/.." && pwd)
kept="$top/build/perf_analyzer"     # where the binary and links to its libraries are kept
export_file="$top/results/perf_analyzer/stream.json"
python=${PYTHON:-$top/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "run.sh: no python3" >&2; exit 1; }

fail() { echo "run.sh: $*" >&2; exit 1; }

fetch_binary() {
  echo "fetching perf_analyzer (tritonclient 2.49.0, 14 MB)" >&2
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
    --dest "$kept" tritonclient==2.49.0 >&2 ||
    fail "perf_analyzer is missing: not on PATH, and tritonclient 2.49.0 cannot be downloaded"
  "$python" - "$kept" <<'PY'
import pathlib, sys, zipfile
kept = pathlib.Path(sys.argv[1])
wheel = next(kept.glob("tritonclient-2.49.0-*.whl"))
with zipfile.ZipFile(wheel) as files:
    name = next((n for n in files.namelist() if n.endswith("/bin/perf_analyzer")), None)
    if name is None:
        sys.exit(f"run.sh: {wheel.name} has no perf_analyzer: it is built for Linux on x86-64 only")
    (kept / "perf_analyzer").write_bytes(files.read(name))
(kept / "perf_analyzer").chmod(0o755)
wheel.unlink()
PY
}

# Links a library that the system lacks to the copy that nvidia-pytriton brings along.
link_library() {  # name in nvidia_pytriton.libs up to its hash, file name wanted, how else to get it
  local needed site copy
  needed=$(ldd "$binary") || fail "ldd cannot read $binary"
  [[ $needed == *"$2 => not found"* ]] || return 0
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  copy=$(find "$site/nvidia_pytriton.libs" -name "$1-*" -print -quit 2>/dev/null || true)
  [ -n "$copy" ] || fail "$2 is missing, which perf_analyzer needs: $3"
  ln -sf "$copy" "$kept/$2"
}

binary=$(command -v perf_analyzer || true)
if [ -z "$binary" ]; then
  binary="$kept/perf_analyzer"
  mkdir -p "$kept"
  [ -x "$binary" ] || fetch_binary
  link_library libb64 libb64.so.0d "apt install libb64-0d, or pip install nvidia-pytriton"
  link_library libcudart libcudart.so.12 "install the CUDA 12 runtime, or pip install nvidia-pytriton"
  export LD_LIBRARY_PATH="$kept${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

mkdir -p "$(dirname "$export_file")"
rm -f "$export_file"
"$binary" -m inflight_llm --service-kind triton -i grpc --streaming -u 127.0.0.1:8001 \
  --input-data "$top/perf_analyzer_configs/stream.json" --concurrency-range 4 \
  --measurement-mode count_windows --measurement-request-count 20 --stability-percentage 999 \
  --profile-export-file "$export_file" "$@" || fail "perf_analyzer failed (is the server up?)"
"$python" "$top/perf_analyzer_configs/report.py" "$export_file"
