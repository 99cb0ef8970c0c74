"""A model as one function of its tokens: what paged, batched and distributed runs are compared with."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from libs.model.model import Model


class DenseCache:
    """Keys and values of one sequence, whole: per layer `[num_kv_heads, num_tokens, head_dim]`."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.num_tokens = 0

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends `[T, num_kv_heads, head_dim]` and gives all keys and values of the layer."""
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        known = self._layers[layer]
        if known is not None:
            k, v = torch.cat((known[0], k), dim=1), torch.cat((known[1], v), dim=1)
        self._layers[layer] = k, v
        return k, v


def hidden_states(model: Model, steps: Sequence[Sequence[int]], caches: Sequence[DenseCache]) -> torch.Tensor:
    """What `Model.logits` takes, `[sum of T, hidden_size]`, of each sequence's next tokens in turn.

    `caches` hold what came before, one per sequence, and are extended.
    """
    lengths = [len(step) for step in steps]
    starts = [cache.num_tokens for cache in caches]
    spans = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    rotary = model.rotary(torch.cat(spans).to(model.device))
    token_ids = torch.tensor([token for step in steps for token in step], dtype=torch.int64)
    hidden = model.embed(token_ids.to(model.device))
    for layer in range(model.config.num_layers):
        q, k, v = (torch.split(part, lengths) for part in model.attention_inputs(layer, hidden, rotary))
        attended = [_attend(layer, *one) for one in zip(q, k, v, caches, strict=True)]
        hidden = model.mlp(layer, model.attention_output(layer, hidden, torch.cat(attended)))
    for cache, length in zip(caches, lengths, strict=True):
        cache.num_tokens += length
    return hidden


def forward(model: Model, steps: Sequence[Sequence[int]], caches: Sequence[DenseCache]) -> torch.Tensor:
    """float32 logits `[sum of T, vocab_size]` after all those tokens."""
    return model.logits(hidden_states(model, steps, caches))


def last_logits(model: Model, steps: Sequence[Sequence[int]], caches: Sequence[DenseCache]) -> torch.Tensor:
    """float32 logits `[num_sequences, vocab_size]` after the last of each sequence's next tokens."""
    ends = torch.tensor([len(step) for step in steps]).cumsum(0) - 1
    return model.logits(hidden_states(model, steps, caches)[ends.to(model.device)])


def _attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: DenseCache) -> torch.Tensor:
    """Causal attention `[T, num_heads, head_dim]` of one sequence's new tokens."""
    keys, values = cache.extend(layer, k, v)
    positions = torch.arange(keys.shape[1], device=q.device)
    sees = positions[None] <= positions[-q.shape[0] :, None]
    attended = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=sees, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def prompt_logits(model: Model, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 logits `[T, vocab_size]` after each token of one sequence."""
    return model.logits(hidden_states(model, [token_ids], [DenseCache(model.config.num_layers)]))


def greedy_tokens(model: Model, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """After each prompt, the `num_tokens` most likely tokens one by one; ends of text do not end it."""
    caches = [DenseCache(model.config.num_layers) for _ in prompts]
    chosen: list[list[int]] = [[] for _ in prompts]
    steps = [list(prompt) for prompt in prompts]
    for _ in range(num_tokens):
        steps = [[token] for token in last_logits(model, steps, caches).argmax(-1).tolist()]
        for tokens, step in zip(chosen, steps, strict=True):
            tokens.extend(step)
    return chosen
