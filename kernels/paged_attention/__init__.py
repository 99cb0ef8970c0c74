"""Attention over a paged KV cache, for ragged batches that mix prompt chunks and single tokens."""
