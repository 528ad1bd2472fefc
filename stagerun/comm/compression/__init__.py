"""Compressed gradients: what goes over the wire in the place of a vector, and what it adds to the sum.

A reducer makes one operator per tensor with `make` (ENTIRE_MODEL: one of shape [n]), and drives it once per iteration:

    operator = make(Method.TOP_K, parameter.shape, ratio=0.01, memory=Memory.RESIDUAL)
    steps = operator.steps(vectors, senders, Draw(seed, iter, -1, item), out, state)
    messages = next(steps)                   # round 1: one message per own sender
    try:
        while True:
            received = ...                   # of all senders of the job, in their order; the own ones among them
            messages = steps.send(received)  # the next round's messages
    except StopIteration as ended:
        new_state = ended.value

- `vectors`: what this rank's own senders have to send (gradient plus residual), each contiguous, 1-D, float32 or float64. With a memory
  each is turned into its sender's new residual, c - d; without, what it holds afterwards is of no use.
- `senders`: the numbers of the own senders, growing. A sender's number is its place in `received`.
- `out`: [n], like the vectors, zeros to begin with. At the end it holds the sum of all senders' d, added in their order: the same bits on
  every rank.
- `draw`: of this seed, iteration and tensor. It has the sender -1; operators put their senders in.
- `state`: None at first, then what the iteration before returned: a tensor that is the same on all ranks, and belongs into snapshots. Most
  methods have none and return None. The one given is never changed, so that an update that isn't made keeps it, as it keeps the residuals.

`operator.sizes(n, element_size)` has an entry for each round: the bytes of every sender's message, or None if they vary; lengths must
be sent first then. A message is uint8 [bytes], on the vectors' device. It may have no bytes, is never longer than the vector, and needn't
be aligned when it is received. It stays as it is after the generator has gone on. A length that can't be raises ValueError.

Operators keep nothing between iterations and may be shared by tensors of the same shape. Work is done in the calling thread, on a CPU in
pieces for which torch starts no threads of its own.

What is NaN or infinite in a vector is not finite in `out` somewhere. Residuals and state are of no use then.
"""

from stagerun.comm.compression.methods import BUILT, make
from stagerun.comm.compression.operator import Draw, Operator

__all__ = ["BUILT", "Draw", "Operator", "make"]
