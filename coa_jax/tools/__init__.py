"""Execution of tool calls."""
