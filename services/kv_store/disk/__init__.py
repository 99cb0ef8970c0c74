"""The tier of the KV store that lies on disk."""
