"""What a run tells a person."""
