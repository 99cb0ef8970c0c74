"""Load for any OpenAI-compatible server, over HTTP only: arrivals, prompts, traces, a client, a report."""
