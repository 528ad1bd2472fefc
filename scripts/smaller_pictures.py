"""For scripts/pictures: the PNGs and the report's curves of folder A as small files in folder B."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from stagerun.drawing.colours import DARK
from stagerun.drawing.html import variable

WIDEST = 1000  # pixels
END = {"mistakes.png": 454}  # pixels from the top: three rows of the sheet are enough
COLOURS = {"confusion.png": 256}  # sheets are grey, and 32 are enough
SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def small(name: str, picture: Image.Image) -> Image.Image:
    if picture.width > WIDEST:
        picture = picture.resize((WIDEST, picture.height * WIDEST // picture.width), Image.Resampling.LANCZOS)
    return (
        picture.crop((0, 0, picture.width, END.get(name, picture.height)))
        .convert("RGB")
        .quantize(COLOURS.get(name, 32))
    )


def curves(page: str) -> bytes:
    """The report's wide picture as a file on white, without its last panel: images per second are never twice the same."""
    found = re.search(r'<div class="wide">(<svg.*?</svg>)', page, re.S)
    assert found
    text = found[1].replace("<svg", f'<svg xmlns="{SVG}" xmlns:xlink="http://www.w3.org/1999/xlink"', 1)
    for colour in DARK:
        text = text.replace(f"var({variable(colour)})", colour)
    svg = ElementTree.fromstring(text)
    figure = next(group for group in svg if group.get("id") == "figure_1")
    panels = [group for group in figure if str(group.get("id")).startswith("axes_")]
    figure.remove(panels[-1])
    lowest = max(float(y) for y in re.findall(r'\by="([\d.]+)"', ElementTree.tostring(figure, "unicode")))
    width, height = svg.attrib["viewBox"].split()[2], str(round(lowest + 14))
    svg.attrib.pop("aria-label")
    svg.attrib |= {"viewBox": f"0 0 {width} {height}", "width": f"{width}pt", "height": f"{height}pt"}
    svg.insert(0, ElementTree.Element("rect", width=width, height=height, fill="#ffffff"))
    return ElementTree.tostring(svg) + b"\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    for file in sorted(source.glob("*.png")):
        small(file.name, Image.open(file)).save(target / file.name, optimize=True)
    (target / "report.svg").write_bytes(curves((source / "report.html").read_text()))
