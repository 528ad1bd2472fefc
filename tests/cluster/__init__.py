"""Tests on several hosts made of namespaces: `scripts/test-cluster`."""
