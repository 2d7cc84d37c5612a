# The Triton server loads this file; the model is python_backend.triton_model.
import os
import sys

# The server's stub leaves PYTHONPATH out, and would take the code of another checkout.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from python_backend.triton_model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
