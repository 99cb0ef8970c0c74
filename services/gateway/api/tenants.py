"""Whose cached KV a request may share: its API key's, narrowed by its own salt. No key leaves this file.

Block names depend on the salt, so KV of one salt cannot be found under another: neither by a worker nor by a
store, which is also why no answer comes sooner for it.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

TENANT_CHARS = 12
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. Both fields are hashes of the key, each in its own context: neither tells the key."""

    name: str = ""
    """For traces; empty where no key is needed."""
    secret: str = ""
    """What its salts are made of; the same in every gateway and after every start, so KV on disk is found."""


SCOPE_KEY = "kvmesh.tenant"
"""Where an ASGI scope says whose request it is."""
NOBODY = Tenant()
"""Who asks where no key is needed: all are one tenant, and only their requests' salts keep them apart."""


class Tenants:
    """The holders of the API keys of this gateway."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._known = [(key.encode(), tenant_of(key)) for key in keys]

    @property
    def need_keys(self) -> bool:
        """Whether a request has to show a key."""
        return bool(self._known)

    def find(self, given: bytes) -> Tenant | None:
        """The holder of a key; None for one that is not known."""
        found: Tenant | None = None
        # All keys are compared, each in constant time: how long it takes tells nothing.
        for key, tenant in self._known:
            if hmac.compare_digest(given, key):
                found = tenant
        return found


def tenant_of(key: str) -> Tenant:
    """The tenant of an API key."""
    return Tenant(
        name=_hash("kvmesh 2026 tenant's name", key)[:TENANT_CHARS],
        secret=_hash("kvmesh 2026 tenant's secret", key),
    )


def salt_of(tenant: Tenant, request_salt: str) -> str:
    """What goes into the names of a request's blocks. Empty: the KV that all share who say nothing."""
    if not tenant.secret and not request_salt:
        return ""
    return _hash("kvmesh 2026 cache salt", tenant.secret, request_salt)


def session_of(tenant: Tenant, told: str) -> str:
    """A conversation's name in the mesh: of one length, and apart from other tenants' of the same name."""
    return _hash("kvmesh 2026 session", tenant.secret, told)[:TENANT_CHARS] if told else ""


def _hash(context: str, *fields: str) -> str:
    """Fields carry their lengths, so no two lists of them hash the same bytes."""
    hasher = blake3(derive_key_context=context)
    for field in fields:
        raw = field.encode()
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest(_SALT_BYTES).hex()
