"""From a checkpoint to an engine."""
