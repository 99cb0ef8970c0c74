"""Whether a request can be placed now, and on which pair: pure."""

from dataclasses import dataclass
from enum import Enum

from libs.bus.messages.generation import Place
from libs.bus.messages.presence import ServiceKind
from libs.kv_events.view import KvView
from libs.routing.candidates import Draw
from services.router.choosing import Choosing, Match, Roomy
from services.router.room import (
    could_hold,
    free_blocks,
    has_seat,
    needed_blocks,
    usable,
    waiting_tokens,
    with_partner,
)
from services.router.view import ClusterView


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

    choosing: Choosing
    max_waiting_tokens: int
    """A prefill instance with more prompt tokens queued gets no further prompts."""
    max_expected_output_tokens: int
    """Room kept free for an answer at most, however long answers are on average."""

    def match(
        self, place: Place, arrived_at: float, view: ClusterView, held: KvView, draw: Draw, now: float
    ) -> Match | Obstacle:
        """The pair for this request, or why there is none."""
        known = view.instances
        decodes = usable(place, arrived_at, ServiceKind.DECODE_WORKER, view, now)
        prefills = usable(place, arrived_at, ServiceKind.PREFILL_WORKER, view, now)
        anybody = known.is_prefill | known.is_decode
        if not len(with_partner(decodes, prefills, known, anybody, anybody)):
            return Obstacle.NO_PAIR
        fits = could_hold(place, known)
        prefills = prefills[fits[prefills]]  # too small for it: as if they were not there
        if not len(with_partner(decodes, prefills, known, fits, fits)):
            return Obstacle.TOO_LONG
        seated = fits & has_seat(known)
        needed = needed_blocks(place, known, self.max_expected_output_tokens)
        free = free_blocks(known, self.max_expected_output_tokens)
        may_run = seated & (waiting_tokens(known) < self.max_waiting_tokens)
        roomy = with_partner(decodes, prefills, known, seated & (needed <= free), may_run)
        if not len(roomy):
            return Obstacle.NO_ROOM
        return self.choosing.choose(
            place, Roomy(roomy, prefills[may_run[prefills]], needed, free), view, held, draw
        )
