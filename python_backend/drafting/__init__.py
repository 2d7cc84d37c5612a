"""Speculative decoding with DSpark: how many drafts are verified, and which stay. No torch."""
