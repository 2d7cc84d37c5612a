#!/usr/bin/env bash
# Make the environment of perf_analyzer, the load generator that `dsv41-client perf` runs.
#   PYTHON=python3.11 scripts/setup_perf.sh [DIRECTORY]        (default: .venv-perf)
# Safe to run again, and at the same time; prints nothing when there is nothing to do.
# It is apart from .venv because the client package that carries perf_analyzer is an older one.
set -euo pipefail

fail() { echo "setup_perf: $*" >&2; exit 1; }

folder=${1:-$(cd "$(dirname "$0")/.." && pwd)/.venv-perf}
python=${PYTHON:-python3.11}
stamp=$folder/.perf-stamp
# 2.51.0 is the last perf_analyzer for glibc 2.36; from 2.65 on tritonclient carries none.
packages=(tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.6.77)

runs() { LD_LIBRARY_PATH=$1 "$folder/bin/perf_analyzer" --version >/dev/null 2>&1; }
[ -f "$stamp" ] && runs "$(cat "$stamp")" && exit 0

command -v "$python" >/dev/null || fail "expected a Python as \$PYTHON, found no $python"
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
[ -f "$stamp" ] && runs "$(cat "$stamp")" && exit 0

if ! ldconfig -p | grep -q 'libb64\.so\.0d'; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "setup_perf: installing libb64-0d with apt"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libb64-0d >/dev/null
  else
    fail "perf_analyzer needs the system package libb64-0d: run 'apt-get install libb64-0d' as" \
      "root, then this again."
  fi
fi

echo "setup_perf: installing perf_analyzer into $folder (about 15 s, 60 MB)"
rm -f "$stamp"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
# Only the program and the CUDA library that it is linked with are used: no dependencies.
"$folder/bin/python" -m pip install --quiet --no-deps "${packages[@]}"
libraries=$("$folder/bin/python" -c 'import nvidia.cuda_runtime as c; print(list(c.__path__)[0] + "/lib")')
runs "$libraries" || fail "perf_analyzer does not start:" \
  "$(LD_LIBRARY_PATH=$libraries "$folder/bin/perf_analyzer" --version 2>&1 | head -3)"
echo "$libraries" >"$stamp"
