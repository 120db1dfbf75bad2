"""An offline seeded world: its pages and the questions over them."""
