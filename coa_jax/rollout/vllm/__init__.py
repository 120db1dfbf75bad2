"""Rollouts on a vLLM server instead of our own sampler."""
