"""One thread per process: the suite starts several at a time, and threads that wait for each other's cores cost minutes.

A suite started by nohup, or in the background of a script, ignores SIGHUP or SIGINT, and so would all that it starts.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
