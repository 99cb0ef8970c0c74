"""Memory of dropped weights, back to the operating system."""

import ctypes


def give_back_freed_memory() -> bool:
    """Returns what malloc keeps for reuse after weights were dropped; whether this machine's libc can.

    glibc keeps freed blocks of some MB in its heap, so without this a process that gave layers away stays as
    large as before. It takes a few milliseconds, in which other threads may wait for memory: call it in a
    thread of its own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
