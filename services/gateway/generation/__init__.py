"""Generating requests: from fields to sequences, over the mesh, to the answer."""
