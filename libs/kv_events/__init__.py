"""KV events: what KV is where, published by those who hold it, followed by those who choose among them."""
