"""Token deltas on their way to gateways, kept while the broker is away. Pure.

Each batch is what one step has for one gateway. While all is well a batch is a frame. When frames cannot be
sent, batches of one gateway are joined; beyond the bound the oldest are dropped: the gateway sees the gap and
replays.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from libs.bus.messages.generation import TokenDelta

MAX_FRAME_DELTAS = 512
"""With the most logprobs a delta takes about 0.6 KiB; a frame stays below a broker's usual 1 MiB."""


class TokenOutbox:
    """Batches by gateway, in order; gateways take turns."""

    def __init__(self, max_deltas: int) -> None:
        self._max_deltas = max_deltas
        self._batches: OrderedDict[str, deque[list[TokenDelta]]] = OrderedDict()
        self.num_deltas = 0
        self.num_dropped = 0

    def add(self, gateway: str, deltas: Sequence[TokenDelta]) -> None:
        """One step's deltas for one gateway."""
        self._batches.setdefault(gateway, deque()).append(list(deltas))
        self.num_deltas += len(deltas)
        while self.num_deltas > self._max_deltas:
            self._drop_oldest()

    def take(self) -> tuple[str, list[TokenDelta]] | None:
        """The next frame's gateway and deltas; None when nothing is left."""
        if not self._batches:
            return None
        gateway, batches = next(iter(self._batches.items()))
        self._batches.move_to_end(gateway)
        deltas = batches.popleft()
        while batches and len(deltas) + len(batches[0]) <= MAX_FRAME_DELTAS:
            deltas += batches.popleft()
        if not batches:
            del self._batches[gateway]
        self.num_deltas -= len(deltas)
        return gateway, deltas

    def put_back(self, gateway: str, deltas: list[TokenDelta]) -> None:
        """These could not be sent; they go before what came since."""
        self._batches.setdefault(gateway, deque()).appendleft(deltas)
        self.num_deltas += len(deltas)

    def forget(self, gateway: str) -> None:
        """This gateway is gone."""
        self.num_deltas -= sum(map(len, self._batches.pop(gateway, ())))

    def _drop_oldest(self) -> None:
        # The gateway that is furthest behind loses; others may be perfectly able to listen.
        gateway = max(self._batches, key=lambda g: len(self._batches[g]))
        dropped = self._batches[gateway].popleft()
        if not self._batches[gateway]:
            del self._batches[gateway]
        self.num_deltas -= len(dropped)
        self.num_dropped += len(dropped)
