"""What a loss is made of, and what it asks for."""
