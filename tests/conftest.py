"""One thread per process: the suite starts several at a time, and threads that wait for each other's cores cost minutes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
