"""Where tasks and trajectories come from."""
