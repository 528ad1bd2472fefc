"""Tests on several hosts made of namespaces: `scripts/dev cluster`."""
