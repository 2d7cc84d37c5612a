# The Triton server loads this file; the model is python_backend.triton_model.
from python_backend.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
