"""How long, how many bytes: one calibrated model for workers, router and simulator. Pure; needs numpy
alone."""
