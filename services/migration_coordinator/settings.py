"""Settings of the migration coordinator."""

from typing import Annotated

from msgspec import Meta

from libs.balancing.settings import BalancingSettings
from libs.config.errors import BadSetting
from libs.runtime.settings import RuntimeSettings


class CoordinatorSettings(RuntimeSettings, frozen=True, kw_only=True):
    """Moves layers and KV heads between workers. Several may run side by side; one of them leads."""

    automatic: Annotated[
        bool, Meta(description="the loop moves by itself; else it only watches, and moves are by hand")
    ] = True
    round_seconds: Annotated[float, Meta(description="time between two rounds of the loop", gt=0, le=10)] = (
        0.5
    )
    delta_hi: Annotated[
        float,
        Meta(description="balancing begins where utilizations lie further apart than this", gt=0, le=2),
    ] = 0.25
    delta_lo: Annotated[
        float, Meta(description="balancing ends where they lie closer together; below delta-hi", ge=0, le=2)
    ] = 0.1
    max_moves: Annotated[int, Meta(description="moves under way in the mesh at once", ge=1, le=64)] = 2
    move_deadline_seconds: Annotated[
        float, Meta(description="a move that has not switched by then is rolled back", gt=0)
    ] = 60.0
    moves_layers: Annotated[bool, Meta(description="the loop moves whole layers")] = True
    moves_heads: Annotated[bool, Meta(description="the loop moves KV heads")] = True
    flips_roles: Annotated[
        bool, Meta(description="the loop lets workers change between prefill and decode")
    ] = False


def balancing_of(settings: CoordinatorSettings) -> BalancingSettings:
    """What of it the loop is told. Raises BadSetting where thresholds contradict each other."""
    try:
        return BalancingSettings(
            acts=settings.automatic,
            delta_hi=settings.delta_hi,
            delta_lo=settings.delta_lo,
            max_moves=settings.max_moves,
            moves_layers=settings.moves_layers,
            moves_heads=settings.moves_heads,
            flips_roles=settings.flips_roles,
        )
    except ValueError as error:
        raise BadSetting("--delta-hi, --delta-lo", "these", str(error)) from error
