"""`stagerun new`: a schedule for one's own images, from the gallery."""
