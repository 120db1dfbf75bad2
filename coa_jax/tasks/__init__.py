"""What is asked, and how an answer earns reward."""
