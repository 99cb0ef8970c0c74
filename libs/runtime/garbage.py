"""Garbage collection of a program that is ready: what it holds then it holds for life."""

import gc


def freeze_garbage() -> None:
    """Collect once, and keep what is left out of all later collections.

    The modules of torch and transformers alone are 200 000 objects: a full collection visits them all, under
    the GIL, for a tenth of a second and more, while every stream of the process stands still. For whole
    programs only: cycles among what lives now are never freed.
    """
    gc.collect()
    gc.freeze()
