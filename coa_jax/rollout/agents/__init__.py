"""Agents with their own loop: the policy answers their requests in OpenAI's format."""
