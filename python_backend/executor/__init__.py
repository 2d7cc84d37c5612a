"""Ways to run a step: on torch (CPU or CUDA), or simulated for tests of the scheduler."""
