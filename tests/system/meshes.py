"""The meshes that the system tests share: one for each set of flags."""

from typing import NamedTuple

import tiny_model

from black_box import SMOLLM2

KEY, ADMIN_KEY = "sk-for-the-page", "adm-for-the-page"
ONE, TWO = "sk-first-tenant", "sk-second-tenant"
TRACE = "access.jsonl"

NUM_POOL_BLOCKS = 512
CHUNK_TOKENS = 32
NUM_CHAT_BLOCKS = 900
"""About what the chats leave behind."""
_STORE_GIB = NUM_CHAT_BLOCKS * 0.2 * tiny_model.BLOCK_BYTES / 2**30 / 2
_PATIENT = "--store-fetch-when always --store-find-timeout-seconds 10 --store-fetch-timeout-seconds 20"
"""Whatever is stored is fetched, however slow the machine is."""


class MeshFlags(NamedTuple):
    """`{state_dir}` stands for the folder of the mesh."""

    flags: str
    model: str = ""
    """A tiny random one unless named."""
    api_key: str = "none"


MESHES = {
    # A trained model, with chunks small enough that long prompts are cut.
    "smollm2": MeshFlags("--max-num-batched-tokens 256 --num-blocks 1024", SMOLLM2),
    # Two workers per role, so that one of each may die.
    "double": MeshFlags("--prefill 2 --decode 2 --num-blocks 512"),
    # Modules move by hand, slowly enough to be met in each phase. A session stays with its decode worker,
    # however long the queue there is; who died is back soon, however often it died before. The last test of
    # these ends the mesh.
    "moving": MeshFlags(
        f"--decode 2 --stores 0 --no-automatic --max-num-batched-tokens {CHUNK_TOKENS} --max-model-len 2048 "
        f"--num-blocks {NUM_POOL_BLOCKS} --session-stickiness-seconds 1000 --stable-seconds 1 "
        "--move-bandwidth-mib 6 --move-deadline-seconds 120 --lease-seconds 3"
    ),
    "page": MeshFlags(
        "--num-blocks 256 --max-model-len 1024 --store-fetch-when always "
        f"--api-key {KEY} --admin-key {ADMIN_KEY}",
        api_key=KEY,
    ),
    # Pools small enough that little survives in them from one turn of a chat to the next.
    "chats": MeshFlags(
        f"--prefill 2 --decode 2 --num-blocks 160 --stores 2 --memory-gib {_STORE_GIB:.5f} --disk-gib 1 "
        + _PATIENT
    ),
    # Pools of two prompts: what is asked for after others was forgotten by the workers.
    "damage": MeshFlags(
        "--num-blocks 60 --max-model-len 800 --memory-gib 0.5 --disk-gib 1 --coordinators 0 "
        "--stable-seconds 1 " + _PATIENT
    ),
    # Two prefill workers, so that what one of them computed comes to the other through the store.
    "tenants": MeshFlags(
        f"--prefill 2 --num-blocks 256 --policy round_robin --api-key {ONE},{TWO} "
        f"--access-trace {{state_dir}}/{TRACE} {_PATIENT}",
        api_key=ONE,
    ),
}
