"""The greedy choice behind a token, and what the choice behind that one is made of."""

from plugins.markov.reference import markov_choice

__all__ = ["markov_choice"]
