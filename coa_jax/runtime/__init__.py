"""Everything about a run that is not machine learning."""
