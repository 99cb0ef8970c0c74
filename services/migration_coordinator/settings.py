"""Settings of the migration coordinator."""

from typing import Annotated

import msgspec
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
    compute_weight: Annotated[
        float, Meta(description="of a device's busy share in its utilization", ge=0)
    ] = 0.5
    memory_weight: Annotated[
        float, Meta(description="of the taken share of its KV blocks in its utilization", ge=0)
    ] = 0.4
    queue_weight: Annotated[float, Meta(description="of its queue in its utilization", ge=0)] = 0.1
    max_queue: Annotated[float, Meta(description="a longer queue weighs no more than this", gt=0)] = 2.0
    queue_seconds: Annotated[
        float, Meta(description="seconds of queued work that count as a queue of 1", gt=0)
    ] = 1.0
    smoothing_seconds: Annotated[float, Meta(description="loads are averaged over about this time", gt=0)] = (
        1.5
    )
    delta_hi: Annotated[
        float,
        Meta(description="balancing begins where utilizations lie further apart than this", gt=0, le=2),
    ] = 0.25
    delta_lo: Annotated[
        float, Meta(description="balancing ends where they lie closer together; below delta-hi", ge=0, le=2)
    ] = 0.1
    delta_layer: Annotated[
        float,
        Meta(description="from this gap on layers move also where memory is what weighs", ge=0),
    ] = 0.4
    memory_pressure: Annotated[
        float, Meta(description="memory is short on a device where more than this share is taken", ge=0)
    ] = 0.8
    min_gain: Annotated[
        float,
        Meta(description="a move has to lower the greater utilization of its two devices by so much", ge=0),
    ] = 0.03
    cooldown_seconds: Annotated[
        float,
        Meta(description="both devices of a move rest for so long; at least twice smoothing-seconds", ge=0),
    ] = 4.0
    retry_seconds: Annotated[
        float,
        Meta(description="after a move that was denied or failed, none between these workers begins", ge=0),
    ] = 30.0
    calm_rounds: Annotated[
        int,
        Meta(description="after so many rounds below delta-lo the oldest move is given back", ge=1),
    ] = 60
    calm_utilization: Annotated[
        float, Meta(description="no device is to exceed this by what is given back", ge=0)
    ] = 0.4
    horizon_seconds: Annotated[
        float, Meta(description="over how long a move has to pay for itself", gt=0)
    ] = 30.0
    benefit_margin: Annotated[
        float, Meta(description="its benefit has to exceed its cost by this share", ge=0)
    ] = 0.1
    move_impact: Annotated[
        float, Meta(description="share of a device that a move takes while it goes on", ge=0)
    ] = 0.2
    overhead_impact: Annotated[
        float,
        Meta(description="what a second by which steps get longer costs, in seconds of a device", ge=0),
    ] = 0.25
    max_move_seconds: Annotated[
        float, Meta(description="moves that are expected to take longer do not begin", gt=0)
    ] = 10.0
    max_moves: Annotated[int, Meta(description="moves under way in the mesh at once", ge=1, le=64)] = 2
    move_deadline_seconds: Annotated[
        float, Meta(description="a move that has not switched by then is rolled back", gt=0)
    ] = 60.0
    expected_link_bytes_per_second: Annotated[
        float, Meta(description="between workers, for predictions", gt=0)
    ] = 1e9
    expected_link_latency_seconds: Annotated[
        float, Meta(description="between workers, one way, for predictions", ge=0)
    ] = 2e-4
    attention_share: Annotated[
        float, Meta(description="part of a step's work that is attention, for predictions", gt=0, le=1)
    ] = 0.25
    moves_layers: Annotated[bool, Meta(description="the loop moves whole layers")] = True
    moves_heads: Annotated[bool, Meta(description="the loop moves KV heads")] = True
    moves_weights: Annotated[
        bool, Meta(description="the loop may move layers with their weights, where memory is short")
    ] = True
    flips_roles: Annotated[
        bool, Meta(description="the loop lets workers change between prefill and decode")
    ] = False
    flip_seconds: Annotated[
        float, Meta(description="how long a worker is expected to be away to change its role", ge=0)
    ] = 10.0
    flip_cooldown_seconds: Annotated[float, Meta(description="time between two changes of roles", ge=0)] = (
        60.0
    )
    stale_after_seconds: Annotated[
        float, Meta(description="a worker whose load reports stay out for longer is not used", gt=0)
    ] = 3.0
    max_history: Annotated[int, Meta(description="moves that are remembered", ge=1, le=1000)] = 200


def balancing_of(settings: CoordinatorSettings) -> BalancingSettings:
    """What of it the loop is told. Raises BadSetting where thresholds contradict each other."""
    told = {
        name: getattr(settings, name)
        for name in msgspec.structs.asdict(settings)
        if name in BalancingSettings.__dataclass_fields__
    }
    try:
        return BalancingSettings(
            **told,
            acts=settings.automatic,
            link_bytes_per_second=settings.expected_link_bytes_per_second,
            link_latency_seconds=settings.expected_link_latency_seconds,
        )
    except ValueError as error:
        raise BadSetting("--delta-hi, --delta-lo, --cooldown-seconds", "these", str(error)) from error
