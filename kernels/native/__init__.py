"""The C++ kernels of this package, compiled on first use for the machine they run on."""
