"""What the Triton-language kernels share: number formats, row stores, rotation, launching."""
