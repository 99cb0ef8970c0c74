"""Who may change the mesh: the holder of the admin key, which is no API key."""

import hmac

from starlette.requests import Request

from services.gateway.api.errors import Forbidden, Unauthorized

MIGRATIONS_PATH = "/v1/mesh/migrations"
_MUTATING = frozenset({"POST", "DELETE"})


def is_admin_call(method: str, path: str) -> bool:
    """Whether it changes the mesh; everything else asks for what it always asked."""
    return method in _MUTATING and (path == MIGRATIONS_PATH or path.startswith(MIGRATIONS_PATH + "/"))


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
