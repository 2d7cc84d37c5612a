#!/usr/bin/env bash
# Make .venv: the one environment that builds engines, serves them and runs the tests.
#   PYTHON=python3.11 scripts/setup.sh
# Safe to run again: does nothing when requirements.lock and pyproject.toml are unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $*" >&2; exit 1; }

# Packages of the operating system: installed as root, named otherwise.
need_packages() {
  [ $# -eq 0 ] && return
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing $* with apt"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  else
    fail "this machine lacks: $*. Install them (apt-get install $*) and run this again."
  fi
}

python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'; then
      python=$candidate
      break
    fi
  done
fi
if [ -z "$python" ]; then
  need_packages python3.11 python3.11-venv libpython3.11
  python=python3.11
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
missing=()
"$python" -c 'import ensurepip' 2>/dev/null || missing+=("python$version-venv")
# The server's Python stub links the shared library of this very interpreter.
"$python" - <<'PY' || missing+=("libpython$version")
import ctypes, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
try:
    ctypes.CDLL(sysconfig.get_config_var("LIBDIR") + "/" + name)
except OSError:
    try:
        ctypes.CDLL(name)
    except OSError:
        sys.exit(1)
PY
need_packages ${missing[@]+"${missing[@]}"}

stamp=.venv/.setup-stamp
wanted=$(cat requirements.lock pyproject.toml scripts/setup.sh | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing Python packages into .venv (about two minutes, 2 GB)"
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet -r requirements.lock
# Only the server files of this package are used, so none of its own dependencies.
.venv/bin/python -m pip install --quiet --no-deps nvidia-pytriton==0.7.0
PYTHONWARNINGS=ignore .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
echo "$wanted" >"$stamp"
echo "setup: .venv is ready"
