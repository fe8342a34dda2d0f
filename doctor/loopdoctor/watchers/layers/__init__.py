"""What the parts of a model see: masks, padding, documents, dropout."""
