"""The mesh on a virtual clock: a trace is replayed through the live policies of routing and of the KV store.

`python -m libs.simulator --help` says how to ask it.
"""
