"""How the next token is chosen, and when an answer ends: the rules that a request may set."""
