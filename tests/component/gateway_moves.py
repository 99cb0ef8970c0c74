"""What is asked of a gateway about moves, and what it says."""

from typing import Any

import httpx
from gateway_mesh import Mesh

ADMIN_KEY = "adm-one"
MIGRATIONS = "/v1/mesh/migrations"
LAYERS = {"instance": "decode-0", "host": "prefill-0", "layers": [20, 30]}


async def ask(
    mesh: Mesh, method: str, path: str, body: Any = None, key: str | None = ADMIN_KEY
) -> httpx.Response:
    headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
    async with mesh.http() as http:
        return await http.request(method, path, json=body, headers=headers)


async def start(mesh: Mesh, **body: Any) -> httpx.Response:
    return await ask(mesh, "POST", MIGRATIONS, body)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    return dict(body["error"])


async def tell_placement(mesh: Mesh, message: Any) -> None:
    """Once the gateway shows this epoch, it has heard all that was published before."""
    await mesh.bus.publish(message)
    async with mesh.http() as http:
        while True:
            instances = (await http.get("/v1/mesh/placement")).json()["instances"]
            if any(i["epoch"] == message.placement.epoch for i in instances):
                return
