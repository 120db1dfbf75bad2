"""Rollouts by a vLLM server in place of our own sampler."""
