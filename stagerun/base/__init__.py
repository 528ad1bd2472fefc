"""Values that know nothing of disks, clocks or machines: errors, text, units, events, the recipe, the order of images. Stdlib only.

Everything may import from here; nothing here imports another folder. An event of a run is a class in `events`; a setting of a stage is a field
in `recipe`, and the language says how it is written.
"""
