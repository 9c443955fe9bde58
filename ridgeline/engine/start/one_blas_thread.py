"""Imports numpy with a single BLAS thread: for the engine process, before anything else imports numpy.

numpy's OpenBLAS starts a thread for every CPU when it is loaded, and each spins for a while before it
sleeps. That takes CPU time from the starting server and engine, for matrix products the engine never uses.
"""

import os

VARIABLE = "OPENBLAS_NUM_THREADS"
if VARIABLE in os.environ:
    import numpy
else:
    os.environ[VARIABLE] = "1"
    import numpy

    # OpenBLAS reads it only once. torch may bring its own BLAS, which should use every CPU.
    del os.environ[VARIABLE]

__all__ = ["numpy"]
