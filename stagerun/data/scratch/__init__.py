"""Copies of LMDBs on a node's own fast disk: made once, checked by digest, used again by later jobs.

    SCRATCH/stagerun-UID/               mode 0700: another user's data must not pass for ours
        lock                            held (flock) while room is counted, taken and made
        NAME/                           a complete copy; shared lock on the folder by each process that reads it
            data.mdb, stagerun-index.safetensors
            stagerun-copy.json          what it is a copy of, and the sha256 of each 64 MiB of data.mdb
            suspect                     there if it was found unreadable: every block is compared before it is used again
        NAME.partial/                   a copy being made, or interrupted; `blocks` lists what is written and checked
        NAME.lock                       held by the process that makes or checks the copy

NAME says which state of which LMDB it is (`look`): a changed source is another name. The kernel drops every lock with the
process that held it, so that a killed job blocks no other, and the next one continues from what it had copied. A folder's time of change
is when it was last used; it decides only which of the unused copies goes first when room is needed. Nothing is touched but folders with
stagerun's manifest below stagerun-UID.
"""

from stagerun.data.scratch.layout import CopyStopped, Found, Original, look
from stagerun.data.scratch.staging import Copy, Progress, stage

__all__ = ["Copy", "CopyStopped", "Found", "Original", "Progress", "look", "stage"]
