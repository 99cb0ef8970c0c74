"""What a listener hears of one post of the engine's thread."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from libs.engine.engine_thread import Post
from libs.engine.outputs import EngineListener, LayerOutput, TokenOutput


def listener_calls(
    listener: EngineListener, post: Post, aborting: Collection[str], release: Callable[[LayerOutput], None]
) -> list[Callable[[], None]]:
    """In order: KV first, then tokens, ends last. Nothing of what is being aborted, whose KV is released."""
    calls = list[Callable[[], None]]()
    for layer in post.layers:
        if layer.sequence_id in aborting:
            release(layer)
        else:
            calls.append(partial(listener.on_layer, layer))
    if post.tokens:
        tokens: Sequence[TokenOutput] = post.tokens
        if aborting:
            tokens = [token for token in tokens if token.sequence_id not in aborting]
        if tokens:
            calls.append(partial(listener.on_tokens, tokens))
    wanted = (token for token in post.prompts_done if token.sequence_id not in aborting)
    calls += [partial(listener.on_prompt_done, token) for token in wanted]
    failed = (failure for failure in post.failed if failure.sequence_id not in aborting)
    calls += [partial(listener.on_failed, failure) for failure in failed]
    if post.stored or post.removed:
        calls.append(partial(listener.on_names, post.stored, post.removed))
    return calls
