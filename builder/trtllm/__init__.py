"""The adapter to TensorRT-LLM's PyTorch backend: written for its 1.3 line, never run with it."""

TARGET_VERSION = "1.3"
PACKAGE = "dsv41_trtllm"  # what --custom_module_dirs imports
ARCHITECTURE = "Dsv41TritonForCausalLM"
MODEL_TYPE = "dsv41_triton"
