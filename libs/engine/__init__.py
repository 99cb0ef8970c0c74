"""Paged KV pool, batch scheduler, sampler, runner, and the thread that keeps torch off the event loop."""
