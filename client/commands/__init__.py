"""The commands of `dsv41-client`, one module each: `add` describes it, `run` does it."""
