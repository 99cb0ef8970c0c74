"""The address of the mesh, and a line to paste, once the gateway really answers."""

import asyncio
import json
import shlex
from pathlib import Path

import httpx

_ANSWER_TIMEOUT_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 0.1


async def wait_gateway_ready(url: str) -> bool:
    """Whether /ready turns 200 in time: every service is there, the gateway may hear of it a moment later."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS), httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    if (await client.get(url + "/ready")).status_code == 200:
                        return True
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(_ASK_AGAIN_SECONDS)
    except TimeoutError:
        return False


def invitation(url: str, model: str, *, needs_key: bool, command: str, state_dir: str = "") -> str:
    """What to try first: a curl command that a shell understands as it stands, and the chat command.

    `command` is how kvmesh is called here. `state_dir` is told where the command would look for the admin key
    elsewhere.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 64,
    }
    key = '  -H "Authorization: Bearer $KVMESH_API_KEY" \\\n' if needs_key else ""
    return (
        f"kvmesh serves {model} at {url}/v1 (Ctrl-C ends it). Try:\n\n"
        f"curl {url}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n{key}"
        f"  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}\n\n"
        f'or: {command} chat --url {url} "Why is the sky blue?"\n'
        + (
            f"To move modules by hand: export KVMESH_STATE_DIR={shlex.quote(state_dir)}\n"
            if state_dir
            else ""
        )
        + f"The mesh at work, live: {url}/mesh"
    )


def cli_command(python: Path, here: Path, on_path: str | None) -> str:
    """How the command of this installation is called by who stands `here`: by its name where that is what the
    shell finds (`on_path`), else by its path; where it was not installed, as a module of this `python`."""
    script = python.with_name("kvmesh")
    if on_path is not None and Path(on_path) == script:
        return "kvmesh"
    if not script.exists():
        return f"{shlex.quote(str(python))} -m services.cli"
    return shlex.quote(f"./{script.relative_to(here)}" if script.is_relative_to(here) else str(script))


def reachable_url(host: str, port: int) -> str:
    """How this machine reaches what listens there."""
    own = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    return f"http://{own.get(host, f'[{host}]' if ':' in host else host)}:{port}"
