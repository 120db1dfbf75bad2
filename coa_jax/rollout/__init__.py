"""Rollouts: samples trajectories from the model and runs their tool calls."""
