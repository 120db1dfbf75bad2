"""Finished studies with their results."""
