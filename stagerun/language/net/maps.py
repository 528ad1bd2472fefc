"""Layers that put maps together, take them apart or give them another shape."""

from dataclasses import replace
from itertools import pairwise

from stagerun.base import net
from stagerun.language.lexer import shown
from stagerun.language.net.given import MOST_AXES, Dims, Given, Made, Size, alike, text, volume
from stagerun.language.view import View

# In a shape that is being made: the axis of the images, one that takes what is left, one that can't be.
IMAGE, INFER, BAD = -3, -1, -2


def concat(given: Given) -> Made | None:
    view = given.inside("concat_param")
    known = [(name, dims) for name, dims in zip(given.bottoms, given.dims, strict=True) if dims is not None]
    if len(known) < len(given.dims):
        return None
    first_name, first = known[0]
    axis = given.axis(view, "axis", first, "concat_dim")
    if axis is None:
        return None
    at = axis - 1
    for name, dims in known[1:]:
        if len(dims) != len(first) or not alike(dims[:at] + dims[at + 1 :], first[:at] + first[at + 1 :]):
            message = (
                f"bottom {shown(name)}, {text(dims)}, and {shown(first_name)}, {text(first)}, differ beside axis {axis}"
            )
            given.fail(message, "all axes but that one have to be alike")
            return None
    sizes = [dims[at] for _, dims in known]
    total = sum(n for n in sizes if n is not None) if None not in sizes else None
    others = [next((d[i] for _, d in known if d[i] is not None), None) for i in range(len(first))]
    return Made(net.Concat(axis=axis), ((*others[:at], total, *others[at + 1 :]),))


def slice_(given: Given) -> Made | None:
    view, dims = given.inside("slice_param"), given.first
    if dims is None:
        return None
    axis = given.axis(view, "axis", dims, "slice_dim")
    size = dims[axis - 1] if axis is not None else None
    if axis is None or size is None:
        return None
    points = tuple(int(n) for n in view.numbers("slice_point"))
    if points and len(points) != given.tops - 1:
        given.wrong(
            view, "slice_point", f"{len(points)} `slice_point` for {given.tops} tops", "give one fewer than tops"
        )
        return None
    if not points and size % given.tops:
        given.wrong(view, "axis", f"{given.tops} tops don't divide {size} evenly", "give `slice_point`")
        return None
    edges = [0, *(points or [size // given.tops * i for i in range(1, given.tops)]), size]
    sizes = tuple(b - a for a, b in pairwise(edges))
    if min(sizes) < 1:
        given.wrong(view, "slice_point", f"the points don't ascend between 0 and {size}", "each is where a top ends")
        return None
    return Made(net.Slice(axis=axis, points=points), tuple((*dims[: axis - 1], n, *dims[axis:]) for n in sizes))


def split(given: Given) -> Made:
    return Made(net.Split(), (given.first,) * given.tops)


def eltwise(given: Given) -> Made | None:
    view = given.inside("eltwise_param")
    operation, coeff = net.Operation(view.text("operation")), view.numbers("coeff")
    if coeff and operation is not net.Operation.SUM:
        given.wrong(view, "coeff", f"`coeff` is for SUM, not for {operation.value}", "take it out")
    elif coeff and len(coeff) != len(given.bottoms):
        given.wrong(view, "coeff", f"{len(coeff)} `coeff` for {len(given.bottoms)} bottoms", "give one for each")
    for name, dims in zip(given.bottoms[1:], given.dims[1:], strict=True):
        if dims is not None and given.first is not None and not alike(dims, given.first):
            message = f"bottom {shown(name)} is {text(dims)}, and {given.bottom()} is {text(given.first)}"
            given.fail(message, "they have to be alike")
            return None
    known = next((dims for dims in given.dims if dims is not None and None not in dims), given.first)
    return Made(net.Eltwise(operation=operation, coeff=tuple(given.single(view, "coeff", c) for c in coeff)), (known,))


def flatten(given: Given) -> Made | None:
    view, dims = given.inside("flatten_param"), given.first
    if dims is None:
        return None
    start, end = given.axis(view, "axis", dims), given.axis(view, "end_axis", dims)
    if start is None or end is None:
        return None
    if end < start:
        given.wrong(view, "end_axis", f"`end_axis` is before axis {start}", "-1: the last one")
        return None
    top = (*dims[: start - 1], volume(dims[start - 1 : end]), *dims[end:])
    return Made(net.Reshape(axis=start, behind=len(dims) - end), (top,))


def reshape(given: Given) -> Made | None:
    """With the images' axis, of which nothing is known but that it stays: `?` stands for it."""
    view, dims = given.inside("reshape_param"), given.first
    if dims is None:
        return None
    wanted = [int(n) for n in view.inside("shape").numbers("dim")]
    start, count = view.whole("axis") or 0, view.whole("num_axes")
    rank = len(dims) + 1
    start = start + rank + 1 if start < 0 else start
    end = rank if count is None or count == -1 else start + count
    if not 0 <= start <= end <= rank:
        given.wrong(view, "axis", f"the axes of {text(dims)} are 1 to {len(dims)}", "leave `axis` and `num_axes` out")
        return None
    around: tuple[Size, ...] = (IMAGE, *dims)
    new = [*around[:start], *(_copied(n, around, start + i) for i, n in enumerate(wanted)), *around[end:]]
    if len(new) > MOST_AXES:
        given.wrong(view, "shape", f"a shape of {len(new)} axes", f"Caffe's have at most {MOST_AXES}")
        return None
    if new.count(INFER) > 1 or BAD in new:
        message = "more than one `dim: -1`" if BAD not in new else "a `dim: 0` copies an axis that the bottom has not"
        given.wrong(view, "shape", message, "`dim: 0` copies, one `dim: -1` takes the rest")
        return None
    return _reshaped(given, view, dims, new, net.Reshape(axis=start, sizes=tuple(wanted), behind=rank - end))


def _copied(size: int, around: tuple[Size, ...], at: int) -> Size:
    if size == 0:
        return around[at] if at < len(around) else BAD
    return size if size >= -1 else BAD


def _reshaped(given: Given, view: View, dims: Dims, new: list[Size], settings: net.Reshape) -> Made | None:
    """The top, where the images' axis stays the first."""
    total = volume(dims)
    inner = new[1:]
    if new and new[0] == INFER and total is not None and volume(tuple(inner)) == total:
        new[0] = IMAGE
        settings = replace(settings, sizes=(0, *settings.sizes[1:]))
    if not new or new[0] != IMAGE or IMAGE in inner:
        given.wrong(view, "shape", "the first axis is that of the images, and has to stay", "begin with `dim: 0`")
        return None
    if INFER in inner:
        at = inner.index(INFER)
        rest = volume(tuple(inner[:at] + inner[at + 1 :]))
        if total is None or rest is None:
            inner[at] = None
        elif rest == 0 or total % rest:
            message = f"{total} values of {text(dims)} can't be put in `-1` x {rest}"
            given.wrong(view, "shape", message, f"the other `dim` have to divide {total}")
            return None
        else:
            inner[at] = total // rest
    now = volume(tuple(inner))
    if now is not None and total is not None and now != total:
        message = f"{text(tuple(inner))} has {now} values, and bottom {given.bottom()} has {total}"
        given.wrong(view, "shape", message, "write `dim: -1` for one of them")
        return None
    return Made(settings, (tuple(inner),))


def silence(given: Given) -> Made:
    return Made(net.Silence(), ())
