"""`stagerun new`: a schedule for one's own images, from the gallery. `fitted` changes the lines of a gallery file; pure."""
