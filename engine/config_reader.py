"""Reading and validating a model configuration in its two released spellings."""
