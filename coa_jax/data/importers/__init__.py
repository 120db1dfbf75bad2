"""Other people's records as this project's trajectories."""
