"""Things to run: a demonstration, and a small model trained from nothing."""
