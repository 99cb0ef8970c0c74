"""Prompts by where their runs lie, and tokens as engines really computed them."""

from collections.abc import Sequence

from workers_mesh import BLOCK_SIZE, Hosted, prompt_of
from workers_reference import tiny_model

from libs.kv.names import block_names
from libs.kv.runs import RUN_BLOCKS, runs_by_store

RUN_TOKENS = RUN_BLOCKS * BLOCK_SIZE
FINGERPRINT = tiny_model().fingerprint


def names_of(prompt: Sequence[int], cache_salt: str = "") -> list[bytes]:
    return block_names(prompt, BLOCK_SIZE, FINGERPRINT, cache_salt)


def prompt_on(stores: Sequence[str], num_tokens: int) -> list[int]:
    """A prompt whose runs lie on these stores, run by run."""
    wanted = list(stores)
    for seed in range(1000):
        prompt = prompt_of(num_tokens, seed=seed)
        by_store = runs_by_store(names_of(prompt), sorted(set(stores)))
        found = {run.start // RUN_BLOCKS: store for store, runs in by_store.items() for run in runs}
        if [found[index] for index in sorted(found)] == wanted:
            return prompt
    raise AssertionError(f"no prompt of {num_tokens} tokens lies on {wanted}")


class Computed:
    """Tokens that went through a worker's model since this was made."""

    def __init__(self, hosted: Hosted) -> None:
        self.num_tokens = 0
        meter = hosted.service.engine._thread.meter
        end = meter.end

        def count(num_tokens: int | None, *args: object, **kwargs: object) -> None:
            self.num_tokens += num_tokens or 0
            end(num_tokens, *args, **kwargs)

        meter.end = count
