"""The chain of a stage's proofs (`audit_param { proof_iter }`). Pure."""

import hashlib
from collections.abc import Sequence


def chained(before: str, iter: int, state: str) -> str:
    """The next link of a chain of proofs: BLAKE2b of the link before ('' at its start), the iteration and the state's digest, in hex."""
    return hashlib.blake2b(f"{before} {iter} {state}".encode(), digest_size=16).hexdigest()


def broken_link(before: str, proofs: Sequence[tuple[int, str, str]]) -> int | None:
    """The iteration of the first of (iteration, state, chain), in order, that does not follow from what is before it."""
    for iter, state, chain in proofs:
        if chained(before, iter, state) != chain:
            return iter
        before = chain
    return None
