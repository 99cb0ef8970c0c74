"""How much KV may be on its way out at once."""

from libs.engine.outputs import LayerOutput


class HandOverBudget:
    """Counts what was handed out and not released. When nothing is on its way, one block may always leave."""

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._block_bytes = block_bytes
        self._out: set[LayerOutput] = set()
        self._out_bytes = 0

    @property
    def num_blocks(self) -> int:
        """Blocks, all layers of each, that may leave now."""
        left = max(0, self._limit_bytes - self._out_bytes) // self._block_bytes
        return max(left, 1) if not self._out else left

    @property
    def out_bytes(self) -> int:
        """Handed out and not released."""
        return self._out_bytes

    def take(self, output: LayerOutput) -> None:
        """One more is on its way."""
        self._out.add(output)
        self._out_bytes += output.blocks.nbytes

    def release(self, output: LayerOutput) -> None:
        """It arrived, or nobody wants it. Idempotent."""
        if output in self._out:
            self._out.remove(output)
            self._out_bytes -= output.blocks.nbytes
