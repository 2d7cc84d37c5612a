"""TinyFlash: a small model of the V4.1 architecture that is trained, shipped and served.

This package makes its data: word problems (`arithmetic`), facts to find in long documents
(`retrieval`), conversations (`dialogue`) and tool calls (`tools`) in the model's chat format
(`python_backend.text.chat`), tokenised (`tokenizer`) and laid into training batches (`mixture`);
`scoring` judges answers. `evaluate`, `compare` and `speculate` ask a model, `measure` asks all that
docs/accuracy.md claims, `report` writes it down. All text is written for this project and is
generated from seeds.
"""
