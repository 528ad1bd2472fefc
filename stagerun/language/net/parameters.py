"""The parameters of a phase's layers: their rates, their limits, and which of them layers share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from stagerun.base import net
from stagerun.base.errors import Span
from stagerun.language.lexer import shown
from stagerun.language.net.given import LARGEST, TOO_LARGE, NewBlob, text, volume
from stagerun.language.tree import Block
from stagerun.language.view import View

RATES = ("lr_mult", "decay_mult")


class Fail(Protocol):
    """Adds a mistake in a layer."""

    def __call__(self, place: Span, name: str, message: str, hint: str = "") -> None: ...


class Parameters:
    """Those there are while the layers are gone through, by name. `places`: of the layers that have them first."""

    def __init__(self, fail: Fail) -> None:
        self.fail = fail
        self.blobs: dict[str, net.Blob] = {}
        self.places: dict[str, Span] = {}
        self.shared: dict[str, tuple[net.Blob, Block]] = {}
        self.rated: dict[tuple[str, str], int] = {}  # the line of the layer that says a multiplier of a shared one
        self.unknown = False  # the size of one is not known

    def of(self, block: Block, layer: str, kind: str, new: Sequence[NewBlob]) -> tuple[net.Blob, ...]:
        """Those of a layer, with the rates of `param`, and the names of shared ones. `layer`: its name, which may be ''."""
        name = layer or kind
        params = list(View(block).views("param"))
        statistics = 3 if kind == "BatchNorm" else 0
        if len(params) > len(new) + statistics:
            place = block.entries["param"].name
            message = f"{len(params)} `param`, and the layer has {len(new) + statistics} parameters"
            self.fail(place, name, message, "remove those too many")
        for param in params[:statistics]:
            if param.text("name"):
                self.fail(
                    param.place("name"), name, "statistics that layers share are not built", "take the `name` out"
                )
        params = params[statistics:]
        found = []
        for i, blob in enumerate(new):
            size = volume(blob.dims)
            if None in blob.dims:
                self.unknown = True
            if size is not None and size > LARGEST:
                self.fail(block.place, name, f"its {blob.name} has {size} values, more than {LARGEST}", TOO_LARGE)
            shape = tuple(n or 0 for n in blob.dims)
            made = net.Blob(name=f"{layer}.{blob.name}", shape=shape, filler=blob.filler)
            found.append(self._with_param(made, params[i] if i < len(params) else None, block, name))
        for made in found:
            self.blobs.setdefault(made.name, made)
            self.places.setdefault(made.name, block.place)
        return tuple(found)

    def _with_param(self, blob: net.Blob, param: View | None, block: Block, name: str) -> net.Blob:
        if param is None:
            return blob
        lr, decay = (param.number(field) or 0.0 for field in RATES)
        blob = replace(blob, lr_mult=lr, decay_mult=decay)
        shared = param.text("name")
        if not shared:
            return blob
        written = [field for field in RATES if param.has(field)]
        if shared not in self.shared:
            self.shared[shared] = blob, block
            self.rated |= {(shared, field): block.place.line for field in written}
            return blob
        owner, first = self.shared[shared]
        place, line = param.place("name"), first.place.line
        if 0 in blob.shape or 0 in owner.shape:
            return replace(blob, name=owner.name)
        permissive = param.text("share_mode") == "PERMISSIVE"
        if blob.shape != owner.shape and not (permissive and volume(blob.shape) == volume(owner.shape)):
            message = f"parameter {shown(shared)} is {text(blob.shape)} here and {text(owner.shape)} in line {line}"
            self.fail(place, name, message, "shared parameters have one shape")
        for field in written:
            if (shared, field) not in self.rated:  # the first layer that says it counts for all
                self.rated[shared, field] = block.place.line
                owner = replace(owner, lr_mult=lr) if field == "lr_mult" else replace(owner, decay_mult=decay)
            elif getattr(owner, field) != getattr(blob, field):
                message = f"`{field}` of {shown(shared)} is another in line {self.rated[shared, field]}"
                self.fail(param.place(field), name, message, "give one")
        self.shared[shared] = owner, first
        return replace(blob, name=owner.name, filler=owner.filler)

    def settled(self, layers: Sequence[net.Layer]) -> tuple[net.Layer, ...]:
        """The layers with the multipliers that those sharing a parameter come to."""
        owners = {owner.name: owner for owner, _ in self.shared.values()}

        def with_rates(blob: net.Blob) -> net.Blob:
            owner = owners.get(blob.name, blob)
            return replace(blob, lr_mult=owner.lr_mult, decay_mult=owner.decay_mult)

        return tuple(replace(layer, blobs=tuple(map(with_rates, layer.blobs))) for layer in layers)
