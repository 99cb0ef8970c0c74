"""The pair for a request, among those with room for it: reads the state that policies choose by. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from libs.bus.messages.generation import Place, Placed
from libs.kv_events.view import NOTHING_HELD, HeldPrefix, KvView
from libs.routing.candidates import DecodeCandidates, Draw, Ints, PrefillCandidates, Prompt
from libs.routing.decode_placement import least_kv, session_worker
from libs.routing.policies import Policy
from libs.routing.predicting import HitKind, predict
from services.router.instances import Instances
from services.router.room import num_requests
from services.router.view import ClusterView, Share


@dataclass(frozen=True, slots=True)
class Match:
    """A pair, what the placement takes there until it is reported, and what is expected of it."""

    placed: Placed
    shares: Mapping[str, Share]
    kind: HitKind
    ttft_seconds: float


@dataclass(frozen=True, slots=True)
class Roomy:
    """Who has room for the request."""

    decodes: Ints
    """Rows; at least one."""
    prefills: Ints
    """Rows. Decode instances without any of the same KV run prompts themselves."""
    needed_blocks: Ints
    """Of all rows."""
    free_blocks: Ints
    """Of all rows."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """How a pair is chosen."""

    policy: Policy
    sticky_seconds: float = 0.0
    """A session stays with its workers while the queue there is at most this much longer than the shortest;
    0: sessions do not matter."""

    def choose(self, place: Place, roomy: Roomy, view: ClusterView, held: KvView, draw: Draw) -> Match:
        """The pair."""
        known = view.instances
        decode = self._decode(place, roomy, known, draw)
        same_kv = known.fingerprint == known.fingerprint[decode]
        runners = roomy.prefills[same_kv[roomy.prefills]]
        if not len(runners):
            runners = roomy.decodes[same_kv[roomy.decodes] & known.runs_prompts[roomy.decodes]]
        prefix = held.find(place.names) if place.names else NOTHING_HELD
        candidates = _candidates(view, runners, held, prefix)
        prompt = _prompt(place, int(runners[0]), known, prefix)
        index = self._sticky(place, runners, candidates, known)
        if index is None:
            index = self.policy(prompt, candidates, draw)
        runner = int(runners[index])
        predicted = predict(prompt, candidates.only(index))
        return _match(
            place,
            runner,
            decode if known.is_prefill[runner] else runner,
            roomy,
            known,
            predicted.kind(0),
            float(predicted.ttft_seconds[0]),
            float(predicted.own_seconds[0]),
        )

    def _decode(self, place: Place, roomy: Roomy, known: Instances, draw: Draw) -> int:
        rows = roomy.decodes
        if self.sticky_seconds and place.session:
            return int(rows[session_worker(place.session, known.names(rows))])
        state = DecodeCandidates(known.num_blocks[rows], roomy.free_blocks[rows], num_requests(known)[rows])
        return int(rows[least_kv(roomy.needed_blocks[rows], state, draw)])

    def _sticky(
        self, place: Place, runners: Ints, candidates: PrefillCandidates, known: Instances
    ) -> int | None:
        """The session's worker, unless too much waits there."""
        if not self.sticky_seconds or not place.session:
            return None
        usual = session_worker(place.session, known.names(runners))
        longest = candidates.queued_seconds.min() + self.sticky_seconds
        return usual if candidates.queued_seconds[usual] <= longest else None


def _match(
    place: Place,
    runner: int,
    decode: int,
    roomy: Roomy,
    known: Instances,
    kind: HitKind,
    ttft_seconds: float,
    own_seconds: float,
) -> Match:
    runner_id, decode_id = known.presence(runner).incarnation, known.presence(decode).incarnation
    num_blocks = int(roomy.needed_blocks[decode])
    if runner == decode:
        shares = {decode_id: Share(place.num_tokens, num_blocks, own_seconds)}
        return Match(Placed(prefill="", decode=decode_id), shares, kind, ttft_seconds)
    shares = {runner_id: Share(place.num_tokens, 0, own_seconds), decode_id: Share(0, num_blocks, 0.0)}
    return Match(Placed(prefill=runner_id, decode=decode_id), shares, kind, ttft_seconds)


def _prompt(place: Place, runner: int, known: Instances, prefix: HeldPrefix) -> Prompt:
    presence = known.presence(runner)
    return Prompt(
        num_tokens=place.num_tokens,
        block_size=int(known.block_size[runner]),
        block_bytes=presence.block_bytes,
        num_layers=max(1, presence.num_layers),
        store_end=prefix.store_end,
        disk_before=prefix.disk_before,
    )


def _candidates(view: ClusterView, rows: Ints, held: KvView, prefix: HeldPrefix) -> PrefillCandidates:
    known = view.instances
    num_local_blocks = np.zeros(len(rows), np.int64)
    if prefix.num_blocks:
        slots = view.kv_slots(held)[rows]
        known_slots = np.flatnonzero(slots >= 0)
        num_local_blocks[known_slots] = prefix.by_slot[slots[known_slots]]
    return PrefillCandidates(
        queued_seconds=(known.queued_seconds + known.pending_seconds)[rows],
        num_prompts=num_requests(known)[rows],
        num_local_blocks=num_local_blocks,
        step_seconds=known.step_seconds[rows],
        token_seconds=known.token_seconds[rows],
        pair_seconds=known.pair_seconds[rows],
        fetch_latency_seconds=known.fetch_latency_seconds[rows],
        fetch_bytes_per_second=known.fetch_bytes_per_second[rows],
        disk_bytes_per_second=known.disk_bytes_per_second[rows],
    )
