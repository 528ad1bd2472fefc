"""`stagerun explain`: where a setting came from, and what it means. `history` follows a field through the files; pure."""
