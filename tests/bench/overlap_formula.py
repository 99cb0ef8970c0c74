"""What remains of a fetch when layer l+1 travels while layer l computes."""


def overlapped_seconds(
    fetch_per_layer: float, compute_per_layer: float, num_layers: int, *, num_buffers: int = 2
) -> float:
    """Seconds until the last layer is computed, with `num_buffers` layers' worth of memory to fetch into.

    Two buffers are as good as many while layers are alike: `f + (L-1)*max(f, c) + c`. With one, nothing
    overlaps: `L*(f + c)`. Source: BanaServe, layer-wise overlapped transmission.
    Raises ValueError for negative times, or no layer or buffer.
    """
    if fetch_per_layer < 0 or compute_per_layer < 0 or num_layers < 1 or num_buffers < 1:
        raise ValueError(
            "times cannot be negative, and there is a layer and a buffer at least: got "
            f"{fetch_per_layer} s fetch, {compute_per_layer} s compute, {num_layers} layers, "
            f"{num_buffers} buffers"
        )
    if num_buffers == 1:
        return num_layers * (fetch_per_layer + compute_per_layer)
    slower = max(fetch_per_layer, compute_per_layer)
    return fetch_per_layer + (num_layers - 1) * slower + compute_per_layer
