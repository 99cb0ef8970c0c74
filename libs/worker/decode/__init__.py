"""Sequences that generate here: KV received, tokens streamed, blocks of what ended kept in the KV stores."""
