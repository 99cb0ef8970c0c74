"""What a KV store holds where, read from its metrics."""

from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier of one store."""

    tier: str
    num_blocks: int
    num_bytes: int
    capacity_bytes: int
    num_hit_blocks: int
    """Blocks found here, not in a faster tier, since the store started."""
    hit_share: float | None
    """Of all blocks that the store was asked for; None: of none."""
    is_paused: bool
    """It takes no writes for now."""


def tiers_of(exposition: str) -> list[TierFigures]:
    """From Prometheus's text, the fastest tier first; empty where it tells of none. Raises ValueError."""
    told: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            told[sample.name.removeprefix("kvmesh_store_"), sample.labels.get("tier", "")] = sample.value
    num_asked = told.get(("queried_blocks_total", ""), 0)
    return [
        TierFigures(
            tier=tier,
            num_blocks=int(num_blocks),
            num_bytes=int(told.get(("tier_bytes", tier), 0)),
            capacity_bytes=int(told.get(("tier_capacity_bytes", tier), 0)),
            num_hit_blocks=int(told.get(("tier_hits_total", tier), 0)),
            hit_share=told.get(("tier_hits_total", tier), 0) / num_asked if num_asked else None,
            is_paused=tier == "disk" and told.get(("disk_paused", ""), 0) > 0,
        )
        for (name, tier), num_blocks in sorted(told.items(), key=lambda item: item[0][1] != "dram")
        if name == "tier_blocks"
    ]


def as_json(figures: list[TierFigures]) -> list[dict[str, Any]]:
    """For --output json."""
    return [asdict(tier) for tier in figures]
