"""The binary tree over the logical workers that `determinism: ELASTIC` adds up along: which nodes there are, who holds which.

The node over [low, high) splits at low + the largest power of two below its width. It depends on nothing but the number of
logical workers.
"""

from collections.abc import Sequence

Node = tuple[int, int]
"""[low, high): the logical workers below it."""


def split(low: int, high: int) -> int:
    """Where the tree's node over [low, high), at least 2 wide, is cut in two."""
    return low + (1 << ((high - low - 1).bit_length() - 1))


def is_node(low: int, high: int, total: int, middle: int) -> bool:
    """Whether the tree over range(total) has a node [low, high) whose children meet at `middle`."""
    a, b = 0, total
    while (a, b) != (low, high):
        if b - a <= 1:
            return False
        cut = split(a, b)
        if high <= cut:
            b = cut
        elif low >= cut:
            a = cut
        else:
            return False
    return high - low > 1 and split(low, high) == middle


def cover(run: range, total: int) -> list[Node]:
    """The largest nodes of the tree over range(total) that together make up `run`, in order."""

    def walk(low: int, high: int) -> list[Node]:
        if run.start <= low and high <= run.stop:
            return [(low, high)]
        if high <= run.start or run.stop <= low:
            return []
        cut = split(low, high)
        return walk(low, cut) + walk(cut, high)

    return walk(0, total)


def push(stack: list[Node], node: Node, total: int) -> int:
    """Puts a node on a stack of neighbours and joins it with its left sibling for as long as that is there; how often."""
    stack.append(node)
    joined = 0
    while len(stack) >= 2 and is_node(stack[-2][0], stack[-1][1], total, middle=stack[-1][0]):
        _, high = stack.pop()
        stack[-1] = (stack[-1][0], high)
        joined += 1
    return joined


def depth(run: range, total: int) -> int:
    """The most nodes that lie on the stack while the logical workers of `run` are pushed, one after the other, where one
    whose left sibling is there takes no place of its own."""
    stack: list[Node] = []
    most = 0
    for k in run:
        before = len(stack)
        most = max(most, before + (push(stack, (k, k + 1), total) == 0))
    return most


def additions(nodes: Sequence[Node], total: int) -> list[tuple[int, int]]:
    """The tree's additions that are left when `nodes`, in order and without a gap, are sums already: (into, from), as indices of
    `nodes`. With nodes that make up range(total), the whole sum is in the first in the end."""
    stack: list[Node] = []
    places: list[int] = []
    answer = []
    for index, node in enumerate(nodes):
        places.append(index)
        for _ in range(push(stack, node, total)):
            right = places.pop()
            answer.append((places[-1], right))
    return answer
