"""Special tokens in the library's view of the tokenizer: a guide may need their names as text."""

from __future__ import annotations

import json
import secrets


def without_special_names(tokenizer_json: str) -> str:
    """The same tokenizer.json, where tokens that are no text have names that no guide can have.

    For llguidance special tokens, and added ones of the form <...>, are no text. Yet it cuts text
    that is certain into tokens as the tokenizer does, which finds their names: where a guide needs
    such a name as text, the library would allow the token alone and then refuse it.
    """
    tokenizer = json.loads(tokenizer_json)
    vocab = tokenizer["model"]["vocab"]
    for token in tokenizer["added_tokens"]:
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            hidden = token["content"] = f"<{secrets.token_hex(16)}>"
            if name in vocab:
                vocab[hidden] = vocab.pop(name)
    return json.dumps(tokenizer)
