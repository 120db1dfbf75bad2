"""A dense transformer and where its arrays live."""
