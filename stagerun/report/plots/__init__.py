"""A `plan.picture.Picture` drawn: in a terminal, by matplotlib, as a page. Nothing here is imported before it is asked for."""
