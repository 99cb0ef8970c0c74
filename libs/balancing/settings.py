"""What the control loop may do, and when it begins to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancingSettings:
    """Utilizations are shares of a device, from 0 to about 1. What nobody tunes is a constant."""

    acts: bool = True
    """False: it only says what it would do."""
    delta_hi: float = 0.25
    """Balancing begins where utilizations lie further apart than this."""
    delta_lo: float = 0.1
    """And ends where they lie closer together than this."""
    max_moves: int = 2
    """Migrations under way in the mesh at once."""
    moves_layers: bool = True
    moves_heads: bool = True
    flips_roles: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where the thresholds contradict each other."""
        if not 0 <= self.delta_lo < self.delta_hi:
            raise ValueError(
                f"delta_lo {self.delta_lo} must be below delta_hi {self.delta_hi}, or the loop swings"
            )
