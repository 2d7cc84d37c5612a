#!/usr/bin/env bash
# Run the plain Triton server on a model repository, on 127.0.0.1 ports 8000, 8001 and 8002.
#   scripts/run_triton.sh model_repository [tritonserver options, which win over the defaults]
# Set parameters.engine_dir in the model's config.pbtxt first. VENV names another environment.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "${VENV:-$here/.venv}/bin/python" -m python_backend.host.files "$@"
