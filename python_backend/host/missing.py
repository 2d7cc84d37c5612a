"""What to say when a package that serving needs is not installed. Imports nothing itself."""

from __future__ import annotations


def sentence(error: ModuleNotFoundError) -> str:
    """What is missing and how to install it."""
    name = (error.name or str(error)).partition(".")[0]
    return (
        f"expected the package {name}, found none in this environment; install what serving needs "
        "with pip install -e '.[server]' in the project's folder"
    )
