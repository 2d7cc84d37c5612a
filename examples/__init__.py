"""Worked examples that use the public packages; nothing in the packages imports them."""
