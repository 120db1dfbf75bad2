"""An offline seeded world: its pages, and questions over them."""
