"""Imports numpy with a single BLAS thread: for the engine process, before anything else there imports numpy.

numpy's OpenBLAS starts a thread for every CPU as it is loaded, and each spins for a while before it sleeps:
on CPUs that the starting front and engine need, for matrix products that the engine never asks numpy for.
"""

import os

VARIABLE = "OPENBLAS_NUM_THREADS"
if VARIABLE in os.environ:
    import numpy
else:
    os.environ[VARIABLE] = "1"
    import numpy

    # OpenBLAS has read it, once and for all. torch may bring a BLAS of its own, which is to use every CPU.
    del os.environ[VARIABLE]

__all__ = ["numpy"]
