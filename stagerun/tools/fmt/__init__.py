"""`stagerun fmt DIR`: solver files in one style (`style`), in place (`command`)."""
