"""NVFP4 and MXFP8 through NVIDIA ModelOpt, shard by shard."""
