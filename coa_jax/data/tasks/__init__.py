"""Tasks: questions, accepted answers, and their sources."""
