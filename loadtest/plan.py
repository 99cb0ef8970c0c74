"""From the command line to what is sent and when. Raises TraceError, OSError."""

import argparse
from collections.abc import Iterator

from loadtest import arrivals
from loadtest.conversation import Arrival, arrivals_of, within
from loadtest.prompts import PromptShape, conversations
from loadtest.trace import ReplayRules, read_trace, replay


def planned(options: argparse.Namespace) -> Iterator[Arrival]:
    """What is sent and when, by the command line alone."""
    if options.trace is not None:
        # Read as a whole before the first request: a bad line must not end a run in its middle.
        sent = replay(read_trace(options.trace), _replay_rules(options), options.seed)
    else:
        shape = PromptShape(
            prefix_tokens=options.prefix_tokens,
            suffix_tokens=options.suffix_tokens,
            output_tokens=options.output_tokens,
            spread=options.spread,
            num_prefixes=options.num_prefixes,
            zipf=options.zipf,
            num_turns=options.turns,
            think_seconds=options.think,
        )
        sent = arrivals_of(_times(options), conversations(shape, options.seed))
    return within(sent, duration_seconds=options.duration, num_conversations=options.num)


def _times(options: argparse.Namespace) -> Iterator[float]:
    match options.arrivals:
        case "constant":
            return arrivals.constant(options.rate)
        case "poisson":
            return arrivals.poisson(options.rate, options.seed)
        case "bursty":
            return arrivals.bursty(options.rate, options.burstiness, options.seed)
        case _:
            return arrivals.on_off(options.rate, options.on, options.off, options.seed)


def _replay_rules(options: argparse.Namespace) -> ReplayRules:
    return ReplayRules(
        block_tokens=options.block_tokens,
        speed=options.speed,
        length_scale=options.length_scale,
        max_input_tokens=options.max_input_tokens,
        max_output_tokens=options.max_output_tokens,
        id_range=tuple(options.token_ids) if options.token_ids else None,
    )
