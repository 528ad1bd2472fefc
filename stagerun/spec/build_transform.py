"""A checked `transform_param` -> recipe.Transform. Pure."""

from stagerun import recipe
from stagerun.spec.view import View


def transform(view: View) -> recipe.Transform:
    aspect, resize = view.view("random_aspect_ratio_param"), view.view("random_resize_param")
    crop, jitter = view.view("random_resized_crop_param"), view.view("color_jitter_param")
    augment, ramp = view.view("rand_augment_param"), view.view("crop_size_ramp_param")
    return recipe.Transform(
        scale=number(view, "scale"),
        mirror=view.flag("mirror"),
        crop_size=view.whole("crop_size"),
        mean_value=view.numbers("mean_value"),
        pad=whole(view, "pad"),
        random_aspect_ratio=_aspect_ratio(aspect) if aspect else None,
        random_resize=_resize(resize) if resize else None,
        pad_mode=recipe.PadMode(view.text("pad_mode")),
        random_resized_crop=_resized_crop(crop) if crop else None,
        channel_order=recipe.ChannelOrder(view.text("channel_order")),
        std_value=view.numbers("std_value"),
        cutout_size=whole(view, "cutout_size"),
        lighting_std=number(view, "lighting_std"),
        color_jitter=_color_jitter(jitter) if jitter else None,
        rand_augment=_rand_augment(augment) if augment else None,
        trivial_augment=view.flag("trivial_augment"),
        rectangular=view.flag("rectangular"),
        crop_size_ramp=_crop_size_ramp(ramp) if ramp else None,
    )


def evaluation_transform(transform: recipe.Transform) -> recipe.Transform:
    """The transform of an evaluation that has none of its own: nothing drawn at random, and crop_size from the start."""
    return recipe.Transform(
        scale=transform.scale,
        crop_size=transform.crop_size,
        mean_value=transform.mean_value,
        channel_order=transform.channel_order,
        std_value=transform.std_value,
    )


def _aspect_ratio(view: View) -> recipe.RandomAspectRatio:
    return recipe.RandomAspectRatio(
        min_area_ratio=number(view, "min_area_ratio"),
        max_area_ratio=number(view, "max_area_ratio"),
        aspect_ratio_change=number(view, "aspect_ratio_change"),
        max_attempt=whole(view, "max_attempt"),
        interp_mode=_interp_mode(view),
    )


def _resize(view: View) -> recipe.RandomResize:
    longest = view.whole("max_size")
    return recipe.RandomResize(
        min_size=whole(view, "min_size"),
        max_size=whole(view, "min_size") if longest is None else longest,
        interp_mode=_interp_mode(view),
    )


def _resized_crop(view: View) -> recipe.RandomResizedCrop:
    return recipe.RandomResizedCrop(
        min_area_ratio=number(view, "min_area_ratio"),
        max_area_ratio=number(view, "max_area_ratio"),
        min_aspect_ratio=number(view, "min_aspect_ratio"),
        max_aspect_ratio=number(view, "max_aspect_ratio"),
        max_attempt=whole(view, "max_attempt"),
        interp_mode=_interp_mode(view),
    )


def _color_jitter(view: View) -> recipe.ColorJitter:
    return recipe.ColorJitter(
        brightness=number(view, "brightness"),
        contrast=number(view, "contrast"),
        saturation=number(view, "saturation"),
        hue=number(view, "hue"),
    )


def _rand_augment(view: View) -> recipe.RandAugment:
    return recipe.RandAugment(
        num_ops=whole(view, "num_ops"),
        magnitude=whole(view, "magnitude"),
        num_magnitude_bins=whole(view, "num_magnitude_bins"),
    )


def _crop_size_ramp(view: View) -> recipe.CropSizeRamp:
    return recipe.CropSizeRamp(
        start_size=whole(view, "start_size"),
        start_epoch=number(view, "start_epoch"),
        end_epoch=number(view, "end_epoch"),
        multiple=whole(view, "multiple"),
    )


def _interp_mode(view: View) -> recipe.InterpMode:
    return recipe.InterpMode(view.inside("resize_param").text("interp_mode"))


def number(view: View, name: str) -> float:
    """A number that is there, or has a default."""
    value = view.number(name)
    assert value is not None, name
    return value


def whole(view: View, name: str) -> int:
    """A whole number that is there, or has a default."""
    value = view.whole(name)
    assert value is not None, name
    return value
