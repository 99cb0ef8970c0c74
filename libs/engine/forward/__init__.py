"""A step on its way through the layers, and KV on its way in and out."""
