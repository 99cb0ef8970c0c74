"""Whether a request can be placed now, and on which pair: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from libs.bus.messages.generation import Place, Placed
from libs.bus.messages.presence import ServiceKind
from services.router.policy import Policy
from services.router.view import ClusterView, Instance, blocks_for


class Obstacle(Enum):
    """Why a request has no place now."""

    NO_PAIR = "no_pair"
    """No decode instance with a way to get its prompts run."""
    NO_ROOM = "no_room"
    """There are pairs; all are full."""
    TOO_LONG = "too_long"
    """There are pairs; it fits none even when it is empty."""


@dataclass(frozen=True, slots=True)
class Matching:
    """The rules a router matches by."""

    policy: Policy
    max_waiting_tokens: int
    """A prefill instance with more prompt tokens queued gets no further prompts."""

    def match(
        self, place: Place, arrived_at: float, view: ClusterView, turn: int, now: float
    ) -> Placed | Obstacle:
        """The pair for this request, or why there is none."""
        pairs = self._pairs(place, arrived_at, view, now)
        if not pairs:
            return Obstacle.NO_PAIR
        fitting = [(decode, prefills) for decode, prefills in pairs if _could_fit(place, decode)]
        if not fitting:
            return Obstacle.TOO_LONG
        roomy = [
            (decode, able)
            for decode, prefills in fitting
            if _has_room(place, decode) and (able := [p for p in prefills if self._takes_prompts(p)])
        ]
        if not roomy:
            return Obstacle.NO_ROOM
        decode = self.policy([decode for decode, _ in roomy], turn)
        prefill = self.policy(next(able for d, able in roomy if d is decode), turn)
        return Placed(prefill="" if prefill is decode else prefill.incarnation, decode=decode.incarnation)

    def _pairs(
        self, place: Place, arrived_at: float, view: ClusterView, now: float
    ) -> list[tuple[Instance, list[Instance]]]:
        """Each usable decode instance with the instances that can run prompts for it."""
        decodes = _usable(place, arrived_at, view.ready(ServiceKind.DECODE_WORKER, now))
        prefills = _usable(place, arrived_at, view.ready(ServiceKind.PREFILL_WORKER, now))
        pairs: list[tuple[Instance, list[Instance]]] = []
        for decode in decodes:
            same = [p for p in prefills if p.presence.model_fingerprint == decode.presence.model_fingerprint]
            # A prefill worker is preferred: a prompt run at a decode instance slows all that decodes there.
            runners = same or ([decode] if decode.presence.runs_prompts else [])
            if runners:
                pairs.append((decode, runners))
        return pairs

    def _takes_prompts(self, instance: Instance) -> bool:
        return instance.num_waiting_tokens < self.max_waiting_tokens


def _usable(place: Place, arrived_at: float, instances: Sequence[Instance]) -> list[Instance]:
    named = [i for i in instances if not place.model or i.presence.model == place.model]
    others = [i for i in named if i.incarnation not in place.exclude]
    if others:
        return others
    # The excluded ones failed this request, perhaps because they died. Who reported after it came here is
    # alive, and better than nobody.
    return [i for i in named if i.heard_at > arrived_at]


def _could_fit(place: Place, instance: Instance) -> bool:
    limit = instance.presence.max_model_len
    return (not limit or place.num_tokens < limit) and (
        blocks_for(place.num_tokens, instance.block_size) <= instance.num_blocks
    )


def _has_room(place: Place, instance: Instance) -> bool:
    return blocks_for(place.num_tokens, instance.block_size) <= instance.num_free_blocks
