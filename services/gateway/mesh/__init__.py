"""The mesh as this gateway hears it: its page, its placements, and migrations by hand."""
