"""A dense transformer and the placement of its arrays."""
