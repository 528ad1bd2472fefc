"""A net prototxt of Caffe's -> `base.net.Net`. `text` reads it, `upgrade` turns older forms into today's, `phases` filters, `layers` has one
function and one row for each type of layer, `resolve` follows the maps through them. Pure."""

from stagerun.language.net.phases import State
from stagerun.language.net.resolve import net_of, resolve
from stagerun.language.net.text import ImageReader, NetText, read

__all__ = ["ImageReader", "NetText", "State", "net_of", "read", "resolve"]
