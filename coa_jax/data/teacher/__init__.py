"""A multi-agent system, and the conversion of its runs into trajectories."""
