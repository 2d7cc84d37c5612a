"""The lowest layer: byte formats and the model's special operators. Imports nothing of ours."""
