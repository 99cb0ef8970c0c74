"""The KV pool: its bytes, its layout, and which blocks are whose."""
