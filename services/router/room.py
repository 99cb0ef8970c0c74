"""Which workers a request could go to, and which have room for it now, over all rows at once. Pure."""

import numpy as np

from libs.bus.messages.generation import Place
from libs.bus.messages.presence import ServiceKind
from libs.routing.candidates import Ints
from libs.routing.decode_placement import blocks_for, expected_growth_blocks, expected_output_tokens
from services.router.instances import Bools, Instances
from services.router.view import ClusterView


def usable(place: Place, arrived_at: float, kind: ServiceKind, view: ClusterView, now: float) -> Ints:
    """Rows of those of a kind that serve this request's model and did not just fail it."""
    known = view.instances
    rows = view.ready(kind, now)
    if place.model:
        rows = rows[known.model[rows] == known.models.known(place.model)]
    if not place.exclude:
        return rows
    excluded = [known.rows[one] for one in place.exclude if one in known.rows]
    others = rows[~np.isin(rows, excluded)]
    # The excluded ones failed this request, perhaps because they died. Who reported after it came here is
    # alive, and better than nobody.
    return others if len(others) else rows[known.heard_at[rows] > arrived_at]


def could_hold(place: Place, known: Instances) -> Bools:
    """Who could hold the prompt and one token more if it were empty."""
    in_context = (known.max_model_len == 0) | (place.num_tokens < known.max_model_len)
    fits: Bools = in_context & (blocks_for(place.num_tokens, known.block_size) <= known.num_blocks)
    return fits


def has_seat(known: Instances) -> Bools:
    """Who would not refuse one request more."""
    free: Bools = (known.num_seats == 0) | (num_requests(known) < known.num_seats)
    return free


def num_requests(known: Instances) -> Ints:
    """Requests that each has, or is about to have."""
    return known.num_running + known.num_beginning + known.num_pending


def waiting_tokens(known: Instances) -> Ints:
    """Prompt tokens in front of a new prompt."""
    return known.num_waiting_tokens + known.num_pending_tokens


def needed_blocks(place: Place, known: Instances, max_expected_output_tokens: int) -> Ints:
    """Blocks for the prompt and for the answer that is to be expected, within what the pool has at all."""
    most = min(place.max_new_tokens, max_expected_output_tokens)
    num_tokens = place.num_tokens + expected_output_tokens(known.mean_output_tokens, most)
    needed: Ints = np.minimum(blocks_for(num_tokens, known.block_size), known.num_blocks)
    return needed


def free_blocks(known: Instances, max_expected_output_tokens: int) -> Ints:
    """Blocks nobody holds, no placement on its way will take, and no sequence there is expected to need."""
    growth = expected_growth_blocks(
        known.num_running,
        known.num_beginning,
        expected_output_tokens(known.mean_output_tokens, max_expected_output_tokens),
        known.block_size,
    )
    return known.num_blocks - known.num_used_blocks - known.num_pending_blocks - growth


def with_partner(decodes: Ints, prefills: Ints, known: Instances, may_decode: Bools, may_run: Bools) -> Ints:
    """Those of `decodes` that may decode, and whose prompts somebody may run: a prefill worker for the same
    KV where one is usable at all, else they themselves."""
    usable_for, able_for = np.zeros((2, len(known.fingerprints)), np.bool_)
    usable_for[known.fingerprint[prefills]] = True
    able_for[known.fingerprint[prefills[may_run[prefills]]]] = True
    own = known.fingerprint[decodes]
    partnered = np.where(usable_for[own], able_for[own], known.runs_prompts[decodes] & may_run[decodes])
    return decodes[may_decode[decodes] & partnered]
