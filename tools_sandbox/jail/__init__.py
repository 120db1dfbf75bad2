"""Builds a jail and runs inside it; the files import each other by bare names."""
