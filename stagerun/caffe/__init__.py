"""Caffe's nets, weights, solver states and solver folders: a wing. A net's text -> values (`text`, `resolve`) -> a torch module (`network`).
A type of layer is a class in `layers` or `map_layers`, and a row of `functions` that computes it."""
