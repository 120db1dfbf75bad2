"""A real multi-agent system, and what turns its runs into trajectories."""
