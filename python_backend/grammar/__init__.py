"""Structured output: what a guide allows at each place of an answer. No torch."""
