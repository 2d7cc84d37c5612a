"""What goes wrong around the server's process."""


class HostError(ValueError):
    """The server cannot be started or has failed; the message says why and what to do."""
