"""What one request asks for and how it can end: plain data, no I/O."""
