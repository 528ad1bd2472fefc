"""Tests on several hosts made of namespaces: `scripts/test-cluster`, or by hand `python tests/cluster`."""
