"""A run's infrastructure, without machine learning."""
