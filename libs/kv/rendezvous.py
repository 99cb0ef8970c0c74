"""Who is in charge of a key, agreed on by all without a word: rendezvous hashing. Pure."""

from collections.abc import Sequence

import xxhash


def owner_of(key: bytes, names: Sequence[str]) -> str:
    """The name that draws the highest number for this key; the order of `names` does not matter.

    When a name comes or goes, only the keys it gains or loses move. Raises ValueError without names.
    """
    if not names:
        raise ValueError("a key needs somebody to belong to; ask only while there is one")
    return max(names, key=lambda name: (xxhash.xxh3_64_intdigest(key + b"\0" + name.encode()), name))
