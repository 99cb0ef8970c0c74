"""Counts the KV of one sequence in: only when every block of every layer is there may it be used. Pure."""


class OutOfPlace(Exception):
    """Blocks or a layer that the sequence does not have."""


class ReceivedBlocks:
    """One bit per block and layer. The first `num_cached_blocks` are here already and count as arrived."""

    def __init__(self, num_layers: int, num_blocks: int, num_cached_blocks: int = 0) -> None:
        self.num_blocks, self.num_cached_blocks = num_blocks, num_cached_blocks
        self._whole = (1 << num_blocks) - 1
        self._arrived = [(1 << num_cached_blocks) - 1] * num_layers

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return all(layer == self._whole for layer in self._arrived)

    @property
    def num_missing(self) -> int:
        """Blocks that have not arrived, over all layers."""
        return sum((self._whole & ~layer).bit_count() for layer in self._arrived)

    def check(self, layer: int, num_layers: int, first_block: int, num_blocks: int) -> None:
        """Raises OutOfPlace where these cannot be blocks of this sequence."""
        is_block = first_block >= 0 and num_blocks > 0 and first_block + num_blocks <= self.num_blocks
        is_layer = layer >= 0 and num_layers > 0 and layer + num_layers <= len(self._arrived)
        if not is_block or not is_layer:
            raise OutOfPlace(
                f"blocks {first_block} to {first_block + num_blocks - 1} of layers {layer} to "
                f"{layer + num_layers - 1}, of {self.num_blocks} blocks and {len(self._arrived)} layers"
            )

    def arrive(self, layer: int, num_layers: int, first_block: int, num_blocks: int) -> None:
        """These are written and verified. Raises OutOfPlace."""
        self.check(layer, num_layers, first_block, num_blocks)
        for arrived in range(layer, layer + num_layers):
            self._arrived[arrived] |= ((1 << num_blocks) - 1) << first_block
