"""Tokens out of the model, tools in between."""
