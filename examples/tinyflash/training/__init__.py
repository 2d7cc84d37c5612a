"""Training TinyFlash in plain PyTorch on the operators and building blocks of engine.network."""
