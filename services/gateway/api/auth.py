"""Whose request it is, and what it may do: API keys, the admin key, and the tenant whose cached KV it shares.

Block hashes depend on the salt, so KV of one salt cannot be found under another: neither by a worker nor by a
store, which is also why no answer comes sooner for it. No key leaves this file.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api.errors import ApiError, Forbidden, Unauthorized, error_response

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
ANONYMOUS = Tenant()
"""Of requests where no key is needed: all are one tenant, and only their requests' salts keep them apart."""


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
    """What goes into the hashes of a request's blocks. Empty: the KV that all share who say nothing."""
    if not tenant.secret and not request_salt:
        return ""
    return _hash("kvmesh 2026 cache salt", tenant.secret, request_salt)


def session_of(tenant: Tenant, given: str) -> str:
    """A conversation's name in the mesh: of one length, and apart from other tenants' of the same name."""
    return _hash("kvmesh 2026 session", tenant.secret, given)[:TENANT_CHARS] if given else ""


def _hash(context: str, *fields: str) -> str:
    """Fields carry their lengths, so no two lists of them hash the same bytes."""
    hasher = blake3(derive_key_context=context)
    for field in fields:
        raw = field.encode()
        hasher.update(len(raw).to_bytes(8, "little"))
        hasher.update(raw)
    return hasher.digest(_SALT_BYTES).hex()


MIGRATIONS_PATH = "/v1/mesh/migrations"
WORKERS_PATH = "/v1/mesh/workers"
_MUTATING = frozenset({"POST", "DELETE"})


def is_admin_call(method: str, path: str) -> bool:
    """Whether it changes the mesh; everything else asks for what it always asked."""
    is_below = path.startswith((MIGRATIONS_PATH + "/", WORKERS_PATH + "/"))
    return method in _MUTATING and (path == MIGRATIONS_PATH or is_below)


class AdminKey:
    """Asked for each admin call. Without a key nobody may make one."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def check(self, request: Request) -> None:
        """Raises Forbidden where no key is set, Unauthorized for one that is not it."""
        if not self._key:
            raise Forbidden(
                "this gateway takes no admin calls: start it with --admin-key or KVMESH_ADMIN_KEY, "
                "then send `Authorization: Bearer <admin key>`",
                code="no_admin_key",
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        # Compared in constant time, also where nothing was given.
        if not hmac.compare_digest(given.strip(" ").encode("latin-1"), self._key) or not is_bearer:
            raise Unauthorized(
                "the admin key is needed: send `Authorization: Bearer <admin key>`; an API key is none",
                code="invalid_admin_key",
            )


class Authentication:
    """Lets requests through that show one of the keys; without keys, all. Says in the scope whose it is.

    Admin calls are let through by the admin key alone.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, admin_key: AdminKey, open_paths: frozenset[str]
    ) -> None:
        self._app, self._tenants, self._admin_key = app, tenants, admin_key
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers by itself what it does not let through."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if is_admin_call(scope["method"], scope["path"]):
            self._admin_key.check(Request(scope))
        elif scope["path"] not in self._open_paths:
            tenant = self._tenant_of(Request(scope)) if self._tenants.need_keys else ANONYMOUS
            if tenant is None:
                raise Unauthorized("a valid API key is needed: send `Authorization: Bearer <key>`")
            scope[SCOPE_KEY] = tenant

    def _tenant_of(self, request: Request) -> Tenant | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._tenants.find(key.strip().encode()) if scheme.lower() == "bearer" else None
