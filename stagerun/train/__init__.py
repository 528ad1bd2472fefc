"""Walks a Plan. The only package that imports plan, store, data and engine."""
