"""Sinks for events: what rank 0 shows and stores. Nothing flows back from here."""
