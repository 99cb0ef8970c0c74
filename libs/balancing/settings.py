"""What the control loop is told. Utilizations are shares of a device, from 0 to about 1."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancingSettings:
    """Thresholds, weights and budgets of the loop; the coordinator's settings say what each is for."""

    acts: bool = True
    """False: it only says what it would do."""
    compute_weight: float = 0.5
    memory_weight: float = 0.4
    queue_weight: float = 0.1
    max_queue: float = 2.0
    queue_seconds: float = 1.0
    smoothing_seconds: float = 1.5

    delta_hi: float = 0.25
    delta_lo: float = 0.1
    delta_layer: float = 0.4
    memory_pressure: float = 0.8
    min_gain: float = 0.03
    cooldown_seconds: float = 4.0
    retry_seconds: float = 30.0
    calm_rounds: int = 60
    calm_utilization: float = 0.4

    horizon_seconds: float = 30.0
    benefit_margin: float = 0.1
    move_impact: float = 0.2
    overhead_impact: float = 0.25
    max_move_seconds: float = 10.0
    max_moves: int = 2
    link_bytes_per_second: float = 1e9
    link_latency_seconds: float = 2e-4
    attention_share: float = 0.25

    moves_layers: bool = True
    moves_heads: bool = True
    moves_weights: bool = True
    flips_roles: bool = False
    flip_seconds: float = 10.0
    flip_cooldown_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError where the thresholds contradict each other."""
        if not 0 <= self.delta_lo < self.delta_hi:
            raise ValueError(
                f"delta_lo {self.delta_lo} must be below delta_hi {self.delta_hi}, or the loop swings"
            )
        if self.cooldown_seconds < 2 * self.smoothing_seconds:
            raise ValueError(
                f"cooldown_seconds {self.cooldown_seconds} must be at least twice smoothing_seconds "
                f"{self.smoothing_seconds}: sooner the load that is seen is still that from before the move"
            )
