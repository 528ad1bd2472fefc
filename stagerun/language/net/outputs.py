"""Layers at a net's end: softmax, loss, accuracy."""

from stagerun.base import net
from stagerun.language.net.given import Given, Made, text, volume
from stagerun.language.view import View


def softmax(given: Given) -> Made | None:
    view, dims = given.inside("softmax_param"), given.first
    axis = 1 if dims is None else given.axis(view, "axis", dims)
    return None if axis is None else Made(net.Softmax(axis=axis), (dims,))


def softmax_with_loss(given: Given) -> Made | None:
    loss = given.inside("loss_param")
    if given.inside("softmax_param").whole("axis") != 1:
        given.wrong(given.inside("softmax_param"), "axis", "the classes are along axis 1", "take it out")
    _labels(given)
    weights = View(given.block).numbers("loss_weight")
    if weights and len(weights) != max(1, given.tops):
        given.wrong(
            View(given.block), "loss_weight", f"{len(weights)} `loss_weight` for {given.tops} tops", "give one for each"
        )
    if len(weights) > 1 and weights[1]:
        given.wrong(View(given.block), "loss_weight", "the second top is no loss", "write `loss_weight: 0`")
    if loss.has("normalization") or not loss.has("normalize"):
        normalization = net.Normalization(loss.text("normalization"))
    else:
        normalization = net.Normalization.VALID if loss.flag("normalize") else net.Normalization.BATCH_SIZE
    smoothing = given.number(loss, "label_smoothing")
    hint = "it is the share that all classes have alike"
    given.require(loss, "label_smoothing", smoothing, 0 <= smoothing < 1, "at least 0 and below 1", hint)
    settings = net.SoftmaxWithLoss(
        loss_weight=given.single(View(given.block), "loss_weight", weights[0]) if weights else 1.0,
        ignore_label=loss.whole("ignore_label"),
        normalization=normalization,
        pre_fixed_normalizer=given.number(loss, "pre_fixed_normalizer"),
        label_smoothing=smoothing,
    )
    return Made(settings, ((), given.first)[: given.tops])


def accuracy(given: Given) -> Made | None:
    view = given.inside("accuracy_param")
    top_k, dims = view.whole("top_k") or 0, given.first
    _labels(given)
    if view.whole("axis") != 1:
        given.wrong(view, "axis", "the classes are along axis 1", "take it out")
    if not top_k or (dims and dims[0] is not None and top_k > dims[0]):
        given.wrong(
            view, "top_k", f"`top_k: {top_k}` of {dims[0] if dims else 0} classes", "at least 1, at most all of them"
        )
    return Made(net.Accuracy(top_k=top_k, ignore_label=view.whole("ignore_label")), ((), None)[: given.tops])


def _labels(given: Given) -> None:
    labels = given.dims[1]
    if labels and (volume(labels) or 1) != 1:
        given.fail(f"bottom {given.bottom(1)}, {text(labels)}, is no label", "the labels are the second bottom")
