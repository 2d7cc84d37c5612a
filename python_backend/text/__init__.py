"""Between text and token ids: the tokenizer file of an engine, and incremental detokenisation."""
